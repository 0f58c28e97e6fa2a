"""convert-moss sfx-plan: memory per part, whether it fits, and the ATC runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.sfx_options import plan_options

if TYPE_CHECKING:
    from convert.sfx_plan import MemoryPlan, SfxBuild
    from runtime.sfx.graphs import SfxPlan


@click.command("sfx-plan")
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--codec", type=click.Path(path_type=Path, file_okay=False), help="Codec checkpoint; else as published.")
@plan_options
@click.option("--hbm-gib", default=32.0, show_default=True, help="Memory of the card.")
@click.option("--target", help="ATC target of an artifacts directory  [default: 910B4, CANN 8.5, precision origin]")
@click.option("--script", type=click.Path(path_type=Path, dir_okay=False), help="Write the ATC runs as a bash script.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sfx_plan(
    directory: Path | None,
    codec: Path | None,
    hbm_gib: float,
    target: str | None,
    script: Path | None,
    as_json: bool,
    **numbers: Any,
) -> None:
    """Plan the parts on a device. DIRECTORY: artifacts, a checkpoint (only config.json is read), or none: as published.

    For artifacts, the sizes are those of the export, and the ATC runs are planned and checked too. --script first
    lowers what the target does not take, as convert-moss patch does.

    Example: convert-moss sfx-plan --capacity 1024        convert-moss sfx-plan artifacts/sfx --script build_sfx.sh
    """
    from convert.sfx_patch import patch_parts
    from convert.sfx_plan import DEFAULT_TARGET, GIB, atc_builds, atc_script, configs_of, memory_plan
    from op_patches.targets import Target
    from runtime.errors import AtcError
    from runtime.manifest import write_atomically
    from runtime.sfx.graphs import SfxPlan

    config, codec_config, manifest = configs_of(directory, codec)
    plan = SfxPlan(**numbers) if manifest is None else manifest.plan
    memory = memory_plan(config, codec_config, plan, int(hbm_gib * GIB))
    if manifest is None and (script is not None or target is not None):
        raise AtcError("--script and --target need an artifacts directory; run convert-moss sfx-export first")
    builds = []
    if manifest is not None:
        chosen = Target.parse(target or DEFAULT_TARGET)
        if script is not None:
            click.echo("comparing every file with its recorded hash", err=True)
            manifest.check_files()
        builds = atc_builds(manifest, chosen, patch_parts(manifest, chosen) if script is not None else None)
    click.echo(json.dumps(_facts(memory, plan, builds)) if as_json else _text(memory, plan, builds))
    if script is not None:
        write_atomically(script, atc_script(builds))
        script.chmod(0o755)
        click.echo(f"{script}: {len(builds)} ATC runs", err=True)


def _facts(memory: MemoryPlan, plan: SfxPlan, builds: list[SfxBuild]) -> dict[str, Any]:
    totals = {"codec_on_cpu": memory.total(False), "codec_on_device": memory.total(True)}
    return {
        "plan": dataclasses.asdict(plan),
        "parts": [dataclasses.asdict(p) for p in memory.parts],
        "host_bytes": memory.host_bytes,
        "hbm_bytes": memory.hbm_bytes,
        "total_bytes": totals,
        "fits": {name: memory.fits(total) for name, total in totals.items()},
        "atc": [{"graph": b.name, "argv": b.argv, "ready": b.readiness.ready} for b in builds],
    }


def _text(memory: MemoryPlan, plan: SfxPlan, builds: list[SfxBuild]) -> str:
    from convert.sfx_plan import GIB, RESERVE_BYTES

    def gib(num_bytes: int) -> str:
        return f"{num_bytes / GIB:9.3f}"

    def verdict(total: int) -> str:
        return f"{gib(total)} GiB: {'fits' if memory.fits(total) else 'DOES NOT FIT'} {memory.hbm_bytes / GIB:g} GiB"

    lines = [
        f"{plan.dtype}, {plan.rows} rows per launch, capacity {plan.capacity} rows; GiB on the device:",
        f"{'part':<14}{'weights':>9}{'cache':>9}{'in/out':>9}{'work':>9}",
        *(f"{p.name:<14}{gib(p.weights)}{gib(p.cache)}{gib(p.io)}{gib(p.workspace)}" for p in memory.parts),
        f"codec on the CPU:    {verdict(memory.total(with_codec=False))}",
        f"codec on the device: {verdict(memory.total(with_codec=True))}",
        f"with a second set of blocks, one for prompts: {verdict(memory.total_with_weights_twice())}, codec on the CPU",
        f"Totals hold the largest work space, an estimate, and {RESERVE_BYTES / GIB:g} GiB, assumed, for the driver.",
        f"The embedding tables, {memory.host_bytes / GIB:.3f} GiB, stay on the host.",
    ]
    for build in builds:
        lines += ["", build.line, "  " + " \\\n    ".join(build.argv)]
    return "\n".join(lines)
