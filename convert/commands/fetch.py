"""convert-moss fetch: the published checkpoints from the hub."""

from __future__ import annotations

from pathlib import Path

import click

from convert.hub_cache import DEFAULT_CODEC_ID, DEFAULT_MODEL_ID


@click.command()
@click.option("--model", default=DEFAULT_MODEL_ID, show_default=True, help="Hub id of the language model.")
@click.option("--codec", default=DEFAULT_CODEC_ID, show_default=True, help="Hub id of the codec.")
@click.option("--out", "directory", type=click.Path(path_type=Path, file_okay=False),
              help="Also copy the files to DIR/model and DIR/codec.")  # fmt: skip
def fetch(model: str, codec: str, directory: Path | None) -> None:
    """Download the language model and the codec: weights, config and tokenizer, no code.

    They go to the Hugging Face cache; run it again and it goes on where it stopped. With HF_HUB_OFFLINE=1 it says
    which files the cache lacks.

    Example: convert-moss fetch --out checkpoints/nano
    """
    from convert.fetch import copy_out
    from convert.fetch import fetch as fetch_checkpoint

    for name, repository, needs_tokenizer in (("model", model, True), ("codec", codec, False)):
        fetched = fetch_checkpoint(repository, needs_tokenizer, report=lambda line: click.echo(line, err=True))
        target = copy_out(fetched, directory / name) if directory else fetched.directory
        click.echo(f"{name}: {target}")
    click.echo("next: convert-moss doctor on each of them", err=True)
