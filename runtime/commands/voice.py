"""run-om voice: voices that are encoded once and then used by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from runtime.backends.select import BackendOptions
from runtime.commands.backend_options import backend_options, open_chosen
from runtime.resample import Resampler

_voices_option = click.option(
    "--voices", "directory", type=click.Path(path_type=Path, file_okay=False),
    help="Where voices are stored; also $MOSS_TTS_VOICES.",
)  # fmt: skip
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def voice() -> None:
    """Store the codes of a reference clip under a name, for --voice NAME."""


@voice.command()
@click.argument("name")
@click.argument("clip", type=click.Path(path_type=Path))
@click.option("--artifacts", required=True, type=click.Path(path_type=Path, file_okay=False), help="artifacts/<name>")
@click.option("--text", help="What the clip says, for continuation.")
@click.option("--trim", is_flag=True, help="Cut silence at both ends.")
@click.option(
    "--resampler", default="upstream", show_default=True, type=click.Choice([r.value for r in Resampler]),
    help="upstream gives upstream's codes; soxr is the better filter.",
)  # fmt: skip
@click.option("--replace", is_flag=True, help="Overwrite a voice of this name.")
@backend_options
@_voices_option
def add(
    name: str, clip: Path, artifacts: Path, backend: BackendOptions, directory: Path | None, **options: Any
) -> None:
    """Encode CLIP and store it as NAME.

    Example: run-om voice add anna clip.wav --artifacts artifacts/demo
    """
    from runtime.assembly import open_codec
    from runtime.audio import ClipRules
    from runtime.manifest import Manifest
    from runtime.voices import VoiceStore, codec_id, encode_clip

    store = VoiceStore(directory)
    store.check_free(name, options["replace"])
    manifest = Manifest.load(artifacts)
    rules = ClipRules(trim=options["trim"], resampler=Resampler(options["resampler"]))
    manifest.check_hashes([])  # the weights
    with open_codec(manifest, open_chosen(manifest, backend)) as codec:
        encoded = encode_clip(clip, codec, codec_id(manifest), rules, name, options["text"])
    path = store.add(encoded, options["replace"])
    for note in encoded.notes:
        click.echo(f"{clip}: {note}", err=True)
    click.echo(f"voice {encoded.name}: {len(encoded.codes)} frames from {encoded.seconds} s, stored in {path}")


@voice.command("list")
@_voices_option
@_json_option
def list_voices(directory: Path | None, as_json: bool) -> None:
    """List the stored voices."""
    from runtime.voices import VoiceStore

    store = VoiceStore(directory)
    voices = [store.load(name) for name in store.names()]
    if as_json:
        click.echo(json.dumps([_summary(v) for v in voices], ensure_ascii=False))
        return
    for v in voices:
        click.echo(f"{v.name}: {len(v.codes)} frames, {v.seconds} s, from {v.clip}")
    if not voices:
        click.echo(f"no voices in {store.directory}", err=True)


@voice.command()
@click.argument("name")
@_voices_option
@_json_option
def show(name: str, directory: Path | None, as_json: bool) -> None:
    """Show where a voice comes from; --json adds its codes."""
    from runtime.voices import VoiceStore

    found = VoiceStore(directory).load(name)
    if as_json:
        click.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        return
    for key, value in _summary(found).items():
        click.echo(f"{key}: {', '.join(value) if isinstance(value, tuple) else value}")


@voice.command()
@click.argument("name")
@_voices_option
def remove(name: str, directory: Path | None) -> None:
    """Forget a voice."""
    from runtime.voices import VoiceStore

    VoiceStore(directory).remove(name)
    click.echo(f"removed voice {name}")


def _summary(found: Any) -> dict[str, Any]:
    """Everything but the codes, for which their shape stands."""
    data = found.to_dict()
    del data["codes"], data["format_version"]
    return {**data, "frames": found.codes.shape[0], "n_vq": found.codes.shape[1], "notes": found.notes}
