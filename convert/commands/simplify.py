"""convert-moss simplify: onnxsim on a foreign graph, checked."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--input-shape", default="", help='Bind axes as ATC does: "x:1,17;y:1".')
def simplify(source: Path, out: Path, input_shape: str) -> None:
    """Fold the shape arithmetic of SOURCE with onnxsim and write OUT, when interface and numbers stay.

    For graphs that others exported; ours need it not. Follow it with patch and check.

    Example: convert-moss simplify decode_step.onnx simple.onnx --input-shape "input_ids:1,1,17;past_valid_lengths:1"
    """
    from convert.simplify import simplify_file
    from op_patches.readiness import parse_input_shapes

    result = simplify_file(source, out, parse_input_shapes(input_shape))
    worst = max(result.differences, key=lambda d: d.max_abs)
    click.echo(
        f"{out}: {result.nodes_before} -> {result.nodes_after} nodes, "
        f"largest difference {worst.max_abs:.1e} ({worst.name})"
    )
