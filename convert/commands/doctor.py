"""convert-moss doctor: is this checkpoint usable; is CANN here and does it work."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--cann", is_flag=True, help="Examine the CANN installation instead; exit 3 when there is none.")
@click.option("--target", help="With --cann: what it should compile for, such as 910B4 or cann=8.5,soc=Ascend910B4.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(checkpoint: str | None, cann: bool, target: str | None, as_json: bool) -> None:
    """Examine CHECKPOINT, the directory or hub id of a language model or a codec. Exit 1 when a finding blocks.

    With --cann examine the CANN installation: exit 0 when ATC can run, 1 when a fault is in its way, 3 without CANN.

    Example: convert-moss doctor checkpoints/nano/model
    """
    if cann == (checkpoint is not None):
        raise click.UsageError("give a checkpoint, or --cann")
    if target is not None and not cann:
        raise click.UsageError("--target goes with --cann")
    if checkpoint is None:
        from convert.cann_doctor import examine_cann
        from op_patches.targets import Target

        report = examine_cann(Target.parse(target) if target else None)
        click.echo(json.dumps(report.to_dict(), indent=1) if as_json else "\n".join(report.lines()))
        sys.exit(report.exit_code)
    from convert.doctor import doctor_lines, doctor_report

    facts, examined = doctor_report(checkpoint)
    if as_json:
        click.echo(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        click.echo("\n".join(doctor_lines(examined)))
    sys.exit(1 if examined.blocked else 0)
