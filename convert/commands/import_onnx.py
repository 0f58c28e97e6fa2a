"""convert-moss import-onnx: a published ONNX package -> a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("import-onnx")
@click.argument("package", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--out", "directory", required=True, type=click.Path(path_type=Path, file_okay=False),
    help="Gets model and codec, two checkpoint directories.",
)  # fmt: skip
@click.option("--voices/--no-voices", default=True, show_default=True,
              help="Store the built-in voices for run-om say --voice NAME.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what was recovered and proved as JSON.")
def import_onnx(package: Path, directory: Path, voices: bool, as_json: bool) -> None:
    """Recover the weights of a published ONNX PACKAGE by the structure of its graphs, and prove them.

    Names play no part, so packages that were simplified, optimised at basic level, converted to float16 or renamed are
    read too. The proof runs the package's graphs and the recovered weights on the same inputs.

    Example: convert-moss import-onnx MOSS-TTS-Nano-100M-ONNX --out checkpoints/imported
    """
    from convert.import_package import import_package, store_voices
    from runtime.voices import VoiceStore

    def progress(line: str) -> None:
        click.echo(line, err=True)

    imported = import_package(package, directory, progress)
    if voices and imported.voices:
        store = VoiceStore()
        stored = store_voices(imported.voices, store, progress)
        progress(f"voices: {stored} of {len(imported.voices)} stored in {store.directory}")
    if as_json:
        click.echo(json.dumps(imported.record, indent=1))
    else:
        click.echo(f"{imported.model}\n{imported.codec}")
    progress(f"next: convert-moss build {imported.model} --codec {imported.codec} --out artifacts/{directory.name}")
