"""convert-moss fixture: a made-up checkpoint in the published layout."""

from __future__ import annotations

from pathlib import Path

import click

from runtime.manifest import MADE_UP_NOTICE


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--size", type=click.Choice(["tiny", "full"]), default="tiny", show_default=True,
              help="full has the published sizes, about 320 MB.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Other seeds, other weights.")
def fixture(directory: Path, size: str, seed: int) -> None:
    """Write DIRECTORY/model and DIRECTORY/codec with made-up weights: they make noise, and stop by themselves.

    Example: convert-moss fixture checkpoints/made_up --size tiny --seed 0
    """
    from convert.fixture import write_fixture

    model, codec = write_fixture(directory, "full" if size == "full" else "tiny", seed)
    click.echo(f"{model}\n{codec}")
    click.echo(f"note: {MADE_UP_NOTICE}", err=True)
