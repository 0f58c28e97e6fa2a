"""run-om load-test: a bounded load on a running speech server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click


@click.command("load-test")
@click.argument("url")
@click.option("--concurrency", default=4, show_default=True, type=click.IntRange(1))
@click.option("--duration", "seconds", default=30.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--voice", help="A voice of the server.")
@click.option("--clip", type=click.Path(path_type=Path, dir_okay=False), help="Or a reference clip.")
@click.option("--api-key", envvar="MOSS_TTS_API_KEY", help="Better from the environment: MOSS_TTS_API_KEY.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def load_test(as_json: bool, **options: Any) -> None:
    """Ask URL for speech with several clients at once; exit 1 when a request was lost.

    Example: run-om load-test http://127.0.0.1:8091 --concurrency 4 --duration 30 --clip voice.wav
    """
    from runtime.server.load_test import LoadPlan, run_load

    figures = run_load(LoadPlan(**options))
    if as_json:
        click.echo(json.dumps(figures))
    else:
        for name, value in figures.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) or "none" if isinstance(value, dict) else value
            click.echo(f"{name:>26}: {text}")
    if figures["errors"] or not figures["requests"]:
        sys.exit(1)
