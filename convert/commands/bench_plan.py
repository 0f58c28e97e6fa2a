"""convert-moss bench-plan: the predicted cost of every graph on a device that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("bench-plan")
@click.argument("artifacts", type=click.Path(path_type=Path, file_okay=False))
@click.option("--target", default="910B4,precision=fp16", show_default=True, help="As of convert-moss check.")
@click.option("--savings", is_flag=True, help="Also each exact saving taken back: kernels before and after.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_plan(artifacts: Path, target: str, savings: bool, as_json: bool) -> None:
    """Predict kernels, bytes and time of ARTIFACTS per graph and per frame, with every assumption stated."""
    from convert.bench_plan import as_text, plan_speed
    from op_patches.targets import Target
    from runtime.manifest import Manifest

    manifest = Manifest.load(artifacts)
    manifest.require_float32("a device")
    plan = plan_speed(manifest, Target.parse(target), with_savings=savings)
    click.echo(json.dumps(plan.to_dict(), indent=1) if as_json else as_text(plan))
