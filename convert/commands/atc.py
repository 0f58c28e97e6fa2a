"""convert-moss atc: plan, script or run the ATC compilation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.bucket_options import bucket_options, chosen_target, run_options, split_names, target_options

if TYPE_CHECKING:
    from convert.atc_plan import AtcPlan
    from convert.atc_run import AtcEnvironment
    from runtime.manifest import Manifest


@click.command()
@click.argument("artifacts", type=click.Path(path_type=Path, file_okay=False))
@target_options
@bucket_options
@run_options
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--script", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan as a bash script.")
@click.option("--adopt", is_flag=True, help="Take the .om files that the script built into the manifest.")
@click.option("--explain", "log", type=click.Path(path_type=Path, dir_okay=False), help="Explain a log of ATC.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan and the results as JSON.")
def atc(
    artifacts: Path,
    target: str,
    precision: str | None,
    keep_fp32: Path | None,
    graphs: str,
    jobs: int,
    timeout_minutes: float,
    force: bool,
    dry_run: bool,
    script: Path | None,
    adopt: bool,
    log: Path | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Compile the graphs of ARTIFACTS to .om files for a target.

    --dry-run shows the plan and needs no CANN; --script writes it for a machine that has CANN but no Python packages.

    Example: convert-moss atc artifacts/nano --target 910B4 --script build_om.sh
    """
    from convert.atc import Buckets
    from convert.atc_keep import KeepList
    from convert.atc_plan import Compiler, plan_atc
    from convert.atc_run import explain_log, find_atc, require_atc
    from runtime.manifest import Manifest

    if sum((dry_run, adopt, script is not None, log is not None)) > 1:
        raise click.UsageError("--dry-run, --script, --adopt and --explain exclude each other")
    manifest = Manifest.load(artifacts)
    if log is not None:
        click.echo(explain_log(manifest, chosen_target(target, precision), log))
    elif adopt:
        _adopt(manifest)
    else:
        environment = find_atc() if dry_run or script is not None else require_atc()
        plan = plan_atc(
            manifest,
            chosen_target(target, precision),
            Buckets(**sizes),
            split_names(graphs),
            KeepList.read(keep_fp32) if keep_fp32 else None,
            environment.compiler if environment else Compiler(),
            force,
        )
        if dry_run or script is not None:
            _show(plan, script, as_json)
        else:
            assert environment is not None
            _compile(plan, manifest, environment, jobs, timeout_minutes * 60, as_json)


def _adopt(manifest: Manifest) -> None:
    from convert.atc_run import adopt_builds

    builds = adopt_builds(manifest)
    for build in builds:
        click.echo(f"{build.file}  CANN {build.versions['cann']}  sha256 {build.sha256[:16]}…")
    if not builds:
        click.echo("no new .om file with a record of the script", err=True)


def _show(plan: AtcPlan, script: Path | None, as_json: bool) -> None:
    from convert.atc_plan import plan_as_data
    from convert.atc_script import write_script
    from convert.atc_table import plan_lines

    if script is not None:
        count = write_script(plan, script)
        click.echo(f"{script}: compiles {count} graphs; keep it in this place relative to the artifacts", err=True)
    click.echo(json.dumps(plan_as_data(plan), indent=1) if as_json else "\n".join(plan_lines(plan)))


def _compile(
    plan: AtcPlan, manifest: Manifest, environment: AtcEnvironment, jobs: int, timeout_s: float, as_json: bool
) -> None:
    from convert.atc_plan import plan_as_data
    from convert.atc_run import run_plan
    from convert.atc_table import raise_if_incomplete, result_lines, table_lines

    for line in (*table_lines(plan), *([environment.note] if environment.note else [])):
        click.echo(line, err=True)
    results = run_plan(plan, manifest, environment, lambda line: click.echo(line, err=True), jobs, timeout_s)
    if as_json:
        click.echo(json.dumps({**plan_as_data(plan), "results": [r.to_dict() for r in results]}, indent=1))
    else:
        click.echo("\n".join(result_lines(plan, results)))
    for result in results:
        if result.explanation is not None:
            click.echo(str(result.explanation), err=True)
    raise_if_incomplete(plan, results)
