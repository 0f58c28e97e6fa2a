"""run-om inspect: interface, target, hashes, sizes, node and engine counts of a graph file or a directory."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--target", help="Predict the engine of every ONNX node for cann=…,soc=…,precision=… or a preset.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def inspect(path: Path, target: str | None, as_json: bool) -> None:
    """Show what PATH holds: an .om, an .onnx, or an artifacts directory.

    Example: run-om inspect artifacts/demo --target 910B4
    """
    from runtime.inspection import as_data, inspect_path

    report = inspect_path(path, target)
    click.echo(json.dumps(as_data(report), indent=1) if as_json else "\n".join(report.lines()))
