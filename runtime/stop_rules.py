"""Why an utterance must stop although the model goes on: it repeats itself, says nothing, or outlives its text.

Sampled speech does not repeat its codes exactly: the first codebooks carry the coarse sound, and equal codes there over
seconds are a stuck model, as users report (DEMANDS.md A1). The thresholds are far from speech; each can be changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.audio_check import max_plausible_frames
from runtime.errors import GenerationError
from runtime.generate import FinishReason

LOOP_CODEBOOKS = 4  # codes that must repeat; the finer codebooks differ even in a steady vowel
SILENCE_DBFS = -60.0  # RMS of one frame; the reference clips' pauses lie above it or last under a second


@dataclass(frozen=True, slots=True)
class StopRules:
    """Limits in frames of 80 ms; 0 switches a rule off."""

    loop_frames: int = 25  # 2 s that repeat what came before
    max_loop_period: int = 25  # the longest pattern that counts as a loop
    silence_frames: int = 38  # 3 s
    runaway: bool = True  # frames beyond what the text can take: audio_check.max_plausible_frames

    def __post_init__(self) -> None:
        for name in ("loop_frames", "max_loop_period", "silence_frames"):
            if getattr(self, name) < 0:
                raise GenerationError(f"{name}: expected 0 (off) or more frames, got {getattr(self, name)}")


class LoopDetector:
    """Finds n-grams of codes that repeat: frames equal to those one `period` before, for loop_frames and 2 periods."""

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._recent: deque[bytes] = deque(maxlen=rules.max_loop_period + 1)
        self._equal = [0] * (rules.max_loop_period + 1)  # per period, frames in a row that were equal

    def add(self, codes: npt.NDArray[np.int32]) -> bool:
        """Whether the codes [n_vq] of the next frame complete a loop."""
        self._recent.append(codes[:LOOP_CODEBOOKS].tobytes())
        for period in range(1, len(self._recent)):
            same = self._recent[-1] == self._recent[-1 - period]
            self._equal[period] = self._equal[period] + 1 if same else 0
            if self._rules.loop_frames and self._equal[period] >= max(self._rules.loop_frames, 2 * period):
                return True
        return False


class SilenceDetector:
    """Counts frames whose level stays below SILENCE_DBFS."""

    def __init__(self, rules: StopRules, samples_per_frame: int) -> None:
        self._rules, self._samples = rules, samples_per_frame
        self._quiet = 0

    def add(self, waveform: npt.NDArray[np.float32]) -> bool:
        """Whether the next piece [channels, n * samples_per_frame] completes a run of silence."""
        frames = waveform.reshape(len(waveform), -1, self._samples)
        levels = np.sqrt(np.mean(np.square(frames, dtype=np.float64), axis=(0, 2)))
        for level in levels:
            self._quiet = self._quiet + 1 if level < 10 ** (SILENCE_DBFS / 20) else 0
            if self._rules.silence_frames and self._quiet >= self._rules.silence_frames:
                return True
        return False


class Watch:
    """All rules for one utterance; the loop asks after every frame."""

    def __init__(self, rules: StopRules, num_tokens: float, samples_per_frame: int) -> None:
        self._rules, self._num_frames = rules, 0
        self._max_frames = max_plausible_frames(num_tokens)
        self._loop, self._silence = LoopDetector(rules), SilenceDetector(rules, samples_per_frame)

    def codes(self, codes: npt.NDArray[np.int32]) -> FinishReason | None:
        """The reason to stop after the codes [n_vq] of one more frame."""
        self._num_frames += 1
        if self._loop.add(codes):
            return "loop"
        return "runaway" if self._rules.runaway and self._num_frames > self._max_frames else None

    def audio(self, waveform: npt.NDArray[np.float32]) -> FinishReason | None:
        """The reason to stop after one more piece of decoded audio."""
        return "silence" if self._silence.add(waveform) else None
