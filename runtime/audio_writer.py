"""Write speech to a file: WAV as 16-bit, 24-bit or float, FLAC, OGG; stereo, or mono as the mean of the channels.

Integers are round-half-to-even(x * 32767), as the published ONNX runtime writes them (MODEL.md 6.8). Samples beyond
full scale are clipped and counted, never wrapped; nothing is dithered. WAV is written by hand: libsndfile stamps the
time into float files, and the same seed must give the same bytes.
"""

from __future__ import annotations

import os
import struct
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from runtime.errors import AudioError

STANDARD_OUTPUT = Path("-")
UNKNOWN_LENGTH = 0xFFFFFFFF  # in a WAV header: the samples go on until the file ends
SUFFIXES = (".wav", ".flac", ".ogg")
_MAX_DATA_BYTES = 0xFFFFFFFF - 64  # sizes in a WAV header are 32-bit
_OGG_BLOCK = 1 << 14  # libsndfile 1.0.31 and earlier overflow the stack on large Vorbis blocks


class SampleFormat(str, Enum):
    PCM16 = "pcm16"
    PCM24 = "pcm24"
    FLOAT = "float"


_BYTES = {SampleFormat.PCM16: 2, SampleFormat.PCM24: 3, SampleFormat.FLOAT: 4}


@dataclass(frozen=True, slots=True)
class Written:
    """What was written."""

    path: Path
    num_samples: int  # per channel
    num_clipped: int
    sample_rate_hz: int

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sample_rate_hz


def write_audio(
    path: Path,
    waveform: npt.NDArray[np.floating[Any]],
    sample_rate_hz: int,
    sample_format: SampleFormat = SampleFormat.PCM16,
    mono: bool = False,
) -> Written:
    """Write `waveform` [channels, samples]; the suffix of `path` chooses WAV, FLAC or OGG."""
    with AudioWriter(path, sample_rate_hz, len(waveform), sample_format, mono) as writer:
        writer.write(waveform)
        return writer.close()


class _Writer:
    """Checks, mixes, clips and counts pieces [channels, n] on their way to a sink."""

    _sink: _Sink

    def __init__(self, path: Path, sample_rate_hz: int, num_channels: int, mono: bool) -> None:
        self._path, self._rate_hz, self._num_channels, self._mono = path, sample_rate_hz, num_channels, mono
        self._num_samples = self._num_clipped = 0

    def write(self, waveform: npt.NDArray[np.floating[Any]]) -> None:
        """Append a piece [channels, n]."""
        if waveform.ndim != 2 or len(waveform) != self._num_channels:
            raise AudioError(f"{self._path}: expected [{self._num_channels}, samples], got {list(waveform.shape)}")
        bad = np.count_nonzero(~np.isfinite(waveform))
        if bad:
            raise AudioError(f"{self._path}: {bad} of {waveform.size} samples are NaN or infinite; nothing was written")
        piece = waveform.astype(np.float32)
        if self._mono:
            piece = piece.mean(axis=0, keepdims=True)
        self._num_clipped += int(np.count_nonzero(np.abs(piece) > 1))
        self._num_samples += piece.shape[1]
        try:
            self._sink.write(np.clip(piece, -1, 1).T)
        except OSError as error:
            raise AudioError(f"{self._path}: writing failed ({error.strerror})") from error

    def _written(self) -> Written:
        return Written(self._path, self._num_samples, self._num_clipped, self._rate_hz)


class AudioWriter(_Writer):
    """Writes pieces [channels, n] as they come, beside the final name.

    `close` completes the header and moves the file there; leaving the context without it removes what was written.
    """

    def __init__(
        self,
        path: Path,
        sample_rate_hz: int,
        num_channels: int,
        sample_format: SampleFormat = SampleFormat.PCM16,
        mono: bool = False,
    ) -> None:
        check_output_path(path, sample_format)
        super().__init__(path, sample_rate_hz, num_channels, mono)
        try:
            handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(handle, 0o666 & ~umask)  # mkstemp makes 0600
        except OSError as error:
            raise AudioError(f"{path}: cannot write there ({error.strerror})") from error
        self._scratch: Path | None = Path(scratch)
        channels = 1 if mono else num_channels
        if path.suffix.lower() == ".wav":
            self._sink = _WavSink(os.fdopen(handle, "w+b"), sample_rate_hz, channels, sample_format)
        else:
            os.close(handle)
            self._sink = _SndfileSink(self._scratch, path.suffix.lower(), sample_rate_hz, channels, sample_format)

    def close(self) -> Written:
        """Complete the file and move it to its name."""
        assert self._scratch is not None, "closed twice"
        try:
            self._sink.close()
            self._scratch.replace(self._path)
        except OSError as error:
            raise AudioError(f"{self._path}: writing failed ({error.strerror})") from error
        self._scratch = None
        return self._written()

    def __enter__(self) -> AudioWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scratch is not None:
            self._sink.close()
            self._scratch.unlink(missing_ok=True)
            self._scratch = None


class LiveWriter(_Writer):
    """Writes pieces where they can be heard at once: raw samples to standard output ("-"), or a WAV under its own name.

    The growing WAV says that its length is unknown, which players accept, until `close` or the end of the context
    writes the true length. Unlike every other file it is there before it is whole: that is what it is for.
    """

    def __init__(
        self, path: Path, sample_rate_hz: int, num_channels: int, sample_format: SampleFormat, mono: bool
    ) -> None:
        check_live_path(path)
        is_file = path != STANDARD_OUTPUT
        super().__init__(path if is_file else Path("standard output"), sample_rate_hz, num_channels, mono)
        self._closed = False
        channels = 1 if mono else num_channels
        try:
            file = path.open("wb", buffering=0) if is_file else os.fdopen(os.dup(1), "wb", buffering=0)
            self._sink = (
                _WavSink(file, sample_rate_hz, channels, sample_format, growing=True)
                if is_file
                else _PcmSink(file, sample_format)
            )
        except OSError as error:
            raise AudioError(f"{path}: cannot write there ({error.strerror})") from error

    def close(self) -> Written:
        """Complete the header."""
        if not self._closed:
            self._closed = True
            try:
                self._sink.close()
            except OSError as error:
                raise AudioError(f"{self._path}: writing failed ({error.strerror})") from error
        return self._written()

    def __enter__(self) -> LiveWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_live_path(path: Path) -> None:
    """AudioError when a stream cannot go there."""
    if path == STANDARD_OUTPUT:
        return
    if path.suffix.lower() != ".wav":
        raise AudioError(f"{path}: a stream is written to a name that ends in .wav, or as raw samples to -")
    check_output_path(path)


def check_output_path(path: Path, sample_format: SampleFormat = SampleFormat.PCM16) -> None:
    """AudioError when `path` cannot become an audio file; callers ask before they spend minutes on its content."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise AudioError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}, got {suffix or 'no suffix'}")
    if suffix == ".flac" and sample_format is SampleFormat.FLOAT:
        raise AudioError(f"{path}: FLAC holds integers; choose pcm16 or pcm24, or write .wav")
    if not path.parent.is_dir():
        raise AudioError(f"{path}: the directory {path.parent} does not exist; make it first")
    if path.is_dir():
        raise AudioError(f"{path} is a directory; give a file name")


def to_integers(samples: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.int32]:
    """Samples in [-1, 1] as integers, round half to even."""
    # In float32, as upstream computes it; it holds 24-bit integers exactly.
    integers: npt.NDArray[np.int32] = np.rint(samples * np.float32(2 ** (bits - 1) - 1)).astype(np.int32)
    return integers


def wav_header(sample_rate_hz: int, num_channels: int, sample_format: SampleFormat, data_bytes: int) -> bytes:
    """The 44 bytes (58 for float) before the samples; UNKNOWN_LENGTH marks a stream."""
    size = _BYTES[sample_format]
    is_float = sample_format is SampleFormat.FLOAT
    align = size * num_channels
    fmt = struct.pack(
        "<HHIIHH", 3 if is_float else 1, num_channels, sample_rate_hz, sample_rate_hz * align, align, 8 * size
    )
    chunks = b"fmt " + struct.pack("<I", len(fmt)) + fmt
    if is_float:  # formats other than PCM carry an extension size and a fact chunk with the number of samples
        chunks = b"fmt " + struct.pack("<I", len(fmt) + 2) + fmt + b"\0\0"
        chunks += b"fact" + struct.pack("<II", 4, data_bytes // align)
    riff_size = min(4 + len(chunks) + 8 + data_bytes + (data_bytes & 1), 0xFFFFFFFF)
    return b"RIFF" + struct.pack("<I", riff_size) + b"WAVE" + chunks + b"data" + struct.pack("<I", data_bytes)


def wav_samples(samples: npt.NDArray[np.float32], sample_format: SampleFormat) -> bytes:
    """Interleaved samples [n, channels] in [-1, 1] as the bytes of a WAV file."""
    if sample_format is SampleFormat.FLOAT:
        return samples.astype("<f4").tobytes()
    if sample_format is SampleFormat.PCM16:
        return to_integers(samples, 16).astype("<i2").tobytes()
    wide = np.ascontiguousarray(to_integers(samples, 24).astype("<i4"))
    return wide.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


class _Sink(Protocol):
    """Where interleaved samples [n, channels] in [-1, 1] go."""

    def write(self, samples: npt.NDArray[np.float32]) -> None:
        ...

    def close(self) -> None:
        ...


class _PcmSink(_Sink):
    """Raw samples into a pipe; what the reader has not taken yet is waited for."""

    def __init__(self, file: BinaryIO, sample_format: SampleFormat) -> None:
        self._file, self._format = file, sample_format

    def write(self, samples: npt.NDArray[np.float32]) -> None:
        rest = memoryview(wav_samples(samples, self._format))
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


class _WavSink(_Sink):
    def __init__(
        self,
        file: BinaryIO,
        sample_rate_hz: int,
        num_channels: int,
        sample_format: SampleFormat,
        growing: bool = False,
    ) -> None:
        self._file, self._rate_hz, self._channels, self._format = file, sample_rate_hz, num_channels, sample_format
        self._data_bytes = 0
        self._file.write(wav_header(sample_rate_hz, num_channels, sample_format, UNKNOWN_LENGTH if growing else 0))

    def write(self, samples: npt.NDArray[np.float32]) -> None:
        data = wav_samples(samples, self._format)
        if self._data_bytes + len(data) > _MAX_DATA_BYTES:
            raise AudioError("a WAV file holds at most 4 GiB; write .flac or split the text")
        self._data_bytes += len(data)
        self._file.write(data)

    def close(self) -> None:
        if self._data_bytes & 1:  # chunks are padded to an even size
            self._file.write(b"\0")
        self._file.seek(0)
        self._file.write(wav_header(self._rate_hz, self._channels, self._format, self._data_bytes))
        self._file.close()


class _SndfileSink(_Sink):
    def __init__(
        self, path: Path, suffix: str, sample_rate_hz: int, num_channels: int, sample_format: SampleFormat
    ) -> None:
        import soundfile

        self._bits = {SampleFormat.PCM16: 16, SampleFormat.PCM24: 24}.get(sample_format, 0)
        self._is_flac = suffix == ".flac"
        kind, subtype = ("FLAC", f"PCM_{self._bits}") if self._is_flac else ("OGG", "VORBIS")
        self._file = soundfile.SoundFile(
            str(path), "w", sample_rate_hz, num_channels, subtype=subtype, format=kind, endian="FILE"
        )

    def write(self, samples: npt.NDArray[np.float32]) -> None:
        if self._is_flac:
            self._file.write(to_integers(samples, self._bits) << (32 - self._bits))
            return
        for start in range(0, len(samples), _OGG_BLOCK):
            self._file.write(np.ascontiguousarray(samples[start : start + _OGG_BLOCK]))

    def close(self) -> None:
        self._file.close()
