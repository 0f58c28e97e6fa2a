"""run-om sfx: a description in words -> a sound effect, with MOSS-SoundEffect v1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.commands.sfx_options import (
    limit_option,
    model_options,
    open_effects,
    prompts_from,
    sampling_from,
    sampling_options,
    text_options,
)
from runtime.errors import AudioError
from runtime.sfx.codec import Decoding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime.audio_writer import Written
    from runtime.sfx.sound_effects import Sound


@click.command()
@model_options
@click.option("--prompt", "prompts", multiple=True, required=True, help="What to hear; may be repeated: one batch.")
@click.option(
    "--out", "outs", multiple=True, required=True, type=click.Path(path_type=Path), help="WAV, FLAC or OGG per prompt."
)
@text_options
@click.option("--seed", default=0, show_default=True, help="The first prompt's seed; the next ones count up.")
@sampling_options
@limit_option
@click.option(
    "--decoding",
    type=click.Choice([d.value for d in Decoding]),
    default=Decoding.UPSTREAM.value,
    show_default=True,
    help="upstream: 8 s chunks as the published code; whole: full context everywhere. Equal up to 10 s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per sound.")
def sfx(
    prompts: tuple[str, ...],
    outs: tuple[Path, ...],
    seed: int,
    max_new_tokens: int | None,
    decoding: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate sound effects from descriptions (English or Chinese).

    Example: run-om sfx --checkpoint checkpoints/sfx/model --codec checkpoints/sfx/codec
    --prompt "a dog barks in the rain" --seconds 10 --out dog.wav
    """
    from runtime.audio_writer import check_output_path, write_audio

    if len(outs) != len(prompts) or len(set(outs)) != len(outs):
        raise AudioError(f"expected one different --out per --prompt, got {len(outs)} for {len(prompts)} prompts")
    for out in outs:
        check_output_path(out)
    requests, sampling = prompts_from(prompts, options), sampling_from(options)
    with open_effects(options) as effects:
        for notice in effects.notices:
            click.echo(f"notice: {notice}", err=True)
        seeds = [seed + i for i in range(len(requests))]
        sounds = effects.create(requests, seeds, sampling, max_new_tokens, Decoding(decoding), _progress)
    for out, sound, one_seed in zip(outs, sounds, seeds, strict=True):
        written = write_audio(out, sound.waveform, sound.sample_rate_hz)
        for notice in sound.notices:
            click.echo(f"notice: {out}: {notice}", err=True)
        facts = _facts(sound, written, one_seed, effects.model.backend_name)
        click.echo(json.dumps(facts) if as_json else _line(facts))


def _progress(rows: int) -> None:
    if rows % 100 == 0:
        click.echo(f"{rows} rows", err=True)


def _facts(sound: Sound, written: Written, seed: int, backend: str) -> dict[str, Any]:
    return {
        "file": str(written.path),
        "seconds": round(sound.seconds, 3),
        "frames": sound.num_frames,
        "rows": sound.num_rows,
        "finish_reason": sound.finish_reason.value,
        "seed": seed,
        "backend": backend,
        "llm_seconds": round(sound.llm_seconds, 3),
        "codec_seconds": round(sound.codec_seconds, 3),
        "rtf": round((sound.llm_seconds + sound.codec_seconds) / sound.seconds, 3),
        "clipped_samples": written.num_clipped,
    }


def _line(facts: Mapping[str, Any]) -> str:
    clipped = f", {facts['clipped_samples']} samples clipped" if facts["clipped_samples"] else ""
    return (
        f"{facts['file']}: {facts['seconds']:.2f} s, {facts['frames']} frames, seed {facts['seed']}, "
        f"RTF {facts['rtf']:.2f} ({facts['backend']}; LLM {facts['llm_seconds']:.2f} s, "
        f"codec {facts['codec_seconds']:.2f} s){clipped}"
    )
