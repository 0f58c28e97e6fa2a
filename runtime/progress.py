"""Progress of long work: one line that is rewritten on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class NarrationProgress:
    """Segments, frames, seconds of audio, RTF and the time left, on stderr."""

    def __init__(self, segment_tokens: list[int], frame_seconds: float, stream: TextIO | None = None) -> None:
        self._tokens, self._frame_seconds = segment_tokens, frame_seconds
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._start = self._shown = time.perf_counter()
        self._frames = self._segments = 0

    def frame(self, frames_of_segment: int) -> None:
        """One more frame; a terminal is updated five times a second."""
        now = time.perf_counter()
        if self._live and now - self._shown > 0.2:
            self._shown = now
            self._stream.write(f"\r{self._line(self._frames + frames_of_segment, frames_of_segment)}\x1b[K")
            self._stream.flush()

    def segment(self, frames_of_segment: int) -> None:
        """One more segment is finished."""
        self._frames += frames_of_segment
        self._segments += 1
        if len(self._tokens) > 1:
            line = self._line(self._frames, 0)
            self._stream.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the terminal's line."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _line(self, frames: int, frames_of_segment: int) -> str:
        wall = time.perf_counter() - self._start
        audio = frames * self._frame_seconds
        rtf = f"RTF {wall / audio:.2f}" if audio else "RTF -"
        return (
            f"segment {min(self._segments + 1, len(self._tokens))}/{len(self._tokens)}, {frames} frames, "
            f"{audio:.1f} s of audio, {rtf}, {self._left(wall, frames, frames_of_segment)}"
        )

    def _left(self, wall: float, frames: int, frames_of_segment: int) -> str:
        """Time left, from the frames that a token took in the finished segments."""
        done = sum(self._tokens[: self._segments])
        finished_frames = frames - frames_of_segment
        if not done or not frames or not finished_frames:
            return "time left unknown"
        wanted = finished_frames / done * sum(self._tokens)
        return f"about {max(0.0, wall / frames * (wanted - frames)):.0f} s left"
