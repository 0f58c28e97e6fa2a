"""Reference clips: the one place that reads audio files, through soundfile (WAV, FLAC, OGG, MP3, AIFF, …).

    file ─ recognise ─ read ─ levels ─ channels ─ (trim) ─ resample ─► Clip: float32 [channels, samples], codec's rate

What cannot serve as a voice is refused with the reason; what can, but should be known, becomes a note. The published
code trims nothing and changes no level, and neither does this unless asked: the codes must be upstream's.
Writing is in audio_writer.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import AudioError
from runtime.resample import Resampler, Waveform, resample

# Rules; docs/text-and-voices.md gives the reason for each number.
MIN_SECONDS = 1.0
MAX_SECONDS = 60.0  # 750 frames
MIN_RATE_HZ, DULL_RATE_HZ = 4_000, 16_000  # below: no speech left / nothing above 8 kHz
SILENT_DBFS = -60.0  # peak
QUIET_DBFS = -40.0  # loudest 50 ms
FULL_SCALE = 0.99  # two equal neighbours at or above are a clipped run; 8-bit full scale is 127/128
CLIPPED_SHARE = 1e-4
DC_OFFSET = 0.02
INTEGER_PEAK = 100.0  # nobody's float samples; integers stored as float
STEADY_DB = 3.0  # level spread: noise and tones have < 1 dB, speech with as much noise as speech has > 5 dB
NOISY_DB = 8.0
WINDOW_SECONDS = 0.05
TRIM_DB = 40.0  # below the loudest window
TRIM_MARGIN_SECONDS = 0.1

_STREAMED_SIZES = (0, 0x7FFFFFFF, 0xFFFFFFFF)  # what writers that cannot seek put as the size of the WAV data
_NOT_AUDIO = (
    (b"version https://git-lfs", "is a Git LFS pointer, not audio; run: git lfs pull"),
    (b"<", "is a web page or XML, not audio; download the file itself"),
    (b"{", "is JSON, not audio"),
    (b"PK\x03\x04", "is a ZIP archive, not audio; unpack it"),
    (b"\x1aE\xdf\xa3", "is WebM or Matroska, which libsndfile cannot read; run: ffmpeg -i FILE clip.wav"),
)


@dataclass(frozen=True, slots=True)
class ClipRules:
    """What a caller may choose; the defaults are upstream's behaviour."""

    max_seconds: float = MAX_SECONDS
    trim: bool = False  # cut silence at both ends
    resampler: Resampler = Resampler.UPSTREAM


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip that can serve as a voice, in the codec's format, with what should be known about it."""

    waveform: Waveform  # [channels, samples]
    sample_rate_hz: int
    source_rate_hz: int
    source_channels: int
    peak_dbfs: float
    loudest_dbfs: float  # RMS of the loudest 50 ms
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return float(self.waveform.shape[1] / self.sample_rate_hz)


def read_clip(path: Path, sample_rate_hz: int = 48_000, num_channels: int = 2, rules: ClipRules | None = None) -> Clip:
    """Read a clip as float32 [num_channels, samples] at `sample_rate_hz`; AudioError says why it cannot be a voice."""
    rules = rules or ClipRules()
    _recognise(path)
    samples, source_rate_hz, notes = _read(path, rules.max_seconds)
    if not np.isfinite(samples).all():
        raise AudioError(f"{path}: {np.count_nonzero(~np.isfinite(samples))} samples are NaN or infinite; repair it")
    if source_rate_hz < min(DULL_RATE_HZ, sample_rate_hz):
        notes.append(f"{source_rate_hz} Hz: nothing above {source_rate_hz // 2} Hz, the voice will sound dull")
    source_channels = samples.shape[0]
    if source_channels > 2:
        notes.append(f"{source_channels} channels averaged to one (upstream refuses such files)")
    peak_dbfs, loudest_dbfs, level_notes = _levels(path, samples, source_rate_hz)
    notes += level_notes
    waveform = _to_channels(samples, num_channels)
    if rules.trim:
        waveform = _trim(waveform, source_rate_hz)
    if waveform.shape[1] < MIN_SECONDS * source_rate_hz:
        after = " after trimming" if rules.trim else ""
        raise AudioError(
            f"{path}: {waveform.shape[1] / source_rate_hz:.2f} s{after}; expected at least {MIN_SECONDS:g} s of speech"
        )
    waveform = resample(waveform, source_rate_hz, sample_rate_hz, rules.resampler)
    return Clip(waveform, sample_rate_hz, source_rate_hz, source_channels, peak_dbfs, loudest_dbfs, tuple(notes))


def _recognise(path: Path) -> None:
    """Refuse, by its first bytes, what is not audio."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise AudioError(f"{path}: cannot read the clip ({error.strerror})") from error
    if not head:
        raise AudioError(f"{path} is empty (0 bytes); expected an audio file")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, reason in _NOT_AUDIO:
        if text.startswith(magic):
            raise AudioError(f"{path} {reason}")
    if head[4:8] == b"ftyp":
        raise AudioError(f"{path} is MP4/M4A, which libsndfile cannot read; run: ffmpeg -i {path.name} clip.wav")


def _read(path: Path, max_seconds: float) -> tuple[Waveform, int, list[str]]:
    """Samples [channels, N] as stored, their rate, and notes; a file that breaks off is read as far as it goes."""
    import soundfile

    notes = []
    blocks: list[npt.NDArray[np.float32]] = []
    try:
        with soundfile.SoundFile(str(path)) as file:
            rate_hz = int(file.samplerate)
            if rate_hz < MIN_RATE_HZ:
                raise AudioError(f"{path}: {rate_hz} Hz; expected at least {MIN_RATE_HZ} Hz, below there is no speech")
            missing = _read_blocks(file, blocks, int(max_seconds * rate_hz) + 1)
    except soundfile.SoundFileError as error:
        raise AudioError(
            f"{path} is not an audio file that can be read ({_reason(error)}); expected WAV, FLAC, OGG or MP3"
        ) from error
    samples = np.concatenate(blocks).T if blocks else np.zeros((1, 0), np.float32)
    seconds = samples.shape[1] / rate_hz
    if seconds > max_seconds:
        raise AudioError(
            f"{path}: longer than {max_seconds:g} s, the limit for a reference clip; cut it, 5 to 15 s of clean speech "
            "are enough"
        )
    if not samples.size:
        raise AudioError(f"{path} holds no samples (only a header); expected at least {MIN_SECONDS:g} s of speech")
    missing = missing or _wav_bytes_missing(path)
    if missing:
        notes.append(f"the file breaks off ({missing}); the {seconds:.2f} s that are there are used")
    return samples, rate_hz, notes


def _read_blocks(file: Any, blocks: list[npt.NDArray[np.float32]], limit: int) -> str:
    """Append blocks until the end or `limit` samples; return what is missing ("" when nothing is)."""
    import soundfile

    num_read = 0
    while num_read < limit:
        try:
            block = file.read(min(1 << 16, limit - num_read), dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            if not num_read:
                raise
            return _reason(error)
        if not len(block):
            break
        blocks.append(block)
        num_read += len(block)
    if num_read < min(file.frames, limit):
        return f"{file.frames} samples announced, {num_read} found"
    return ""


def _reason(error: Exception) -> str:
    """libsndfile's own words, without the path that it repeats."""
    return str(error).rsplit(": ", 1)[-1].strip().rstrip(".")


def _wav_bytes_missing(path: Path) -> str:
    """What the data chunk of a WAV file announces beyond the end of the file ("" when nothing)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
        if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
            return ""
        while len(chunk := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", chunk)
            if name == b"data":
                found = size - file.tell()
                cut = length > found and length not in _STREAMED_SIZES
                return f"{length} bytes announced, {found} found" if cut else ""
            file.seek(length + (length & 1), 1)
    return ""


def _levels(path: Path, samples: Waveform, rate_hz: int) -> tuple[float, float, list[str]]:
    """Peak and loudest 50 ms in dBFS, and notes; AudioError for what is not speech."""
    peak = float(np.abs(samples).max())
    if peak > INTEGER_PEAK:
        raise AudioError(f"{path}: samples reach {peak:g}, expected -1 to 1: integers stored as float? Divide them")
    peak_dbfs = _decibel(peak)
    if peak_dbfs < SILENT_DBFS:
        raise AudioError(f"{path} is silent: peak {peak_dbfs:.0f} dBFS, expected speech above {SILENT_DBFS:.0f} dBFS")
    notes = []
    offset = float(np.abs(samples.mean(axis=1)).max())
    levels = window_levels(samples - samples.mean(axis=1, keepdims=True), rate_hz)
    loudest_dbfs = float(levels.max())
    spread = float(np.percentile(levels, 90) - np.percentile(levels, 10))
    if spread < STEADY_DB and samples.shape[1] >= MIN_SECONDS * rate_hz:
        raise AudioError(
            f"{path} is not speech but a steady tone or noise: its level varies by {spread:.1f} dB, "
            f"expected at least {STEADY_DB:g} dB"
        )
    if spread < NOISY_DB:
        notes.append(f"the level varies by {spread:.0f} dB only: background noise or music will be cloned too")
    if loudest_dbfs < QUIET_DBFS:
        notes.append(f"very quiet: the loudest 50 ms are at {loudest_dbfs:.0f} dBFS")
    if peak > 1:
        notes.append(f"samples reach {peak:.2f}, beyond full scale; used as they are")
    high = np.abs(samples) >= FULL_SCALE
    clipped = np.count_nonzero(high[:, 1:] & (samples[:, 1:] == samples[:, :-1]))
    if clipped > CLIPPED_SHARE * samples.size:
        notes.append(f"clipped: {clipped} samples stand at full scale ({100 * clipped / samples.size:.2g} %)")
    if offset > DC_OFFSET:
        notes.append(f"constant offset of {offset:.2f} (DC); remove it with a high-pass filter")
    return peak_dbfs, loudest_dbfs, notes


def window_levels(samples: Waveform, rate_hz: int) -> npt.NDArray[np.float64]:
    """RMS in dBFS of each whole 50 ms, of the mean of the channels; at least one value."""
    mono = samples.mean(axis=0, dtype=np.float64)
    window = min(int(WINDOW_SECONDS * rate_hz), len(mono))
    frames = mono[: len(mono) // window * window].reshape(-1, window)
    level: npt.NDArray[np.float64] = 10 * np.log10(np.square(frames).mean(axis=1) + 1e-12)
    return level


def _decibel(amplitude: float) -> float:
    return 20 * float(np.log10(max(amplitude, 1e-6)))


def _to_channels(samples: Waveform, num_channels: int) -> Waveform:
    """Upstream's rule: one channel is repeated, several become one by their mean; more than two by their mean too."""
    if samples.shape[0] == num_channels:
        return samples
    mono = samples if samples.shape[0] == 1 else samples.mean(axis=0, keepdims=True)
    return np.repeat(mono, num_channels, axis=0)


def _trim(waveform: Waveform, rate_hz: int) -> Waveform:
    """Cut both ends where the level stays TRIM_DB below the loudest window, leaving a margin."""
    levels = window_levels(waveform, rate_hz)
    loud = np.nonzero(levels > levels.max() - TRIM_DB)[0]
    window, margin = int(WINDOW_SECONDS * rate_hz), int(TRIM_MARGIN_SECONDS * rate_hz)
    return waveform[:, max(0, int(loud[0]) * window - margin) : (int(loud[-1]) + 1) * window + margin]
