"""run-om say: speak a text with the voice of a reference clip."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import click

from runtime.backends.select import BackendOptions
from runtime.commands.backend_options import backend_options, open_chosen
from runtime.generate import MAX_FRAMES
from runtime.sampling import SamplingParams

_DEFAULTS = SamplingParams()


@click.command()
@click.option("--artifacts", required=True, type=click.Path(path_type=Path, file_okay=False), help="artifacts/<name>")
@click.option("--text", help="What to say; - reads standard input.")
@click.option("--text-file", type=click.Path(path_type=Path, dir_okay=False), help="UTF-8 file with the text.")
@click.option("--voice", help="Reference clip (WAV, FLAC, OGG, MP3), or the name of a stored voice: run-om voice.")
@click.option("--reference-text", help="What the clip says: continue it instead of cloning its voice.")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="WAV, FLAC or OGG file.")
@backend_options
@click.option("--stats", is_flag=True, help="Say on stderr what ran each graph and, on om, what moved per frame.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--greedy", is_flag=True, help="The best code every time.")
@click.option("--temperature", default=_DEFAULTS.temperature, show_default=True)
@click.option("--top-k", default=_DEFAULTS.top_k, show_default=True)
@click.option("--top-p", default=_DEFAULTS.top_p, show_default=True)
@click.option("--repetition-penalty", default=_DEFAULTS.repetition_penalty, show_default=True)
@click.option("--max-frames", default=MAX_FRAMES, show_default=True, help="80 ms each.")
@click.option(
    "--codes-out", type=click.Path(path_type=Path, dir_okay=False), help="Also write the codes: .npz or .json"
)
@click.option("--mono", is_flag=True, help="Write the mean of the channels.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def say(
    artifacts: Path,
    out: Path,
    codes_out: Path | None,
    mono: bool,
    as_json: bool,
    backend: BackendOptions,
    stats: bool,
    **options: Any,
) -> None:
    """Speak a text and write it as audio.

    Example: run-om say --artifacts artifacts/demo --text "Hello there." --voice clip.wav --out out.wav
    """
    from runtime.assembly import describe_run
    from runtime.audio_writer import check_output_path, write_audio
    from runtime.manifest import Manifest
    from runtime.synthesizer import Request, open_synthesizer
    from runtime.voices import VoiceStore, codec_id, find_voice

    check_output_path(out)
    _check_codes_path(codes_out)
    text = _read_text(options["text"], options["text_file"])
    sampling = _sampling(options)
    manifest = Manifest.load(artifacts)
    opened = open_chosen(manifest, backend)
    with open_synthesizer(manifest, opened, fused=not backend.split) as synthesizer:
        codes = None
        if options["voice"] is not None:
            voice = find_voice(options["voice"], VoiceStore(), synthesizer.codec, codec_id(manifest))
            codes = voice.codes[:, : manifest.model.n_vq]
            for note in voice.notes:
                click.echo(f"{options['voice']}: {note}", err=True)
        request = Request(text, codes, options["reference_text"], sampling, options["seed"], options["max_frames"])
        speech = synthesizer.say(request)
        if stats:
            click.echo("\n".join(describe_run(synthesizer.frame_model, opened)), err=True)
    written = write_audio(out, speech.waveform, speech.sample_rate_hz, mono=mono)
    if codes_out is not None:
        _write_codes(codes_out, speech.generation.codes)
    figures = _figures(speech, written, manifest.notice)
    click.echo(json.dumps(figures, ensure_ascii=False) if as_json else _as_text(figures))


def _read_text(text: str | None, path: Path | None) -> str:
    from runtime.errors import TextError

    if (text is None) == (path is None):
        raise TextError("give the text with --text (or --text - for standard input), or with --text-file: one of them")
    try:
        if path is not None:
            return path.read_text(encoding="utf-8")
        return sys.stdin.read() if text == "-" else str(text)
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path or 'standard input'}: cannot read the text as UTF-8 ({error})") from error


def _sampling(options: dict[str, Any]) -> SamplingParams:
    if options["greedy"]:
        return SamplingParams.greedy(options["repetition_penalty"])
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    return SamplingParams(**{name: options[name] for name in names})


def _check_codes_path(path: Path | None) -> None:
    from runtime.errors import AudioError

    if path is not None and path.suffix not in (".npz", ".json"):
        raise AudioError(f"{path}: expected a file name that ends in .npz or .json")


def _write_codes(path: Path, codes: Any) -> None:
    import numpy as np

    from runtime.manifest import write_atomically

    if path.suffix == ".json":
        write_atomically(path, json.dumps({"codes": codes.tolist()}) + "\n")
        return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, codes=codes)
    write_atomically(path, buffer.getvalue())


def _figures(speech: Any, written: Any, notice: str | None) -> dict[str, Any]:
    generation = speech.generation
    return {
        "out": str(written.path),
        "backend": speech.backend_name,
        "prompt_rows": generation.prompt_rows,
        "frames": generation.num_frames,
        "finish_reason": generation.finish_reason,
        "audio_seconds": round(written.seconds, 3),
        "prefill_seconds": round(generation.prefill_seconds, 3),
        "frames_per_second": round(generation.frames_per_second, 2),
        "rtf": round(speech.rtf, 3),
        "clipped_samples": written.num_clipped,
        "note": notice,
    }


def _as_text(f: dict[str, Any]) -> str:
    lines = [
        f"{f['out']}: {f['audio_seconds']} s of audio from {f['frames']} frames, ended by: {f['finish_reason']}",
        f"backend {f['backend']}: {f['prompt_rows']} prompt rows in {f['prefill_seconds']} s, "
        f"{f['frames_per_second']} frames/s, RTF {f['rtf']}",
    ]
    if f["clipped_samples"]:
        lines.append(f"warning: {f['clipped_samples']} samples clipped")
    if f["note"]:
        lines.append(f"note: {f['note']}")
    return "\n".join(lines)
