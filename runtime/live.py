"""Speech that is heard while it is made: `run-om say --stream`.

    frames ─ chunk() of them ─ codec ─ decoded(piece) ─► sink        lead = audio written - time since it began to play

The first frame goes out alone. After that a chunk is as large as the lead allows: large chunks cost the codec less,
and frames that wait for their chunk are late. Chunks follow the clock, so a stream may differ from a file in the last
bit of a sample; the codes are the same. (The server's chunks follow the frame number: its audio is the same to the
byte.)

What was heard cannot be taken back: a segment that gets lost ends the stream with an error instead of a new try.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.audio_writer import LiveWriter
from runtime.narration import NarrationSettings, Narrator, SpokenSegment, pause
from runtime.narration_file import AudioFormat, Narration
from runtime.progress import NarrationProgress
from runtime.synthesizer import Synthesizer
from runtime.text import TextPlan

CHUNKS = (1, 2, 4, 8)  # frames per call of the codec
LEAD_PER_WAIT = 2.0  # a chunk may take half of the lead to come about: the rest is for what is slower than the last one


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What a listener met."""

    first_audio_ms: float  # from the prompt to the first piece
    underrun_seconds: float  # silence because the next piece was late
    chunks: dict[int, int]  # frames per call of the codec -> calls
    codec_share: float  # of the time until the last piece

    def to_dict(self) -> dict[str, Any]:
        return {
            "first_audio_ms": round(self.first_audio_ms, 1),
            "underrun_seconds": round(self.underrun_seconds, 3),
            "chunks": {str(frames): calls for frames, calls in sorted(self.chunks.items())},
            "codec_share": round(self.codec_share, 3),
        }


class Live:
    """Hands pieces on as they come, and knows how far ahead of the listener it is."""

    def __init__(self, writer: LiveWriter, sample_rate_hz: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._writer, self._rate_hz, self._clock = writer, sample_rate_hz, clock
        self._start = self._last = clock()
        self._played_until: float | None = None  # when the listener will have heard everything
        self._first_audio = self._underrun = self._in_codec = 0.0
        self._seconds_per_frame = 0.0  # how long a frame took to come about lately
        self._chunks: Counter[int] = Counter()

    def chunk(self) -> int:
        """Frames that the next call of the codec should take."""
        if self._played_until is None or not self._seconds_per_frame:
            return CHUNKS[0]
        lead = self._played_until - self._last
        affordable = [n for n in CHUNKS if n * self._seconds_per_frame * LEAD_PER_WAIT <= lead]
        return max(affordable, default=CHUNKS[0])

    def decoded(self, waveform: npt.NDArray[np.float32], num_frames: int, codec_seconds: float) -> None:
        """Write a piece [channels, samples] of `num_frames` new frames, which the codec took so long for."""
        is_first = self._played_until is None
        self._write(waveform)
        now = self._clock()
        if is_first:
            self._first_audio = now - self._start
        else:
            self._seconds_per_frame = (now - self._last) / num_frames
        self._last = now
        self._in_codec += codec_seconds
        self._chunks[num_frames] += 1

    def silence(self, waveform: npt.NDArray[np.float32]) -> None:
        """Write the pause behind a segment."""
        self._write(waveform)

    @property
    def figures(self) -> LiveFigures:
        wall = self._last - self._start
        return LiveFigures(
            1e3 * self._first_audio, self._underrun, dict(self._chunks), self._in_codec / wall if wall else 0.0
        )

    def _write(self, waveform: npt.NDArray[np.float32]) -> None:
        self._writer.write(waveform)
        now = self._clock()
        if self._played_until is not None:
            self._underrun += max(0.0, now - self._played_until)
        self._played_until = max(self._played_until or now, now) + waveform.shape[1] / self._rate_hz


def narrate_live(
    synthesizer: Synthesizer,
    voice_codes: npt.NDArray[np.int32] | None,
    settings: NarrationSettings,
    plan: TextPlan,
    out: Path,
    audio: AudioFormat,
    progress: NarrationProgress,
) -> tuple[Narration, LiveFigures]:
    """Speak a plan into `out` as it comes; Ctrl-C ends the stream after what was heard."""
    segments: list[SpokenSegment] = []
    interrupted = False
    with LiveWriter(out, audio.sample_rate_hz, audio.num_channels, audio.sample_format, audio.mono) as writer:
        live = Live(writer, audio.sample_rate_hz)
        narrator = Narrator(synthesizer, voice_codes, dataclasses.replace(settings, retries=0), live)
        try:
            for segment in narrator.narrate(plan, on_frame=progress.frame):
                live.silence(pause(segment, audio.sample_rate_hz))
                segments.append(segment)
                progress.segment(len(segment.codes))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.close()
        written = writer.close()
    return Narration(written, tuple(segments), interrupted), live.figures
