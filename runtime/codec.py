"""The codec on the host: graphs and cache rings -> encode a clip, decode codes, decode a stream as it comes.

    codec.encode(waveform [channels, N])  -> codes [F, n_vq]      F = floor(N / samples_per_frame)
    codec.decode(codes [F, n_vq])         -> waveform [channels, F * samples_per_frame]
    with codec.stream() as stream:
        stream.push(codes [n, n_vq])      -> waveform [channels, n * samples_per_frame]

Both ways work as a stream: whole clips run through `codec_encode` and `codec_stream` in chunks, which is faster than
one large graph and takes memory that does not grow (docs/codec.md has the figures). Every layer keeps its window of
keys and values in a ring that is allocated once; a chunk writes its new rows into it, and nothing else moves. Frame p
lies in the slot p mod ring_frames; RoPE is applied before the rows are stored, so the order of slots does not matter.

The sizes that can run are those of the sessions: any number of frames when the frame axis F of the session's spec is
open, exactly its number when it is bound. A shorter chunk is padded on the right. The codec is causal, so padding
cannot touch what comes before it, and its output is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Session
from runtime.config import CodecConfig, CodecStage
from runtime.errors import AudioError, CapacityError, GenerationError
from runtime.graphs import NO_FRAME, attention_layers, ring_capacity
from runtime.spec import Array

CHUNK_FRAMES = 8  # frames per launch where the session takes any number; measured in docs/codec.md
MAX_TOKENS = 2**20  # positions that the RoPE tables reach

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
    """Owns its sessions; rings of finished streams are kept for the next one."""

    def __init__(self, config: CodecConfig, encode: Sequence[Session], stream: Sequence[Session]) -> None:
        """`encode` and `stream`: the sessions of codec_encode and codec_stream, one per size when sizes are bound.

        Without a session of codec_encode it only decodes.
        """
        if not stream:
            raise GenerationError("a codec needs at least one session of codec_stream")
        self.config = config
        self._encode, self._stream = _Sizes(encode), _Sizes(stream)
        self._idle_encoder: list[_Rings] = []
        self._idle_decoder: list[_Rings] = []

    def encode(self, waveform: Floats) -> Ints:
        """Codes [F, n_vq] of a clip [channels, N] at the codec's sample rate; a partial last frame is dropped."""
        config = self.config
        if not self._encode.sessions:
            raise GenerationError("this codec was opened without codec_encode: it only decodes")
        if waveform.ndim != 2 or waveform.shape[0] != config.num_channels:
            raise AudioError(f"clip: expected [{config.num_channels}, samples], got {list(waveform.shape)}")
        samples = config.samples_per_frame
        num_frames = waveform.shape[1] // samples
        if num_frames < 1:
            raise AudioError(f"clip: {waveform.shape[1]} samples are shorter than one frame of {samples}")
        if not np.isfinite(waveform).all():
            raise AudioError("clip: NaN or infinite samples; read the file again")
        rings = self._idle_encoder.pop() if self._idle_encoder else _Rings(config.encoder)
        rings.clear()
        codes = np.empty((num_frames, config.n_vq), np.int32)
        for session, size, first, count in self._encode.chunks(num_frames):
            positions = _positions(config.encoder, first, size)
            padded = np.zeros((1, config.num_channels, size * samples), np.float32)
            padded[0, :, : count * samples] = waveform[:, first * samples : (first + count) * samples]
            outputs = session.run({"waveform": padded, "positions": positions, **rings.feeds})
            rings.write(outputs, first, count)
            codes[first : first + count] = outputs["codes"][0, :, :count].T
        self._idle_encoder.append(rings)
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
        rings = self._idle_decoder.pop() if self._idle_decoder else _Rings(self.config.decoder)
        rings.clear()
        return DecodeStream(self.config, self._stream, rings, self._idle_decoder)

    def close(self) -> None:
        """Free all sessions."""
        for session in (*self._encode.sessions, *self._stream.sessions):
            session.close()

    def __enter__(self) -> Codec:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DecodeStream:
    """Codes in, waveform out, chunk by chunk; any chunking gives the same waveform."""

    def __init__(self, config: CodecConfig, sizes: _Sizes, rings: _Rings, idle: list[_Rings]) -> None:
        self.num_frames = 0  # decoded so far
        self._config, self._sizes, self._idle = config, sizes, idle
        self._rings: _Rings | None = rings

    def push(self, codes: Ints) -> Floats:
        """Waveform [channels, n * samples_per_frame] of the next codes [n, 1 to n_vq]."""
        codes = self._checked(codes)
        rings = self._open_rings()
        samples = self._config.samples_per_frame
        waveform = np.empty((self._config.num_channels, len(codes) * samples), np.float32)
        start = self.num_frames
        for session, size, first, count in self._sizes.chunks(len(codes)):
            positions = _positions(self._config.decoder, start + first, size)
            padded = np.zeros((1, self._config.n_vq, size), np.int32)
            padded[0, :, :count] = codes[first : first + count].T
            outputs = session.run({"codes": padded, "positions": positions, **rings.feeds})
            rings.write(outputs, start + first, count)
            waveform[:, first * samples : (first + count) * samples] = outputs["waveform"][0, :, : count * samples]
            self.num_frames += count
        return waveform

    def forget_for(self, num_frames: int) -> None:
        """Hide what upstream's ring loses when it stores the next `num_frames` frames before it attends to them."""
        self._open_rings().hide_before(self.num_frames + num_frames)

    def close(self) -> None:
        """Hand the rings on; a second call does nothing."""
        if self._rings is not None:
            self._idle.append(self._rings)
            self._rings = None

    def __enter__(self) -> DecodeStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_rings(self) -> _Rings:
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


class _Sizes:
    """The sessions of one graph by the number of frames they take; None is a session that takes any."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = tuple(sessions)
        self._by_size: dict[int, Session] = {}
        self._open: Session | None = None
        for session in sessions:
            frames = next(t.shape[-1] for t in session.spec.inputs if t.name == "positions")
            if isinstance(frames, int):
                self._by_size[frames] = session
            else:
                self._open = session

    def chunks(self, num_frames: int) -> Iterator[tuple[Session, int, int, int]]:
        """(session, the frames it takes, the first frame, how many frames count) for each launch, in order.

        Bound sessions: the smallest that takes all that is left, else the largest.
        """
        first = 0
        while left := num_frames - first:
            if self._open is not None:
                session, size = self._open, min(left, CHUNK_FRAMES)
            else:
                size = min((s for s in self._by_size if s >= left), default=max(self._by_size))
                session = self._by_size[size]
            count = min(size, left)
            yield session, size, first, count
            first += count


class _Rings:
    """Keys and values of every attention layer, and which frame each slot holds; fed to the graph where they lie."""

    def __init__(self, stages: tuple[CodecStage, ...]) -> None:
        self._stages, self._layers = stages, attention_layers(stages)
        self._positions = [np.full((1, s.ring_frames), NO_FRAME, np.int32) for s in stages]
        self.feeds: dict[str, Array] = {f"past_positions_{i}": p for i, p in enumerate(self._positions)}
        for i, stage in enumerate(self._layers):
            for kind in ("key", "value"):
                shape = (1, stage.num_heads, ring_capacity(stage), stage.head_size)
                self.feeds[f"past_{kind}_{i}"] = np.zeros(shape, np.float32)

    def clear(self) -> None:
        """Forget everything. Old rows stay where they are: NO_FRAME hides them."""
        for positions in self._positions:
            positions[:] = NO_FRAME

    def hide_before(self, end: int) -> None:
        """Hide the frames that do not fit into a ring together with all frames up to `end`."""
        for stage, positions in zip(self._stages, self._positions, strict=True):
            if stage.context % stage.tokens_per_frame:
                raise GenerationError(
                    f"upstream's chunks: stage {stage.index} sees {stage.context} tokens, which is no whole number of "
                    f"frames ({stage.tokens_per_frame} tokens each); decode without upstream_chunk_frames"
                )
            positions[positions < end - stage.ring_frames] = NO_FRAME

    def write(self, outputs: Mapping[str, Array], first: int, count: int) -> None:
        """Store the new rows of `count` frames from frame number `first` on; rows of padding behind them stay out."""
        for stage, positions in zip(self._stages, self._positions, strict=True):
            for slot, frame, length in _spans(stage, first, count):
                positions[0, slot : slot + length] = np.arange(frame, frame + length)
        for i, stage in enumerate(self._layers):
            n = stage.tokens_per_frame
            for slot, frame, length in _spans(stage, first, count):
                into, out_of = (
                    slice(slot * n, (slot + length) * n),
                    slice((frame - first) * n, (frame - first + length) * n),
                )
                for kind in ("key", "value"):
                    self.feeds[f"past_{kind}_{i}"][:, :, into] = outputs[f"new_{kind}_{i}"][:, :, out_of]


def _spans(stage: CodecStage, first: int, count: int) -> list[tuple[int, int, int]]:
    """Where frames go: (slot, frame, length) of at most two runs; of more frames than slots only the last ones."""
    start, end = max(first, first + count - stage.ring_frames), first + count
    slot = start % stage.ring_frames
    length = min(end - start, stage.ring_frames - slot)
    spans = [(slot, start, length)]
    if start + length < end:
        spans.append((0, start + length, end - start - length))
    return spans


def _positions(stages: Sequence[CodecStage], first: int, size: int) -> Ints:
    """Frame numbers of one launch, padding included; CapacityError beyond the position tables."""
    reach = MAX_TOKENS // max(s.tokens_per_frame for s in stages)
    if first + size > reach:
        raise CapacityError(f"{first + size} frames: the codec's position tables end at {reach}; start a new stream")
    return np.arange(first, first + size, dtype=np.int32)[None]
