"""convert-moss patch: lower what a target does not take, with a proof for every change."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--target",
    default="910B4",
    show_default=True,
    help="cann=8.5,soc=Ascend910B4,precision=origin, a preset (910B1 … 910B4, A3, 310P3), or a TOML file.",
)
@click.option("--input-shape", default="", help='Bind axes as ATC does: "row:1,1,17;position:1".')
@click.option("--matmul", type=click.Choice(["keep", "conv1x1"]), default="keep", help="Matrices as 1x1 convolutions.")
@click.option("--top-k", type=click.Choice(["keep", "rank"]), default="keep", help="TopK as ranks by counting.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write the report as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def patch(
    source: Path,
    out: Path,
    target: str,
    input_shape: str,
    matmul: str,
    top_k: str,
    report: Path | None,
    as_json: bool,
) -> None:
    """Patch SOURCE for a target and write OUT.

    Weights outside the file are not read; their files are copied beside OUT when it lies in another directory.

    Example: convert-moss patch step.onnx step.patched.onnx --target 910B4 --report step.patch.json
    """
    from op_patches.patch_file import patch_file
    from op_patches.pipeline import Options
    from op_patches.readiness import parse_input_shapes
    from op_patches.targets import Target
    from runtime.manifest import write_atomically

    result = patch_file(
        source,
        out,
        Target.parse(target),
        input_shapes=parse_input_shapes(input_shape),
        options=Options(matmul=matmul, top_k=top_k),
    )
    text = json.dumps(result.to_dict(), indent=1)
    if report:
        write_atomically(report, text + "\n")
    click.echo(text if as_json else "\n".join(result.lines()))
