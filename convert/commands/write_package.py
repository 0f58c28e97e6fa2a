"""convert-moss write-package: a checkpoint in the form of the published ONNX package."""

from __future__ import annotations

import functools
from pathlib import Path

import click


@click.command("write-package")
@click.argument("model")
@click.option("--codec", required=True, help="Directory of the codec's checkpoint.")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Holds both directories.")
def write_package(model: str, codec: str, out: Path) -> None:
    """Write MODEL and its codec with the graphs of the published ONNX package: dynamic axes, growing cache.

    A stand-in for that package, for run-om bench --baseline, run-om say --as-published and convert-moss import-onnx.

    Example: convert-moss write-package checkpoints/made_up/model --codec checkpoints/made_up/codec --out package
    """
    from convert.published_package import write_published_package

    click.echo(write_published_package(model, codec, out, report=functools.partial(click.echo, err=True)))
