"""convert-moss demo: the main job once, end to end."""

from __future__ import annotations

from pathlib import Path

import click

EXAMPLE_VOICE = Path("examples/voice_en.flac")


@click.command()
@click.option("--model", help="Directory or hub id of the language model; without it the weights are made up.")
@click.option("--codec", help="Directory or hub id of the audio tokenizer.")
@click.option(
    "--voice", default=EXAMPLE_VOICE, show_default=True, type=click.Path(path_type=Path), help="Reference clip."
)
@click.option("--text", help="What to say.")
@click.option(
    "--out", "directory", type=click.Path(path_type=Path, file_okay=False), help="artifacts/demo, or artifacts/made_up"
)
def demo(model: str | None, codec: str | None, voice: Path, text: str | None, directory: Path | None) -> None:
    """Convert a checkpoint, speak with ONNX Runtime and PyTorch, and write a page that compares them."""
    from convert.demo import TEXT, require_agreement, run_demo, speech_level

    if (model is None) != (codec is None):
        raise click.UsageError("give both --model and --codec, or neither")
    directory = directory or Path("artifacts") / ("made_up" if model is None else "demo")
    result = run_demo(
        model,
        codec,
        voice,
        text or TEXT,
        directory,
        Path("checkpoints/made_up"),
        lambda line: click.echo(line, err=True),
    )
    rms, peak = speech_level(result.speeches["ort"])
    click.echo(f"page:      {directory / 'demo.html'}")
    click.echo(f"graphs:    {directory} ({', '.join(result.manifest.graphs)})")
    click.echo(f"speech:    {', '.join(str(f) for f in result.files.values())} (RMS {rms:.3f}, peak {peak:.3f})")
    click.echo(f"agreement: codes {result.codes.reason}; waveform {result.waveform.reason}")
    if result.manifest.notice:
        click.echo(f"NOTE:      {result.manifest.notice}")
    require_agreement(result)
