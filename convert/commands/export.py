"""convert-moss export: checkpoint -> ONNX graphs with a manifest."""

from __future__ import annotations

from pathlib import Path

import click

from runtime.graphs import GRAPH_NAMES
from runtime.manifest import CPU_WEIGHTS


@click.command()
@click.argument("checkpoint")
@click.option("--codec", required=True, help="Directory or hub id of the audio tokenizer checkpoint.")
@click.option(
    "--out", "directory", required=True, type=click.Path(path_type=Path, file_okay=False), help="artifacts/<name>"
)
@click.option("--only", multiple=True, type=click.Choice(GRAPH_NAMES), help="Export this graph alone; may be repeated.")
@click.option("--max-positions", default=4096, show_default=True, help="Rows that prompt and frames may take together.")
@click.option(
    "--cpu-weights",
    type=click.Choice(CPU_WEIGHTS),
    help="For ONNX Runtime on a CPU alone: weights of the language model in fewer bits.",
)
def export(
    checkpoint: str, codec: str, directory: Path, only: tuple[str, ...], max_positions: int, cpu_weights: str | None
) -> None:
    """Export CHECKPOINT (a directory or a hub id in the local cache) to opset-17 graphs, verified against torch.

    Example: convert-moss export checkpoints/nano/model --codec checkpoints/nano/codec --out artifacts/nano
    """
    from convert.export import export_artifacts

    manifest = export_artifacts(
        checkpoint, codec, directory, only, max_positions, lambda line: click.echo(line, err=True), cpu_weights
    )
    click.echo(f"{manifest.directory}: {', '.join(manifest.graphs)}")
    if manifest.notice:
        click.echo(f"note: {manifest.notice}")
