"""A narration into an audio file: written as segments finish, kept when it is interrupted, continued later.

Beside `out.wav` lies `out.wav.resume.json` while a narration is not complete: the codes of its finished segments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.audio_writer import AudioWriter, SampleFormat, Written
from runtime.errors import GenerationError
from runtime.manifest import write_atomically
from runtime.narration import Narrator, SpokenSegment, pause
from runtime.progress import NarrationProgress
from runtime.text import TextPlan


@dataclass(frozen=True, slots=True)
class Narration:
    """What was written; `written` is None when an interruption came before the first segment was finished."""

    written: Written | None
    segments: tuple[SpokenSegment, ...]
    interrupted: bool


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """How the file is written."""

    sample_rate_hz: int
    num_channels: int
    sample_format: SampleFormat = SampleFormat.PCM16
    mono: bool = False


def narrate_to_file(
    narrator: Narrator, plan: TextPlan, out: Path, audio: AudioFormat, resume: bool, progress: NarrationProgress
) -> Narration:
    """Speak a plan into `out`. Ctrl-C keeps the finished segments as a whole file and what `resume` needs."""
    state = out.with_name(f"{out.name}.resume.json")
    key = narrator.key(plan)
    finished = _read_state(state, key) if resume else ()
    segments: list[SpokenSegment] = []
    with AudioWriter(out, audio.sample_rate_hz, audio.num_channels, audio.sample_format, audio.mono) as writer:
        try:
            for segment in narrator.narrate(plan, finished, progress.frame):
                writer.write(segment.waveform)
                writer.write(pause(segment, audio.sample_rate_hz))
                segments.append(segment)
                progress.segment(len(segment.codes))
        except KeyboardInterrupt:
            _write_state(state, key, segments)
            return Narration(writer.close() if segments else None, tuple(segments), True)
        except GenerationError as error:
            if not segments:
                raise
            _write_state(state, key, segments)
            raise GenerationError(
                f"{error}. {len(segments)} of {len(plan.segments)} segments are kept: the same command with --resume "
                "goes on there"
            ) from error
        finally:
            progress.close()
        written = writer.close()
    state.unlink(missing_ok=True)
    return Narration(written, tuple(segments), False)


def _write_state(path: Path, key: str, segments: list[SpokenSegment]) -> None:
    if segments:
        data = {"key": key, "segments": [segment.codes.tolist() for segment in segments]}
        write_atomically(path, json.dumps(data) + "\n")


def _read_state(path: Path, key: str) -> tuple[npt.NDArray[np.int32], ...]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        segments = tuple(np.array(codes, np.int32) for codes in data["segments"])
        known = data["key"]
    except FileNotFoundError as error:
        raise GenerationError(f"{path} does not exist: there is nothing to resume; leave --resume out") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GenerationError(f"{path} is damaged ({error}); delete it and start again without --resume") from error
    if known != key:
        raise GenerationError(
            f"{path} belongs to another text, voice, sampling or model; give the same ones, or start without --resume"
        )
    return segments
