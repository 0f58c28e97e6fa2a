"""How far apart two waveforms are, in the terms of audio: SNR, level, spectrum, and what alignment explains.

Everything is defined for silence, NaN, and different lengths: a value that does not exist is None, never a good number.

    snr_db            10 log10(sum a^2 / sum (a - b)^2); inf when the two are equal, None for a silent reference
    segmental_snr_db  the mean of the SNR of pieces of 20 ms, each limited to -10 .. 100 dB; silent pieces left out
    log_mel_db        mean |difference| of log-mel spectra in dB, 80 bands, floor at -80 dB of full scale
    lag, gain         b(t + lag) * gain comes closest to a(t): the peak of the cross-correlation, then least squares
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

SEGMENT_SECONDS = 0.02
SEGMENT_LIMITS_DB = (-10.0, 100.0)
LARGEST_LAG_SECONDS = 0.1
FFT_SECONDS, NUM_MELS, FLOOR_DB = 0.04, 80, -80.0


@dataclass(frozen=True, slots=True)
class Level:
    """One side by itself."""

    seconds: float
    rms_dbfs: float | None  # None for silence
    peak: float
    clipped: int  # samples at or beyond full scale
    not_finite: int  # NaN or infinite samples


@dataclass(frozen=True, slots=True)
class AudioMetrics:
    """`b` against `a`, both [channels, N]; over the part that both have."""

    a: Level
    b: Level
    snr_db: float | None
    segmental_snr_db: float | None
    log_mel_db: float | None
    lag: int | None  # samples by which b is late
    gain: float | None  # what b has to be multiplied with
    aligned_snr_db: float | None
    swapped_channels: bool  # b is closer to a when its two channels change places


def level(waveform: Floats, sample_rate_hz: int) -> Level:
    """Level and defects of one waveform [channels, N]."""
    finite = np.isfinite(waveform)
    x = np.where(finite, waveform, 0).astype(np.float64)
    power = float(np.mean(x * x)) if x.size else 0.0
    peak = float(np.abs(x).max()) if x.size else 0.0
    return Level(
        seconds=waveform.shape[-1] / sample_rate_hz,
        rms_dbfs=10 * float(np.log10(power)) if power > 0 else None,
        peak=peak,
        clipped=int((np.abs(x) >= 1).sum()),
        not_finite=int((~finite).sum()),
    )


def measure_audio(a: Floats, b: Floats, sample_rate_hz: int) -> AudioMetrics:
    """Metrics of `b` against `a`; only levels when there is nothing to compare."""
    levels = level(a, sample_rate_hz), level(b, sample_rate_hz)
    n = min(a.shape[-1], b.shape[-1])
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[0] or not n or levels[0].not_finite + levels[1].not_finite:
        return AudioMetrics(*levels, None, None, None, None, None, None, False)
    x, y = a[:, :n].astype(np.float64), b[:, :n].astype(np.float64)
    lag, gain, aligned = _align(x, y, int(LARGEST_LAG_SECONDS * sample_rate_hz))
    plain = snr_db(x, y)
    return AudioMetrics(
        *levels,
        snr_db=plain,
        segmental_snr_db=_segmental(x, y, max(1, int(SEGMENT_SECONDS * sample_rate_hz))),
        log_mel_db=_log_mel_distance(x, y, sample_rate_hz),
        lag=lag,
        gain=gain,
        aligned_snr_db=aligned,
        swapped_channels=_closer_when_swapped(x, y, plain),
    )


def snr_db(reference: Doubles, other: Doubles) -> float | None:
    """Signal against difference; inf when equal, None for a silent reference."""
    signal, noise = float(np.sum(reference**2)), float(np.sum((reference - other) ** 2))
    if not signal:
        return None
    return 10 * float(np.log10(signal / noise)) if noise else float("inf")


def _segmental(a: Doubles, b: Doubles, size: int) -> float | None:
    count = a.shape[-1] // size
    if not count:
        return None
    pieces = [v[:, : count * size].reshape(v.shape[0], count, size) for v in (a, b)]
    signal = np.sum(pieces[0] ** 2, axis=(0, 2))
    noise = np.sum((pieces[0] - pieces[1]) ** 2, axis=(0, 2))
    loud = signal > 1e-9 * size  # -90 dB of full scale
    if not loud.any():
        return None
    ratio = signal[loud] / np.maximum(noise[loud], 1e-30)
    return float(np.clip(10 * np.log10(ratio), *SEGMENT_LIMITS_DB).mean())


def _align(a: Doubles, b: Doubles, largest_lag: int) -> tuple[int | None, float | None, float | None]:
    """Lag and gain of the first channel mix, and the SNR of all channels after both."""
    mono_a, mono_b = a.mean(0), b.mean(0)
    if not mono_a.any() or not mono_b.any():
        return None, None, None
    n = len(mono_a)
    size = 1 << (2 * n - 1).bit_length()
    cross = np.fft.irfft(np.conj(np.fft.rfft(mono_a, size)) * np.fft.rfft(mono_b, size), size)
    reach = min(largest_lag, n - 1)
    lags = np.r_[np.arange(reach + 1), np.arange(-reach, 0)]
    lag = int(lags[np.argmax(np.abs(cross[lags]))])
    start_a, start_b = max(0, -lag), max(0, lag)
    length = n - abs(lag)
    x, y = a[:, start_a : start_a + length], b[:, start_b : start_b + length]
    power = float(np.sum(y * y))
    if not power:
        return lag, None, None
    gain = float(np.sum(x * y)) / power
    return lag, gain, snr_db(x, y * gain)


def _closer_when_swapped(a: Doubles, b: Doubles, plain: float | None) -> bool:
    if a.shape[0] != 2 or plain is None:
        return False
    swapped = snr_db(a, b[::-1])
    return swapped is not None and swapped > plain + 6


def log_spectrogram(
    mono: npt.NDArray[Any], sample_rate_hz: int, num_mels: int = NUM_MELS, max_columns: int | None = None
) -> Doubles:
    """Log-mel spectrogram [bands, columns] in dB of full scale, at least FLOOR_DB; NaN counts as silence."""
    size = max(16, int(FFT_SECONDS * sample_rate_hz))
    x = np.nan_to_num(np.asarray(mono, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    if len(x) < size:
        x = np.pad(x, (0, size - len(x)))
    step = size // 4
    if max_columns is not None:
        step = max(step, (len(x) - size) // max_columns + 1)
    starts = np.arange(0, len(x) - size + 1, step)
    window = np.hanning(size)
    power = np.abs(np.fft.rfft(x[starts[:, None] + np.arange(size)] * window)) ** 2 / (window.sum() / 2) ** 2
    mel = power @ _mel_filters(size, sample_rate_hz, num_mels)
    return np.asarray(np.maximum(10 * np.log10(np.maximum(mel, 1e-30)), FLOOR_DB).T, np.float64)


def _log_mel_distance(a: Doubles, b: Doubles, sample_rate_hz: int) -> float:
    spectra = [log_spectrogram(v.mean(0), sample_rate_hz) for v in (a, b)]
    return float(np.abs(spectra[0] - spectra[1]).mean())


def _mel_filters(size: int, sample_rate_hz: int, num_mels: int) -> Doubles:
    """Triangles [bins, bands] on the mel scale 2595 log10(1 + f / 700)."""
    bins = np.fft.rfftfreq(size, 1 / sample_rate_hz)
    top = 2595 * np.log10(1 + sample_rate_hz / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, num_mels + 2) / 2595) - 1)
    up = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return np.asarray(np.maximum(0, np.minimum(up, down)), np.float64)
