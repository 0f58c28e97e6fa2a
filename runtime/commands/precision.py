"""run-om precision: what can a device reach in fp16, mixed, bf16 or hf32, and what has to stay float32?

The one command of run-om that needs the lowerings (op_patches, with ONNX); it runs on a host.
"""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Any

import click

from runtime.parity_record import DEFAULT_FRAMES

_FILE = click.Path(path_type=Path, dir_okay=False)
_TEXT = "The quick brown fox jumps over the lazy dog, and then it takes a short rest in the sun."


@click.command()
@click.argument("artifacts", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--mode", "mode_name", default="fp16", show_default=True, type=click.Choice(["fp16", "mixed", "bf16", "hf32"])
)
@click.option("--target", default="910B4", show_default=True, help="CANN and SoC, as convert-moss patch takes it.")
@click.option("--text", "texts", multiple=True, default=[_TEXT], help="What to speak; more of them widen --search.")
@click.option("--voice", type=_FILE, help="Reference clip.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--frames", default=DEFAULT_FRAMES, show_default=True, type=click.IntRange(1), help="At most; 80 ms each."
)
@click.option("--keep", "keep_path", type=_FILE, help="Keep list: nodes that stay float32.")
@click.option("--search", is_flag=True, help="Find a minimal keep list that reaches an agreement.")
@click.option("--reach", default=1.0, show_default=True, type=click.FloatRange(0, 1), help="Share of equal codes.")
@click.option("--limit", default=80, show_default=True, type=click.IntRange(1), help="Runs that the search may take.")
@click.option("--keep-out", default="keep_fp32.txt", show_default=True, type=_FILE, help="Where --search writes it.")
@click.option("--threads", type=click.IntRange(1))
@click.option("--report", type=click.Path(path_type=Path, file_okay=False), help="Write precision.html and .json here.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON.")
def precision(artifacts: Path, **options: Any) -> None:
    """Emulate a precision mode of ATC on the CPU and compare with float32.

    Example: run-om precision artifacts/demo --mode fp16 --search --keep-out keep_fp32.txt
    """
    from op_patches.precision import Keep, Mode
    from op_patches.reduced_artifacts import ReducedArtifacts
    from op_patches.targets import Target
    from runtime.manifest import Manifest, write_atomically
    from runtime.parity_record import Plan
    from runtime.precision import FLOOR_GRAPHS, build_floor, record_reference
    from runtime.precision_report import floor_json, floor_lines, write_floor

    mode = Mode(options["mode_name"])
    target = Target.parse(f"{options['target']},precision={mode.atc}")
    keep = _read_keep(options["keep_path"])
    manifest = Manifest.load(artifacts)
    manifest.require_float32("a precision of a device")
    plans = [Plan(text, options["voice"], options["seed"], options["frames"]) for text in options["texts"]]
    recorded = [record_reference(manifest, plan, options["threads"]) for plan in plans]
    references, (reference, feeds) = [r for r, _ in recorded], recorded[0]
    click.echo(f"float32: {sum(len(r.replay_codes) for r in references)} frames", err=True)
    with tempfile.TemporaryDirectory(prefix="moss-precision-") as scratch:
        reduced = ReducedArtifacts(manifest, Path(scratch), mode, target, FLOOR_GRAPHS)
        search = None
        if options["search"]:
            search = _search(reduced, references, options)
            keep = Keep(frozenset(search.names), frozenset(search.op_types))
        ranges = {graph: reduced.ranges(graph, feeds[graph], keep) for graph in FLOOR_GRAPHS if graph in feeds}
        command = _command_line(artifacts, options)
        floor, rounded = build_floor(
            reference, reduced.write(keep), mode.value, str(target), tuple(keep.lines().splitlines()), ranges, search,
            options["threads"], command,
        )  # fmt: skip
    if search is not None and keep.lines():
        note = f"# {command}\n# {search.agreement:.2%} of the codes agree, {search.agreement_without:.2%} without\n"
        write_atomically(options["keep_out"], note + keep.lines())
        click.echo(
            f"keep list: {options['keep_out']}; use it: convert-moss atc … --keep-fp32 {options['keep_out']}", err=True
        )
    if options["report"] is not None:
        click.echo(f"report: {write_floor(floor, options['report'], reference, rounded)}", err=True)
    click.echo(floor_json(floor) if options["as_json"] else "\n".join(floor_lines(floor)), nl=not options["as_json"])


def _read_keep(path: Path | None) -> Any:
    from op_patches.precision import NOTHING, Keep
    from runtime.errors import ParityError

    if path is None:
        return NOTHING
    try:
        return Keep.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ParityError(f"{path} is not a readable keep list ({error})") from error


def _search(reduced: Any, references: Any, options: dict[str, Any]) -> Any:
    from op_patches.precision import Keep
    from runtime.precision import SEARCH_GRAPHS, replay_agreement, search_keep

    def evaluate(names: frozenset[str], types: frozenset[str]) -> float:
        manifest = reduced.write(Keep(names, types), SEARCH_GRAPHS)
        return replay_agreement(references, manifest, options["threads"])

    nodes = reduced.reduced_nodes(SEARCH_GRAPHS)
    return search_keep(nodes, evaluate, options["reach"], options["limit"], lambda line: click.echo(line, err=True))


def _command_line(artifacts: Path, options: dict[str, Any]) -> str:
    words = ["run-om", "precision", str(artifacts)]
    names = {"mode_name": "mode", "keep_path": "keep", "texts": "text"}
    for key, given in options.items():
        if given is None or given is False or key == "as_json":
            continue
        for value in given if isinstance(given, tuple) else (given,):
            words.append("--" + names.get(key, key).replace("_", "-"))
            words += [] if value is True else [str(value)]
    return shlex.join(words)
