"""The check of the result: what is refused, and that ordinary speech is not."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.audio_check import Problem, check_speech, max_plausible_frames, refuse
from runtime.errors import AudioError

RATE, PER_FRAME = 48_000, 3_840


def speech(num_frames: int, peak: float = 0.5) -> np.ndarray:
    n = num_frames * PER_FRAME
    envelope = np.where(np.arange(n) / RATE % 0.3 < 0.2, 1.0, 0.003)
    signal = np.random.default_rng(0).standard_normal((2, n)) * envelope
    return (peak * signal / np.abs(signal).max()).astype(np.float32)


def problems(waveform: np.ndarray, num_frames: int, num_tokens: int, num_bytes: int = 0) -> list[Problem]:
    return [f.problem for f in check_speech(waveform, RATE, PER_FRAME, num_frames, num_tokens, num_bytes)]


@pytest.mark.parametrize(("num_frames", "num_tokens"), [(12, 3), (50, 14), (200, 60), (30, 1)])
def test_ordinary_speech_passes(num_frames, num_tokens):
    assert problems(speech(num_frames), num_frames, num_tokens) == []


def test_nan_and_infinity_are_found():
    waveform = speech(20)
    waveform[1, 7], waveform[0, 9] = np.nan, np.inf
    assert problems(waveform, 20, 6) == [Problem.NOT_FINITE]


@pytest.mark.parametrize("peak", [0, 0.001])
def test_silence_is_found(peak):
    assert problems(speech(20, peak), 20, 6) == [Problem.SILENT]


def test_clipping_is_found_beyond_a_share():
    assert problems(speech(20, peak=6), 20, 6) == [Problem.CLIPPED]
    a_few = speech(20)
    a_few[0, :100] = 1.2
    assert problems(a_few, 20, 6) == []


def test_a_waveform_that_is_not_the_frames_is_found():
    assert problems(speech(20)[:, :-1], 20, 6) == [Problem.WRONG_SIZE]
    assert problems(speech(20)[0], 20, 6) == [Problem.WRONG_SIZE]
    assert problems(np.zeros((2, 0), np.float32), 0, 6) == [Problem.WRONG_SIZE]


def test_a_swallowed_text_is_found():
    assert problems(speech(20), 20, 41) == [Problem.TOO_SHORT]
    assert problems(speech(20), 20, 40) == []
    assert check_speech(speech(20), RATE, PER_FRAME, 20, 41, ended=False) == ()  # cut at a limit, not swallowed


def test_a_26_second_hallucination_for_a_short_text_is_found():
    assert problems(speech(325), 325, 5) == [Problem.TOO_LONG]


def test_the_upper_bound_is_exact():
    assert max_plausible_frames(4) == 100
    assert problems(speech(100), 100, 4) == []
    assert problems(speech(101), 101, 4) == [Problem.TOO_LONG]


def test_tokens_that_spell_bytes_count_a_third():
    assert problems(speech(20), 20, 90) == [Problem.TOO_SHORT]
    assert problems(speech(20), 20, 90, num_bytes=90) == []


def test_refusing_names_every_finding():
    refuse(())
    findings = check_speech(speech(325, peak=6), RATE, PER_FRAME, 325, 5)
    with pytest.raises(
        AudioError, match=r"exceed full scale, expected at most 1 %; 325 frames for 5 text tokens, expected 2 to 115"
    ):
        refuse(findings)
