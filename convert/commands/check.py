"""convert-moss check: say what ATC will say about an ONNX graph, without ATC, torch or a device."""

from __future__ import annotations

import json
from pathlib import Path

import click

from runtime.errors import MossError


@click.command()
@click.argument("graph", type=click.Path(path_type=Path))
@click.option(
    "--target",
    default="910B4",
    show_default=True,
    help="cann=8.5,soc=Ascend910B4,precision=origin, a preset (910B1 … 910B4, A3, 310P3), or a TOML file.",
)
@click.option("--input-shape", default="", help='Bind axes as ATC does: "row:1,1,17;position:1".')
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--notes", is_flag=True, help="Print the harmless findings too.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write one self-contained page.")
@click.pass_context
def check(
    ctx: click.Context, graph: Path, target: str, input_shape: str, as_json: bool, notes: bool, html: Path | None
) -> None:
    """Check GRAPH (an .onnx file, or a directory of them) against a target.

    Exit code 0: no blocking finding; 1: at least one; 2: the check could not be made (unreadable file, unknown target).

    Example: convert-moss check step.onnx --target 910B4 --input-shape "row:1,1,17;position:1"
    """
    from op_patches.readiness import check_directory, check_model, parse_input_shapes
    from op_patches.readiness.text import html_page, report_lines
    from op_patches.targets import Target
    from runtime.manifest import write_atomically

    try:
        chosen = Target.parse(target)
        shapes = parse_input_shapes(input_shape)
        reports = check_directory(graph, chosen, shapes) if graph.is_dir() else [check_model(graph, chosen, shapes)]
        if html:
            write_atomically(html, html_page(reports).encode("utf-8"))
    except MossError as error:
        click.echo(f"error: {error}", err=True)
        ctx.exit(2)
    if as_json:
        ready = all(report.ready for report in reports)
        click.echo(json.dumps({"ready": ready, "reports": [report.to_dict() for report in reports]}, indent=1))
    else:
        for report in reports:
            click.echo("\n".join(report_lines(report, notes)))
    ctx.exit(0 if all(report.ready for report in reports) else 1)
