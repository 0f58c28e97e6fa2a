"""The rings of the codec: which frame lies in which slot, in what chunks frames go through, and where the rows lie.

Every attention layer keeps its window of keys and values in a ring. Frame p lies in the slot p mod ring_frames of its
stage; `past_positions` say which frame each slot holds, and NO_FRAME hides a slot. `Rings` is that for one clip or one
utterance; `RingGraph` is codec_encode or codec_stream, in the sizes that can run. Where the rows lie is up to the
subclasses: in host memory here, on the device in om_codec.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Session
from runtime.config import CodecStage
from runtime.errors import CapacityError, GenerationError
from runtime.graphs import NO_FRAME, attention_layers, ring_capacity
from runtime.growing_rows import GrowingRows, round_up
from runtime.spec import Array, GraphSpec

SHOWN_FRAMES = 8  # slots by which the shown part of a ring grows
CHUNK_FRAMES = 8  # frames per launch where the graph takes any number; measured in docs/codec.md
MAX_TOKENS = 2**20  # positions that the RoPE tables reach

Ints = npt.NDArray[np.int32]
Stages = tuple[CodecStage, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One launch: `size` frames, of which `count` count, from frame number `first` on; the rest is padding."""

    size: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """A run of frames and the run of slots that takes it."""

    slot: int
    frame: int
    length: int


class Rings(ABC):
    """Which frame each slot of every stage holds; the rows are where the subclass keeps them."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.past_positions: dict[str, Ints] = {
            f"past_positions_{i}": np.full((1, s.ring_frames), NO_FRAME, np.int32) for i, s in enumerate(stages)
        }

    def clear(self) -> None:
        """Forget everything. Old rows stay where they are: NO_FRAME hides them."""
        for positions in self.past_positions.values():
            positions[:] = NO_FRAME

    def hide_before(self, end: int) -> None:
        """Hide the frames that do not fit into a ring together with all frames up to `end`."""
        for stage, positions in self._by_stage():
            if stage.context % stage.tokens_per_frame:
                raise GenerationError(
                    f"upstream's chunks: stage {stage.index} sees {stage.context} tokens, which is no whole number of "
                    f"frames ({stage.tokens_per_frame} tokens each); decode without upstream_chunk_frames"
                )
            positions[positions < end - stage.ring_frames] = NO_FRAME

    def run(self, chunk: Chunk, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Launch the graph on `feeds` and the rings, and store the rows of the frames that count."""
        outputs = self._launch(chunk, {**feeds, "positions": _positions(self.stages, chunk)})
        for stage, positions in self._by_stage():
            for span in spans(stage, chunk):
                positions[0, span.slot : span.slot + span.length] = np.arange(span.frame, span.frame + span.length)
        return outputs

    @abstractmethod
    def _launch(self, chunk: Chunk, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run the graph on `feeds` and the rings, put its new rows into the slots of `spans`; its other outputs."""

    def _by_stage(self) -> Iterator[tuple[CodecStage, Ints]]:
        return zip(self.stages, self.past_positions.values(), strict=True)


class RingGraph(ABC):
    """One graph over rings, in the sizes that can run; rings that nobody uses wait for the next clip or utterance."""

    def __init__(self, stages: Stages, specs: Sequence[GraphSpec]) -> None:
        """`specs`: one per size; the frame axis F is open (any number of frames) or bound."""
        frames = [next(t.shape[-1] for t in spec.inputs if t.name == "positions") for spec in specs]
        self.stages = stages
        self.sizes = tuple(size if isinstance(size, int) else None for size in frames)  # None: any number of frames
        self._idle: list[Rings] = []

    def chunks(self, first: int, num_frames: int) -> Iterator[Chunk]:
        """The launches for `num_frames` frames from frame number `first` on, in order.

        Bound sizes: the smallest that takes all that is left, else the largest.
        """
        end = first + num_frames
        while left := end - first:
            bound = [size for size in self.sizes if size is not None]
            if None in self.sizes:
                size = min(left, CHUNK_FRAMES)
            else:
                size = min((s for s in bound if s >= left), default=max(bound))
            count = min(size, left)
            yield Chunk(size, first, count)
            first += count

    def take_rings(self) -> Rings:
        """Empty rings; hand them back when the clip or utterance is over."""
        rings = self._idle.pop() if self._idle else self._new_rings()
        rings.clear()
        return rings

    def hand_back(self, rings: Rings) -> None:
        self._idle.append(rings)

    @abstractmethod
    def _new_rings(self) -> Rings: ...

    @abstractmethod
    def close(self) -> None:
        """Free the graph in all sizes, and the rings."""


class HostGraph(RingGraph):
    """Sessions that take and return host memory, one per size."""

    def __init__(self, stages: Stages, sessions: Sequence[Session]) -> None:
        super().__init__(stages, [session.spec for session in sessions])
        self._sessions = dict(zip(self.sizes, sessions, strict=True))
        rings = [t for s in sessions for t in s.spec.inputs if t.name.startswith("past_positions")]
        self.takes_any_ring = all(isinstance(t.shape[-1], str) for t in rings)  # or only whole ones

    def run(self, size: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the session that takes `size` frames."""
        return self._sessions[None if None in self._sessions else size].run(feeds)

    def _new_rings(self) -> Rings:
        return HostRings(self)

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()


class HostRings(Rings):
    """Rows in host memory, fed to the graph where they lie.

    Where the graph takes rings of any size, it is shown the slots in use, a block of SHOWN_FRAMES at a time: in the
    first seconds of a clip most of a ring is empty, and attention over empty slots is most of the work.
    """

    def __init__(self, graph: HostGraph) -> None:
        super().__init__(graph.stages)
        self._graph, self._layers = graph, attention_layers(graph.stages)
        self._rows = {
            f"{kind}_{i}": GrowingRows(stage.num_heads, ring_capacity(stage), stage.head_size)
            for i, stage in enumerate(self._layers)
            for kind in ("key", "value")
        }
        self._written = 0  # frames since the rings were cleared

    def clear(self) -> None:
        super().clear()
        self._written = 0
        self._show(0)

    def feeds(self) -> dict[str, Array]:
        """The rings as inputs of the graph."""
        shown = {
            name: positions[:, : self._shown(stage, self._written)]
            for (stage, positions), name in zip(self._by_stage(), self.past_positions, strict=True)
        }
        return {**shown, **{f"past_{name}": rows.array for name, rows in self._rows.items()}}

    def _launch(self, chunk: Chunk, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        outputs = self._graph.run(chunk.size, {**feeds, **self.feeds()})
        self._show(chunk.first + chunk.count)
        for i, stage in enumerate(self._layers):
            n = stage.tokens_per_frame
            for span in spans(stage, chunk):
                into = slice(span.slot * n, (span.slot + span.length) * n)
                out_of = slice((span.frame - chunk.first) * n, (span.frame - chunk.first + span.length) * n)
                for kind in ("key", "value"):
                    self._rows[f"{kind}_{i}"].array[:, :, into] = outputs[f"new_{kind}_{i}"][:, :, out_of]
        return outputs

    def _show(self, written: int) -> None:
        """Show the slots of `written` frames."""
        for i, stage in enumerate(self._layers):
            n = stage.tokens_per_frame
            keep, now = self._shown(stage, self._written) * n, self._shown(stage, written) * n
            for rows in (self._rows[f"key_{i}"], self._rows[f"value_{i}"]):
                if rows.array.shape[2] != now:
                    rows.show(now, keep)
        self._written = written

    def _shown(self, stage: CodecStage, written: int) -> int:
        """Slots of a ring of this stage that the graph sees after that many frames; never none."""
        if not self._graph.takes_any_ring:
            return stage.ring_frames
        return min(round_up(max(written, 1), SHOWN_FRAMES), stage.ring_frames)


def spans(stage: CodecStage, chunk: Chunk) -> list[Span]:
    """Where the frames that count go: at most two runs; of more frames than slots only the last ones."""
    end = chunk.first + chunk.count
    start = max(chunk.first, end - stage.ring_frames)
    slot = start % stage.ring_frames
    length = min(end - start, stage.ring_frames - slot)
    found = [Span(slot, start, length)]
    if start + length < end:
        found.append(Span(0, start + length, end - start - length))
    return found


def _positions(stages: Stages, chunk: Chunk) -> Ints:
    """Frame numbers of one launch, padding included; CapacityError beyond the position tables."""
    end = chunk.first + chunk.size
    reach = MAX_TOKENS // max(s.tokens_per_frame for s in stages)
    if end > reach:
        raise CapacityError(f"{end} frames: the codec's position tables end at {reach}; start a new stream")
    return np.arange(chunk.first, end, dtype=np.int32)[None]
