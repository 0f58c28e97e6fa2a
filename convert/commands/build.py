"""convert-moss build: checkpoint -> .om files in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.bucket_options import bucket_options, chosen_target, run_options, split_names, target_options

if TYPE_CHECKING:
    from convert.build import BuildRequest


@click.command()
@click.argument("checkpoint")
@click.option("--codec", required=True, help="Directory or hub id of the audio tokenizer checkpoint.")
@click.option(
    "--out", "directory", required=True, type=click.Path(path_type=Path, file_okay=False), help="artifacts/<name>"
)
@target_options
@bucket_options
@run_options
@click.option("--max-positions", default=4096, show_default=True, help="Rows that prompt and frames may take together.")
@click.option("--dry-run", is_flag=True, help="List what would run, and why.")
@click.option(
    "--script", type=click.Path(path_type=Path, dir_okay=False), help="End with a bash script instead of ATC."
)
@click.option("--json", "as_json", is_flag=True, help="Print the steps or the results as JSON.")
def build(
    checkpoint: str,
    codec: str,
    directory: Path,
    target: str,
    precision: str | None,
    keep_fp32: Path | None,
    graphs: str,
    jobs: int,
    timeout_minutes: float,
    force: bool,
    max_positions: int,
    dry_run: bool,
    script: Path | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Export CHECKPOINT, patch and check its graphs, and compile them; a stage whose inputs are unchanged is skipped.

    An interrupted run loses only what it was making: run the same command again to go on.

    Example: convert-moss build checkpoints/nano/model --codec checkpoints/nano/codec --out artifacts/nano --dry-run
    """
    from convert.atc import Buckets
    from convert.atc_keep import KeepList
    from convert.build import BuildRequest

    request = BuildRequest(
        checkpoint,
        codec,
        directory,
        chosen_target(target, precision),
        Buckets(**sizes),
        max_positions,
        tuple(split_names(graphs)),
        KeepList.read(keep_fp32) if keep_fp32 else None,
        force,
    )
    if dry_run:
        _list_steps(request, as_json)
    else:
        _run(request, script, jobs, timeout_minutes * 60, as_json)


def _list_steps(request: BuildRequest, as_json: bool) -> None:
    import dataclasses

    from convert.atc_plan import Compiler
    from convert.atc_run import find_atc
    from convert.build import plan_build

    environment = find_atc()
    steps = plan_build(request, environment.compiler if environment else Compiler())
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(step) for step in steps], indent=1))
    else:
        click.echo("\n".join(map(str, steps)))
    if environment is None:
        click.echo("note: no CANN here; the atc steps need a machine with CANN, or --script build_om.sh", err=True)


def _run(request: BuildRequest, script: Path | None, jobs: int, timeout_s: float, as_json: bool) -> None:
    from convert.atc_plan import Compiler, plan_as_data
    from convert.atc_run import find_atc, require_atc
    from convert.atc_table import raise_if_incomplete, result_lines
    from convert.build import compile_stage, run_stages, script_stage

    def progress(line: str) -> None:
        click.echo(line, err=True)

    environment = find_atc()
    manifest, plan = run_stages(request, progress, environment.compiler if environment else Compiler())
    if script is not None:
        click.echo(f"{script}: compiles {script_stage(plan, script)} graphs", err=True)
        return
    results = compile_stage(manifest, plan, environment or require_atc(), progress, jobs, timeout_s)
    if as_json:
        click.echo(json.dumps({**plan_as_data(plan), "results": [r.to_dict() for r in results]}, indent=1))
    else:
        click.echo("\n".join(result_lines(plan, results)))
    for result in results:
        if result.explanation is not None:
            progress(str(result.explanation))
    raise_if_incomplete(plan, results)
