"""The codec on the host: graphs and cache rings -> encode a clip, decode codes, decode a stream as it comes.

    codec.encode(waveform [channels, N])  -> codes [F, n_vq]      F = floor(N / samples_per_frame)
    codec.decode(codes [F, n_vq])         -> waveform [channels, F * samples_per_frame]
    with codec.stream() as stream:
        stream.push(codes [n, n_vq])      -> waveform [channels, n * samples_per_frame]

Both ways work as a stream: whole clips run through `codec_encode` and `codec_stream` in chunks, which is faster than
one large graph and takes memory that does not grow (docs/codec.md has the figures). Every layer keeps its window of
keys and values in a ring that is allocated once; a chunk writes its new rows into it, and nothing else moves
(codec_rings.py). RoPE is applied before the rows are stored, so the order of slots does not matter.

The sizes that can run are those of the sessions: any number of frames when the frame axis F of the session's spec is
open, exactly its number when it is bound. A shorter chunk is padded on the right. The codec is causal, so padding
cannot touch what comes before it, and its output is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Session
from runtime.codec_rings import HostGraph, RingGraph, Rings
from runtime.config import CodecConfig
from runtime.errors import AudioError, GenerationError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class WaveformStream(Protocol):
    """A decoder for one utterance; a context manager."""

    def push(self, codes: Ints) -> Floats: ...
    def close(self) -> None: ...
    def __enter__(self) -> WaveformStream: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SpeechCodec(Protocol):
    """What speaking needs of a codec: `Codec` below, or the graphs of a published package (package_codec.py)."""

    @property
    def config(self) -> CodecConfig: ...
    def encode(self, waveform: Floats) -> Ints: ...
    def decode(self, codes: Ints) -> Floats: ...
    def stream(self) -> WaveformStream: ...
    def close(self) -> None: ...


class Codec:
    """Owns its graphs; rings of finished streams are kept for the next one."""

    def __init__(
        self, config: CodecConfig, encode: Sequence[Session] | RingGraph, stream: Sequence[Session] | RingGraph
    ) -> None:
        """`encode` and `stream`: codec_encode and codec_stream, as sessions with host memory, one per size when sizes
        are bound, or as a graph whose rings lie elsewhere. Without a session of codec_encode it only decodes.
        """
        self.config = config
        self._encode = encode if isinstance(encode, RingGraph) else HostGraph(config.encoder, encode)
        self._stream = stream if isinstance(stream, RingGraph) else HostGraph(config.decoder, stream)
        if not self._stream.sizes:
            raise GenerationError("a codec needs at least one session of codec_stream")

    def encode(self, waveform: Floats) -> Ints:
        """Codes [F, n_vq] of a clip [channels, N] at the codec's sample rate; a partial last frame is dropped."""
        config = self.config
        if not self._encode.sizes:
            raise GenerationError("this codec was opened without codec_encode: it only decodes")
        if waveform.ndim != 2 or waveform.shape[0] != config.num_channels:
            raise AudioError(f"clip: expected [{config.num_channels}, samples], got {list(waveform.shape)}")
        samples = config.samples_per_frame
        num_frames = waveform.shape[1] // samples
        if num_frames < 1:
            raise AudioError(f"clip: {waveform.shape[1]} samples are shorter than one frame of {samples}")
        if not np.isfinite(waveform).all():
            raise AudioError("clip: NaN or infinite samples; read the file again")
        codes = np.empty((num_frames, config.n_vq), np.int32)
        rings = self._encode.take_rings()
        try:
            for chunk in self._encode.chunks(0, num_frames):
                frames = slice(chunk.first, chunk.first + chunk.count)
                padded = np.zeros((1, config.num_channels, chunk.size * samples), np.float32)
                padded[0, :, : chunk.count * samples] = waveform[:, frames.start * samples : frames.stop * samples]
                codes[frames] = rings.run(chunk, {"waveform": padded})["codes"][0, :, : chunk.count].T
        finally:
            self._encode.hand_back(rings)
        return codes

    def decode(self, codes: Ints, upstream_chunk_frames: int | None = None) -> Floats:
        """Waveform [channels, F * samples_per_frame] of codes [F, n <= n_vq]: the first n codebooks.

        With `upstream_chunk_frames` the result is upstream's chunked decoding (SOUNDEFFECT.md 6.4): it stores a whole
        chunk before it attends, so the first frames of a chunk lose the context that the chunk overwrote.
        """
        pieces = list(self.decode_pieces(codes, upstream_chunk_frames))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    def decode_pieces(self, codes: Ints, upstream_chunk_frames: int | None = None) -> Iterator[Floats]:
        """The waveform of `decode`, chunk by chunk."""
        chunk = upstream_chunk_frames or max(len(codes), 1)
        with self.stream() as stream:
            for start in range(0, max(len(codes), 1), chunk):
                part = codes[start : start + chunk]
                if upstream_chunk_frames:
                    stream.forget_for(len(part))
                yield stream.push(part)

    def stream(self) -> DecodeStream:
        """A decoder for one utterance. Close it (or use `with`): its rings go to the next one."""
        return DecodeStream(self.config, self._stream)

    def close(self) -> None:
        """Free both graphs."""
        self._encode.close()
        self._stream.close()

    def __enter__(self) -> Codec:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DecodeStream:
    """Codes in, waveform out, chunk by chunk; any chunking gives the same waveform."""

    def __init__(self, config: CodecConfig, graph: RingGraph) -> None:
        self.num_frames = 0  # decoded so far
        self._config, self._graph = config, graph
        self._rings: Rings | None = graph.take_rings()

    def push(self, codes: Ints) -> Floats:
        """Waveform [channels, n * samples_per_frame] of the next codes [n, 1 to n_vq]."""
        codes = self._checked(codes)
        rings = self._open_rings()
        samples = self._config.samples_per_frame
        waveform = np.empty((self._config.num_channels, len(codes) * samples), np.float32)
        start = self.num_frames
        for chunk in self._graph.chunks(start, len(codes)):
            at, count = chunk.first - start, chunk.count
            padded = np.zeros((1, self._config.n_vq, chunk.size), np.int32)
            padded[0, :, :count] = codes[at : at + count].T
            decoded = rings.run(chunk, {"codes": padded})["waveform"]
            waveform[:, at * samples : (at + count) * samples] = decoded[0, :, : count * samples]
            self.num_frames += count
        return waveform

    def forget_for(self, num_frames: int) -> None:
        """Hide what upstream's ring loses when it stores the next `num_frames` frames before it attends to them."""
        self._open_rings().hide_before(self.num_frames + num_frames)

    def close(self) -> None:
        """Hand the rings on; a second call does nothing."""
        if self._rings is not None:
            self._graph.hand_back(self._rings)
            self._rings = None

    def __enter__(self) -> DecodeStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_rings(self) -> Rings:
        if self._rings is None:
            raise GenerationError("this decode stream is closed; open another with codec.stream()")
        return self._rings

    def _checked(self, codes: Ints) -> Ints:
        """Codes [n, n_vq]: codebooks that are not given are absent, which the graph reads as the code V."""
        n_vq, V = self._config.n_vq, self._config.codebook_size
        if codes.ndim != 2 or not 1 <= codes.shape[1] <= n_vq or not len(codes) or codes.dtype.kind not in "iu":
            got = f"{codes.dtype}{list(codes.shape)}"
            raise GenerationError(f"codes: expected whole numbers [frames, 1 to {n_vq}], got {got}")
        if codes.min() < 0 or codes.max() > V:
            raise GenerationError(
                f"codes: expected 0 to {V - 1} ({V} for an absent codebook), got {codes.min()} to {codes.max()}"
            )
        whole = np.full((len(codes), n_vq), V, np.int32)
        whole[:, : codes.shape[1]] = codes
        return whole

