"""s16le mono -> the bytes of each format, piece by piece or as a whole file.

    wav   RIFF, PCM_16           pcm   the samples alone         flac   native FLAC
    mp3   MPEG-1 layer 3         opus  Ogg Opus                  aac    ADTS frames

wav and pcm are written by hand, the others by PyAV (which brings the ffmpeg libraries). A stream and a file come from
the same encoder; a file's header is completed at the end, a stream's cannot be.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from runtime.audio_writer import SampleFormat, wav_header

if TYPE_CHECKING:
    from runtime.server.schema import Format

MEDIA_TYPES: dict[str, str] = {
    "wav": "audio/wav", "pcm": "audio/pcm", "flac": "audio/flac", "mp3": "audio/mpeg", "opus": "audio/ogg",
    "aac": "audio/aac",
}  # fmt: skip
UNKNOWN_SIZE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Codec:
    container: str
    codec: str
    sample_format: str
    bit_rate: int | None = None


_CODECS = {
    "flac": _Codec("flac", "flac", "s16"),
    "mp3": _Codec("mp3", "libmp3lame", "s16p", 128_000),
    "opus": _Codec("ogg", "libopus", "s16", 64_000),
    "aac": _Codec("adts", "aac", "fltp", 128_000),
}


class Encoder(Protocol):
    """Samples in, bytes out."""

    def push(self, pcm: bytes) -> bytes:
        """The bytes that some more samples complete; may be none."""
        ...

    def finish(self) -> bytes:
        """What was held back; call once."""
        ...


def media_type(response_format: Format, sample_rate_hz: int) -> str:
    """Content-Type; raw samples say their rate, which nothing else does."""
    kind = MEDIA_TYPES[response_format]
    return f"{kind};rate={sample_rate_hz};channels=1" if response_format == "pcm" else kind


def stream_encoder(response_format: Format, sample_rate_hz: int) -> Encoder:
    """An encoder for bytes that leave as they come."""
    if response_format in ("wav", "pcm"):
        header = wav_header(sample_rate_hz, 1, SampleFormat.PCM16, UNKNOWN_SIZE) if response_format == "wav" else b""
        return _PlainEncoder(header)
    return _AvEncoder(_CODECS[response_format], sample_rate_hz, _Pipe())


def encode_file(response_format: Format, pcm: bytes, sample_rate_hz: int) -> bytes:
    """A whole file."""
    if response_format == "pcm":
        return pcm
    if response_format == "wav":
        return wav_header(sample_rate_hz, 1, SampleFormat.PCM16, len(pcm)) + pcm
    sink = io.BytesIO()
    encoder = _AvEncoder(_CODECS[response_format], sample_rate_hz, sink)
    encoder.push(pcm)
    encoder.finish()
    return sink.getvalue()


class _PlainEncoder:
    """Samples as they are, behind a header that goes with the first of them."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def push(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return b""


class _Pipe:
    """A file that cannot seek and forgets what was taken."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


class _AvEncoder:
    """One stream of one container; `sink` gets the bytes."""

    def __init__(self, codec: _Codec, sample_rate_hz: int, sink: Any) -> None:
        import av

        library: Any = av  # its stubs return the union of all streams
        self._sink, self._rate_hz, self._position = sink, sample_rate_hz, 0
        # bitexact: no random serial number and no version string, so the same samples give the same bytes.
        options = {"fflags": "+bitexact"}
        self._container: Any = library.open(sink, "w", format=codec.container, options=options)
        self._stream: Any = self._container.add_stream(codec.codec, rate=sample_rate_hz)
        self._stream.layout, self._stream.format = "mono", codec.sample_format
        self._stream.codec_context.flags |= 1 << 23  # AV_CODEC_FLAG_BITEXACT
        if codec.bit_rate:
            self._stream.bit_rate = codec.bit_rate
        self._resampler = av.AudioResampler(format=codec.sample_format, layout="mono", rate=sample_rate_hz)

    def push(self, pcm: bytes) -> bytes:
        import av

        if not pcm:
            return self._taken()
        frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm, "<i2")[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate_hz, self._position
        self._position += frame.samples
        for converted in self._resampler.resample(frame):
            self._container.mux(self._stream.encode(converted))
        return self._taken()

    def finish(self) -> bytes:
        for converted in self._resampler.resample(None):
            self._container.mux(self._stream.encode(converted))
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._taken()

    def _taken(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Pipe) else b""
