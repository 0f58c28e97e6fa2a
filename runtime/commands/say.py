"""run-om say: speak a text with the voice of a reference clip."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.backends.select import BackendOptions
from runtime.commands.backend_options import backend_options
from runtime.commands.speak_options import settings, speak_options, text_plan
from runtime.commands.speaker import open_speaker, with_recorded_defaults

if TYPE_CHECKING:
    from runtime.manifest import Manifest
    from runtime.narration_file import Narration
    from runtime.synthesizer import Synthesizer
    from runtime.voices import VoiceStore

INTERRUPTED = 130  # what a shell reports after Ctrl-C


@click.command()
@click.option("--artifacts", required=True, type=click.Path(path_type=Path, file_okay=False), help="artifacts/<name>")
@click.option("--text", help="What to say; - reads standard input.")
@click.option("--text-file", type=click.Path(path_type=Path, dir_okay=False), help="UTF-8 file with the text.")
@click.option("--voice", help="Reference clip (WAV, FLAC, OGG, MP3), or the name of a stored voice: run-om voice.")
@click.option("--reference-text", help="What the clip says: continue it instead of cloning its voice.")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="WAV, FLAC or OGG file.")
@click.option("--stream", is_flag=True, help="Write audio as it comes: a WAV that grows, or with --out - raw samples.")
@click.option("--resume", is_flag=True, help="Go on where an interrupted run of the same command stopped.")
@speak_options
@backend_options
@click.option("--as-published", is_flag=True, help="--artifacts is a published ONNX package: run its own graphs.")
@click.option(
    "--template",
    type=click.Choice(["pytorch", "onnx"]),
    help="Whose prompt to build: PyTorch's (default), or the published package's (default with --as-published).",
)
@click.option("--stats", is_flag=True, help="Say on stderr what ran each graph and, on om, what moved per frame.")
@click.option("--codes-out", type=click.Path(path_type=Path, dir_okay=False), help="Also the codes: .npz or .json")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def say(
    artifacts: Path,
    out: Path,
    codes_out: Path | None,
    as_json: bool,
    stream: bool,
    backend: BackendOptions,
    speak: dict[str, Any],
    stats: bool,
    **options: Any,
) -> None:
    """Speak a text and write it as audio. Long texts are spoken segment by segment (see run-om text).

    Example: run-om say --artifacts artifacts/demo --text "Hello there." --voice clip.wav --out out.wav
    """
    from runtime.audio_writer import STANDARD_OUTPUT, SampleFormat, check_live_path, check_output_path
    from runtime.errors import AudioError
    from runtime.live import narrate_live
    from runtime.narration import Narrator
    from runtime.narration_file import AudioFormat, narrate_to_file
    from runtime.progress import NarrationProgress

    if stream and options["resume"]:
        raise AudioError("--resume goes on with a file; what was streamed was heard: leave one of them out")
    check_live_path(out) if stream else check_output_path(out, SampleFormat(speak["sample_format"]))
    _check_codes_path(codes_out)
    text = read_text(options["text"], options["text_file"])
    settings(speak, options["reference_text"])  # refuse what is impossible before anything is loaded
    speaker = open_speaker(artifacts, backend, options["as_published"], options["template"])
    with speaker.synthesizer as synthesizer:
        manifest = synthesizer.manifest
        speak = with_recorded_defaults(speak, manifest)
        chosen = settings(speak, options["reference_text"])
        plan = text_plan(
            text, synthesizer.tokenizer, speak, options["voice"] is None or chosen.reference_text is not None
        )
        for note in plan.notes:
            click.echo(f"text: {note}", err=True)
        voice = voice_codes(synthesizer, options["voice"], speaker.voices)
        codec = manifest.codec
        audio = AudioFormat(
            codec.sample_rate_hz, codec.num_channels, SampleFormat(speak["sample_format"]), speak["mono"]
        )
        tokens = [len(segment.token_ids) for segment in plan.segments]
        progress = NarrationProgress(tokens, codec.samples_per_frame / codec.sample_rate_hz)
        live = None
        if out == STANDARD_OUTPUT:
            channels = 1 if audio.mono else audio.num_channels
            click.echo(f"samples: {speak['sample_format']}, {audio.sample_rate_hz} Hz, {channels} channel(s)", err=True)
        if stream:
            narration, live = narrate_live(synthesizer, voice, chosen, plan, out, audio, progress)
        else:
            narrator = Narrator(synthesizer, voice, chosen)
            narration = narrate_to_file(narrator, plan, out, audio, options["resume"], progress)
        if stats:
            click.echo("\n".join(speaker.run_lines()), err=True)
        backend_name = synthesizer.frame_model.backend_name
    if codes_out is not None and narration.segments:
        _write_codes(codes_out, narration)
    figures = narration_figures(narration, backend_name, manifest)
    if live is not None:
        figures["stream"] = live.to_dict()
    shown = json.dumps(figures, ensure_ascii=False) if as_json else _as_text(figures)
    click.echo(shown, err=out == STANDARD_OUTPUT)  # standard output carries the samples
    finish(narration, out, speak["strict"])


def voice_codes(synthesizer: Synthesizer, name: str | None, voices: VoiceStore | None = None) -> Any:
    """The codes of a stored voice or a clip; None without a voice."""
    from runtime.voices import VoiceStore, codec_id, find_voice

    if name is None:
        return None
    voice = find_voice(name, voices or VoiceStore(), synthesizer.codec, codec_id(synthesizer.manifest))
    for note in voice.notes:
        click.echo(f"{name}: {note}", err=True)
    return voice.codes[:, : synthesizer.manifest.model.n_vq]


def finish(narration: Narration, out: Path, strict: bool) -> None:
    """Warn about what a person would miss, and set the exit code."""
    for index, segment in enumerate(narration.segments):
        for note in segment.notes:
            click.echo(f"segment {index + 1}: {note}", err=True)
        if segment.finish_reason == "length":
            text = f"segment {index + 1} reached --max-frames ({len(segment.codes)} frames): its end may be missing"
            click.echo(f"{'error' if strict else 'warning'}: {text}", err=True)
    if narration.interrupted:
        click.echo(f"interrupted: {len(narration.segments)} segments are in {out}; --resume goes on there", err=True)
        sys.exit(INTERRUPTED)
    if strict and any(segment.finish_reason == "length" for segment in narration.segments):
        sys.exit(1)


def read_text(text: str | None, path: Path | None) -> str:
    from runtime.errors import TextError

    if (text is None) == (path is None):
        raise TextError("give the text with --text (or --text - for standard input), or with --text-file: one of them")
    try:
        if path is not None:
            return path.read_text(encoding="utf-8")
        return sys.stdin.read() if text == "-" else str(text)
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path or 'standard input'}: cannot read the text as UTF-8 ({error})") from error


def _check_codes_path(path: Path | None) -> None:
    from runtime.errors import AudioError

    if path is not None and path.suffix not in (".npz", ".json"):
        raise AudioError(f"{path}: expected a file name that ends in .npz or .json")


def _write_codes(path: Path, narration: Narration) -> None:
    """The codes of all segments, one after the other, and the number of frames of each."""
    import numpy as np

    from runtime.manifest import write_atomically

    codes = np.concatenate([segment.codes for segment in narration.segments])
    frames = [len(segment.codes) for segment in narration.segments]
    if path.suffix == ".json":
        write_atomically(path, json.dumps({"codes": codes.tolist(), "segment_frames": frames}) + "\n")
        return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, codes=codes, segment_frames=np.array(frames))
    write_atomically(path, buffer.getvalue())


def narration_figures(narration: Narration, backend_name: str, manifest: Manifest) -> dict[str, Any]:
    """What a machine wants to know about a narration."""
    wall = sum(segment.wall_seconds for segment in narration.segments)
    frames = sum(len(segment.codes) for segment in narration.segments)
    written = narration.written
    seconds = written.seconds if written else 0.0
    return {
        "out": str(written.path) if written else None,
        "backend": backend_name,
        "weights": manifest.cpu_weights,
        "segments": [
            {
                "prompt_rows": s.prompt_rows,
                "frames": len(s.codes),
                "finish_reason": s.finish_reason,
                "attempts": s.attempts,
                "wall_seconds": round(s.wall_seconds, 3),
            }
            for s in narration.segments
        ],
        "frames": frames,
        "audio_seconds": round(seconds, 3),
        "frames_per_second": round(frames / wall, 2) if wall else 0.0,
        "rtf": round(wall / seconds, 3) if seconds else None,
        "clipped_samples": written.num_clipped if written else 0,
        "interrupted": narration.interrupted,
        "note": manifest.notice,
    }


def _as_text(f: dict[str, Any]) -> str:
    counts = sorted({s["prompt_rows"] for s in f["segments"]})
    rows = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else "".join(map(str, counts))
    reasons = ", ".join(dict.fromkeys(s["finish_reason"] for s in f["segments"]))
    lines = [
        f"{f['out']}: {f['audio_seconds']} s of audio from {f['frames']} frames, ended by: {reasons or 'nothing'}",
        f"backend {f['backend']}: {rows} prompt rows, {f['frames_per_second']} frames/s, RTF {f['rtf']}",
    ]
    if "stream" in f:
        s = f["stream"]
        chunks = ", ".join(f"{calls} of {frames}" for frames, calls in s["chunks"].items())
        lines.append(
            f"stream: first audio after {s['first_audio_ms']} ms, {s['underrun_seconds']} s of underruns, codec "
            f"{s['codec_share']:.1%} of the time in chunks: {chunks} frames"
        )
    if f["clipped_samples"]:
        lines.append(f"warning: {f['clipped_samples']} samples clipped")
    if f["note"]:
        lines.append(f"note: {f['note']}")
    return "\n".join(lines)
