"""Sample-rate conversion.

`upstream` is the filter of the published code (torchaudio.functional.resample with its defaults, `sinc_interp_hann`),
written in NumPy, so that a reference clip gives the codes that upstream's gives:

    y[n] = sum_i x[i] h(i / orig - n / new)        h(t) = c sinc(b t) cos^2(pi b t / (2 w))   for |b t| < w, else 0
    b = rolloff * min(orig, new)   c = b / orig   w = 6 zero crossings   rolloff = 0.99   (rates divided by their gcd)

`soxr` is libsoxr at "very high quality", the better filter. Figures of both: docs/text-and-voices.md.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
import numpy.typing as npt

from runtime.errors import BackendUnavailableError

Waveform = npt.NDArray[np.float32]  # [channels, samples]

LOWPASS_FILTER_WIDTH = 6
ROLLOFF = 0.99


class Resampler(str, Enum):
    UPSTREAM = "upstream"
    SOXR = "soxr"


def resample(waveform: Waveform, from_hz: int, to_hz: int, resampler: Resampler = Resampler.UPSTREAM) -> Waveform:
    """Convert `waveform` [channels, samples]; the result has ceil(samples * to / from) samples."""
    if from_hz == to_hz:
        return waveform
    return _soxr(waveform, from_hz, to_hz) if resampler is Resampler.SOXR else _upstream(waveform, from_hz, to_hz)


def _upstream(waveform: Waveform, from_hz: int, to_hz: int) -> Waveform:
    divisor = math.gcd(from_hz, to_hz)
    orig, new = from_hz // divisor, to_hz // divisor
    kernel, first = _kernel(orig, new)
    num_samples = waveform.shape[1]
    num_out = -(-new * num_samples // orig)
    num_blocks = -(-num_out // new)  # a block: `orig` samples in, `new` samples out, the same `new` filters each time

    num_taps = kernel.shape[1]
    left, right = int(-first.min()), int(first.max()) + num_taps
    padded = np.pad(waveform, ((0, 0), (left, right + (num_blocks * orig - num_samples))))
    index = (np.arange(num_blocks) * orig)[:, None] + first + left  # [block, phase], tap 0
    out = np.zeros((waveform.shape[0], num_blocks, new), np.float64)
    for tap in range(num_taps):
        out += kernel[:, tap] * padded[:, index + tap]
    return out.reshape(waveform.shape[0], -1)[:, :num_out].astype(np.float32)


def _kernel(orig: int, new: int) -> tuple[Waveform, npt.NDArray[np.int64]]:
    """Filter taps [new, taps] and the input index of tap 0, relative to the block, for each phase.

    In float32 and in upstream's order of operations: the rounding of t is worth 8e-6 in the samples at 44.1 kHz, and
    reference codes must be upstream's.
    """
    f32 = np.float32
    base = min(orig, new) * ROLLOFF
    half_width = LOWPASS_FILTER_WIDTH * orig / base  # in input samples
    phase = np.arange(0, -new, -1, dtype=f32)[:, None] / f32(new)
    first = np.ceil(np.arange(new) * orig / new - half_width).astype(np.int64)
    taps = first[:, None] + np.arange(math.floor(2 * half_width) + 1)
    t = (phase + taps.astype(f32) / f32(orig)) * f32(base)
    t = np.clip(t, f32(-LOWPASS_FILTER_WIDTH), f32(LOWPASS_FILTER_WIDTH))
    window = np.cos(t * f32(np.pi) / f32(LOWPASS_FILTER_WIDTH) / f32(2)) ** 2
    t = t * f32(np.pi)
    sinc = np.where(t == 0, f32(1), np.sin(t) / np.where(t == 0, f32(1), t))
    return sinc * (window * f32(base / orig)), first


def _soxr(waveform: Waveform, from_hz: int, to_hz: int) -> Waveform:
    try:
        import soxr
    except ImportError as error:
        raise BackendUnavailableError(
            "resampler soxr: the package soxr is missing; pip install 'moss-tts-nano-ascend[audio]', "
            "or use the resampler upstream"
        ) from error
    out = np.asarray(soxr.resample(waveform.T, from_hz, to_hz, quality="VHQ"), np.float32).T
    num_out = -(-to_hz * waveform.shape[1] // from_hz)  # soxr rounds to nearest; the contract is ceil
    out = np.pad(out[:, :num_out], ((0, 0), (0, max(0, num_out - out.shape[1]))))
    return np.ascontiguousarray(out)
