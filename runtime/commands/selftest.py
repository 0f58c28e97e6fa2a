"""run-om selftest: the checklist of the first device box, as one command that writes one report."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from runtime.backends.select import BackendOptions


@click.command()
@click.option("--artifacts", required=True, type=click.Path(path_type=Path, file_okay=False), help="artifacts/<name>")
@click.option("--backend", "backend_name", default="om", show_default=True, type=click.Choice(["om"]))
@click.option("--device", default="0", show_default=True, help="Which NPU.")
@click.option("--precision", help="Which builds, when several are there (origin, fp16, …).")
@click.option("--simulate", is_flag=True, help="On the pyACL simulator; nothing in the report is a device result then.")
@click.option("--only", help="Only these steps, with commas between them, and what they stand on.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Where the report goes.")
def selftest(
    artifacts: Path,
    backend_name: str,
    device: str,
    precision: str | None,
    simulate: bool,
    only: str | None,
    out: Path | None,
) -> None:
    """Check what could not be checked without a device, and write selftest.json and selftest.md to send back.

    Exit code 0: no step failed; 1: a step failed.

    Example: run-om selftest --backend om --artifacts artifacts/demo
    """
    from runtime.manifest import Manifest
    from runtime.selftest import Outcome, Verdict, write_report
    from runtime.selftest_om import run_selftest

    def show(outcome: Outcome) -> None:
        click.echo(f"{outcome.verdict.value:>12}  {outcome.name}: {outcome.detail}")

    options = BackendOptions(name=backend_name, device=device, simulate=simulate, precision=precision)
    steps = only.split(",") if only else []
    report = run_selftest(Manifest.load(artifacts), options, show, lambda line: click.echo(line, err=True), steps)
    data, page = write_report(report, out or artifacts)
    click.echo(f"{report.title}: {report.verdict.value}. Send back {data} and {page}")
    sys.exit(1 if report.verdict is Verdict.FAIL else 0)
