"""Clocks around what a model is made of: each session, or, on a device, each call of frame model and codec."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from runtime.backends.base import Backend, Session
from runtime.codec import SpeechCodec, WaveformStream
from runtime.frame_model import Floats, Frame, FrameModel, Ints
from runtime.sampling import SamplingParams
from runtime.spec import Array, GraphSpec


class Calls:
    """Wall seconds of every call, by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        yield
        self.seconds.setdefault(stage, []).append(time.perf_counter() - start)

    @property
    def total(self) -> float:
        return sum(sum(seconds) for seconds in self.seconds.values())

    def clear(self) -> None:
        """Forget the warm-up."""
        self.seconds.clear()


class TimedBackend:
    """A backend whose sessions keep time; the stage is the name of the graph."""

    def __init__(self, backend: Backend, calls: Calls) -> None:
        self.name = backend.name
        self._backend, self._calls = backend, calls

    def open(self, spec: GraphSpec, path: Path) -> Session:
        return TimedSession(self._backend.open(spec, path), self._calls)


class TimedSession:
    """A session that keeps time."""

    def __init__(self, session: Session, calls: Calls) -> None:
        self.spec = session.spec
        self._session, self._calls = session, calls

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        with self._calls.clock(self.spec.name):
            return self._session.run(feeds)

    def close(self) -> None:
        self._session.close()


class TimedFrameModel:
    """A frame model whose calls are the stages: copies and launches count together."""

    def __init__(self, model: FrameModel, calls: Calls, fused: bool) -> None:
        self._model, self._calls = model, calls
        self._stage = "step_frame" if fused else "step + frame"
        self._first = True

    @property
    def capacity(self) -> int:
        return self._model.capacity

    @property
    def backend_name(self) -> str:
        return self._model.backend_name

    def prefill(self, rows: Ints) -> None:
        self._first = True
        with self._calls.clock("prefill"):
            self._model.prefill(rows)

    def next_frame(self, uniforms: Floats, sampling: SamplingParams, keep_logits: bool = False) -> Frame:
        stage, self._first = "frame" if self._first else self._stage, False
        with self._calls.clock(stage):
            return self._model.next_frame(uniforms, sampling, keep_logits)

    def force_frame(self, codes: Ints) -> None:
        self._model.force_frame(codes)

    def close(self) -> None:
        self._model.close()


class TimedCodec:
    """A codec whose calls are the stages: copies and launches count together."""

    def __init__(self, codec: SpeechCodec, calls: Calls) -> None:
        self.config = codec.config
        self._codec, self._calls = codec, calls

    def encode(self, waveform: Floats) -> Ints:
        with self._calls.clock("codec_encode"):
            return self._codec.encode(waveform)

    def decode(self, codes: Ints) -> Floats:
        with self._calls.clock("codec_stream"):
            return self._codec.decode(codes)

    def stream(self) -> WaveformStream:
        return _TimedStream(self._codec.stream(), self._calls)

    def close(self) -> None:
        self._codec.close()


class _TimedStream:
    def __init__(self, stream: WaveformStream, calls: Calls) -> None:
        self._stream, self._calls = stream, calls

    def push(self, codes: Ints) -> Floats:
        with self._calls.clock("codec_stream"):
            return self._stream.push(codes)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> WaveformStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
