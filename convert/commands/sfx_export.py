"""convert-moss sfx-export: MOSS-SoundEffect -> ONNX graphs in parts, with sfx.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from convert.commands.sfx_options import plan_options


@click.command("sfx-export")
@click.argument("checkpoint", type=click.Path(path_type=Path, file_okay=False))
@click.option("--codec", required=True, type=click.Path(path_type=Path, file_okay=False), help="The 24 kHz codec.")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="artifacts/<name>")
@plan_options
def sfx_export(checkpoint: Path, codec: Path, out: Path, **numbers: Any) -> None:
    """Export the language model CHECKPOINT in blocks of layers, its heads, and the codec's decoder.

    One tensor is in memory at a time; at full size the output takes 20 GB of disk. float32 and float16 graphs are
    compared with torch on the way.

    Example: convert-moss sfx-export checkpoints/sfx/model --codec checkpoints/sfx/codec --out artifacts/sfx
    """
    from convert.sfx_export import export_sfx
    from runtime.sfx.graphs import SfxPlan

    manifest = export_sfx(checkpoint, codec, out, SfxPlan(**numbers), lambda line: click.echo(line, err=True))
    click.echo(f"{manifest.directory}: {', '.join(manifest.graphs)}")
