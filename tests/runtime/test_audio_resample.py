"""Resampling against torchaudio's vectors, and what each filter does to sines."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import BackendUnavailableError
from runtime.resample import Resampler, resample

RATES = (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 96_000)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "data" / "audio" / "audio_io.npz") as file:
        return dict(file)


@pytest.mark.parametrize("rate_hz", RATES)
def test_the_default_filter_is_upstreams(golden, rate_hz):
    out = resample(golden[f"rs_in_{rate_hz}"], rate_hz, 48_000)
    want = golden[f"rs_out_{rate_hz}_to_48000"]
    assert out.dtype == np.float32
    assert out.shape == want.shape
    # The kernel is upstream's to the bit; the sums run in another order.
    np.testing.assert_allclose(out, want, rtol=0, atol=5e-7)


def test_channels_do_not_mix():
    rng = np.random.default_rng(0)
    two = rng.standard_normal((2, 1000)).astype(np.float32)
    both = resample(two, 44_100, 48_000)
    for channel in range(2):
        np.testing.assert_array_equal(both[channel], resample(two[channel : channel + 1], 44_100, 48_000)[0])


@pytest.mark.parametrize("resampler", Resampler)
@pytest.mark.parametrize(
    ("rate_hz", "num_samples"), [(44_101, 3), (7_999, 4_001), (192_000, 5), (11_025, 1), (48_000, 7)]
)
def test_the_length_is_rounded_up_for_any_rate(resampler, rate_hz, num_samples):
    if resampler is Resampler.SOXR:
        pytest.importorskip("soxr", reason="the extra audio is not installed")
    out = resample(np.ones((1, num_samples), np.float32), rate_hz, 48_000, resampler)
    assert out.shape == (1, -(-num_samples * 48_000 // rate_hz))


def sine(frequency_hz: float, rate_hz: int) -> np.ndarray:
    return np.sin(2 * np.pi * frequency_hz * np.arange(rate_hz) / rate_hz)[None].astype(np.float32)


def gain_and_purity_db(frequency_hz: float, from_hz: int, resampler: Resampler) -> tuple[float, float]:
    """Level of a resampled sine against the sine, and against everything else that came out."""
    out = resample(sine(frequency_hz, from_hz), from_hz, 48_000, resampler)[0, 8_000:-8_000].astype(np.float64)
    phase = 2 * np.pi * frequency_hz * np.arange(8_000, 8_000 + len(out)) / 48_000
    basis = np.stack([np.sin(phase), np.cos(phase)], axis=1)
    amplitudes = np.linalg.lstsq(basis, out, rcond=None)[0]
    rest = out - basis @ amplitudes
    return float(20 * np.log10(np.hypot(*amplitudes))), float(20 * np.log10((basis @ amplitudes).std() / rest.std()))


def alias_db(frequency_hz: float, resampler: Resampler) -> float:
    """What is left of a sine at 96 kHz that 48 kHz cannot hold."""
    out = resample(sine(frequency_hz, 96_000), 96_000, 48_000, resampler)[0, 8_000:-8_000]
    return float(20 * np.log10(out.std() * np.sqrt(2)))


# The figures of docs/text-and-voices.md, with a little room.
def test_upstreams_filter_is_as_good_and_as_bad_as_the_page_says():
    for frequency_hz in (100, 1_000, 4_000, 8_000, 12_000, 16_000):
        gain, purity = gain_and_purity_db(frequency_hz, 44_100, Resampler.UPSTREAM)
        assert abs(gain) < 0.035
        assert purity > 53
    gain, purity = gain_and_purity_db(20_000, 44_100, Resampler.UPSTREAM)
    assert gain == pytest.approx(-2.64, abs=0.05)
    assert purity == pytest.approx(11, abs=1)
    assert alias_db(26_500, Resampler.UPSTREAM) == pytest.approx(-14.6, abs=0.2)
    assert max(alias_db(f, Resampler.UPSTREAM) for f in (30_000, 36_000, 40_000)) < -45


def test_soxr_is_as_good_as_the_page_says():
    pytest.importorskip("soxr", reason="the extra audio is not installed")
    for frequency_hz in (100, 1_000, 8_000, 16_000, 20_000):
        gain, purity = gain_and_purity_db(frequency_hz, 44_100, Resampler.SOXR)
        assert abs(gain) < 0.01
        assert purity > 140
    assert max(alias_db(f, Resampler.SOXR) for f in (24_500, 26_500, 30_000, 40_000)) < -150


def test_a_missing_soxr_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'moss-tts-nano-ascend\[audio\]'"):
        resample(np.zeros((1, 10), np.float32), 44_100, 48_000, Resampler.SOXR)
