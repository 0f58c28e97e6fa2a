"""Is this waveform the speech that was asked for? Asked before a file is reported as success.

Each bound is far from what working synthesis gives, so that a finding means a broken result, not an unusual voice;
docs/text-and-voices.md says where the numbers come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from runtime.audio import window_levels
from runtime.errors import AudioError

SILENT_DBFS = -50.0  # loudest 50 ms; the four reference clips stand at -15 to -9
MAX_CLIPPED_SHARE = 0.01  # beyond full scale: 480 samples of each second
MIN_FRAMES_PER_TOKEN = 0.5  # 25 tokens a second; ordinary speech has 3 to 4
MAX_FRAMES_PER_TOKEN = 15.0  # 1.2 s for one token; a digit, which may be a word of two syllables, takes half of it
EXTRA_FRAMES = 40  # 3.2 s for pauses and breath before and after, whatever the text
BYTES_PER_TOKEN = 3  # tokens that spell bytes: three of them make one character


class Problem(str, Enum):
    NOT_FINITE = "not finite"
    WRONG_SIZE = "wrong size"
    SILENT = "silent"
    CLIPPED = "clipped"
    TOO_SHORT = "too short"
    TOO_LONG = "too long"


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a waveform is not the speech that was asked for."""

    problem: Problem
    message: str


def check_speech(
    waveform: npt.NDArray[np.float32],
    sample_rate_hz: int,
    samples_per_frame: int,
    num_frames: int,
    num_tokens: int,
    num_byte_tokens: int = 0,
    ended: bool = True,
) -> tuple[Finding, ...]:
    """Findings about the waveform [channels, samples] of `num_frames` frames that speak `num_tokens` text tokens.

    `ended`: the model ended the utterance by itself; one that was cut at a limit may well be short.
    """
    expected = num_frames * samples_per_frame
    if waveform.ndim != 2 or waveform.shape[1] != expected or not expected:
        got = f"the waveform is {list(waveform.shape)}, expected [channels, {max(expected, samples_per_frame)}]"
        return (Finding(Problem.WRONG_SIZE, got),)
    bad = np.count_nonzero(~np.isfinite(waveform))
    if bad:
        return (Finding(Problem.NOT_FINITE, f"{bad} of {waveform.size} samples are NaN or infinite"),)
    findings = []
    loudest = float(window_levels(waveform, sample_rate_hz).max())
    if loudest < SILENT_DBFS:
        text = f"the loudest 50 ms are at {loudest:.0f} dBFS, expected above {SILENT_DBFS:.0f}"
        findings.append(Finding(Problem.SILENT, text))
    clipped = np.count_nonzero(np.abs(waveform) > 1) / waveform.size
    if clipped > MAX_CLIPPED_SHARE:
        text = f"{100 * clipped:.1f} % of the samples exceed full scale, expected at most {100 * MAX_CLIPPED_SHARE:g} %"
        findings.append(Finding(Problem.CLIPPED, text))
    spoken_tokens = num_tokens - num_byte_tokens + num_byte_tokens / BYTES_PER_TOKEN
    return (*findings, *_check_length(num_frames, spoken_tokens, ended))


def max_plausible_frames(num_tokens: float) -> int:
    """More frames than this for a text of `num_tokens` tokens are not its reading."""
    return int(MAX_FRAMES_PER_TOKEN * num_tokens) + EXTRA_FRAMES


def refuse(findings: tuple[Finding, ...]) -> None:
    """AudioError with every finding, when there is one."""
    if findings:
        raise AudioError("the result is not the speech asked for: " + "; ".join(f.message for f in findings))


def _check_length(num_frames: int, num_tokens: float, ended: bool) -> tuple[Finding, ...]:
    low, high = MIN_FRAMES_PER_TOKEN * num_tokens, max_plausible_frames(num_tokens)
    text = f"{num_frames} frames for {num_tokens:.0f} text tokens, expected {low:.0f} to {high}"
    if num_frames < low and ended:
        return (Finding(Problem.TOO_SHORT, text),)
    return (Finding(Problem.TOO_LONG, text),) if num_frames > high else ()
