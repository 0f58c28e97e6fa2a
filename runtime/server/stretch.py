"""`speed`: a phase vocoder that changes the length and keeps the pitch (n_fft 768, hop 192; SERVING.md section 2).

Frames of the short-time Fourier transform are read `speed` frames apart; magnitudes are interpolated between two of
them, phases advance by what the original advances there. Method: Flanagan and Golden, 1966; Laroche and Dolson, 1999.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

N_FFT, HOP = 768, 192


def change_speed(pcm: bytes, speed: float) -> bytes:
    """s16le mono at `speed` times the speed: 2.0 is half as long."""
    if speed == 1.0:
        return pcm
    samples = np.frombuffer(pcm, "<i2").astype(np.float64)
    length = max(1, round(len(samples) / speed))
    window = np.hanning(N_FFT + 1)[:-1]
    padded = np.pad(samples, (0, N_FFT))  # the first frame is whole: its phases belong together
    starts = np.arange(0, len(padded) - N_FFT + 1, HOP)
    spectra = np.fft.rfft(np.stack([padded[s : s + N_FFT] * window for s in starts]))
    spectra = np.concatenate([spectra, np.zeros((2, spectra.shape[1]))])
    steps = np.arange(0, length / HOP + N_FFT / HOP) * speed
    steps = steps[steps < len(starts)]
    base = steps.astype(int)
    share = (steps - base)[:, None]
    magnitude = (1 - share) * np.abs(spectra[base]) + share * np.abs(spectra[base + 1])
    expected = 2 * np.pi * HOP * np.arange(spectra.shape[1]) / N_FFT
    turned = np.angle(spectra[base + 1]) - np.angle(spectra[base]) - expected
    turned = expected + turned - 2 * np.pi * np.round(turned / (2 * np.pi))
    phase = np.angle(spectra[:1]) + np.concatenate([np.zeros((1, len(expected))), np.cumsum(turned[:-1], axis=0)])
    return _overlapped(np.fft.irfft(magnitude * np.exp(1j * phase)), window, length)


def _overlapped(frames: npt.NDArray[np.float64], window: npt.NDArray[np.float64], length: int) -> bytes:
    """Overlap-add with the window that was used before, divided by the sum of its squares."""
    total = np.zeros(max(len(frames) * HOP + N_FFT, length + N_FFT))
    weight = np.zeros_like(total)
    for index, frame in enumerate(frames):
        at = slice(index * HOP, index * HOP + N_FFT)
        total[at] += frame * window
        weight[at] += window**2
    sound = (total / np.maximum(weight, 1e-3))[:length]
    return np.rint(np.clip(sound, -32768, 32767)).astype("<i2").tobytes()
