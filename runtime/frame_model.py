"""What the generation loop sees: prompt in, one frame after the other out. Cache and device memory stay behind it.

    prefill(rows)            reads the prompt; keys, values and the last hidden state stay in the model
    next_frame(uniforms, s)  the first call runs `frame` on that hidden state; every later one runs `step_frame`
                             (or `step`, then `frame`) on the codes of the frame before

`HostFrameModel` keeps the cache in preallocated NumPy arrays, for ONNX Runtime and PyTorch. The OM backend has its own
FrameModel with the cache on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Backend, Session
from runtime.errors import CapacityError
from runtime.growing_rows import GrowingRows, round_up
from runtime.manifest import Manifest
from runtime.sampling import MASKED, SamplingParams
from runtime.spec import Array

CACHE_BLOCK = 128  # rows by which the visible cache grows: 10 s of audio

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Frame:
    """One decision of the model. `codes` [n_vq] count only when `go_on`; logits are kept only on request."""

    go_on: bool
    codes: Ints
    hidden: Floats | None = None  # [E], the state that this frame was sampled from
    slot_logits: Floats | None = None  # [2]
    code_logits: Floats | None = None  # [n_vq, V]


class FrameModel(Protocol):
    """One utterance at a time; a second prefill starts the next utterance."""

    @property
    def capacity(self) -> int:
        """Rows that prompt and frames together may take."""
        ...

    @property
    def backend_name(self) -> str:
        """What ran, as the stats print it: "ort", "torch cpu", "om (simulated)"."""
        ...

    def prefill(self, rows: Ints) -> None:
        """Read the prompt rows [T, 1 + n_vq]; CapacityError before anything runs when they do not fit."""
        ...

    def next_frame(self, uniforms: Floats, sampling: SamplingParams, keep_logits: bool = False) -> Frame:
        """Sample the next frame; `uniforms` is [1, 1 + n_vq]. CapacityError before the cache would overflow."""
        ...

    def force_frame(self, codes: Ints) -> None:
        """Replace the codes of the last frame (teacher forcing): the next step reads these, and these count as seen."""
        ...

    def close(self) -> None:
        """Free sessions and device memory."""
        ...


@runtime_checkable
class CacheReader(Protocol):
    """A FrameModel that can also show its cache; the parity tools ask, the loop never does."""

    def cache_rows(self) -> Floats:
        """A copy of the rows written so far, [2 * layers, H, rows, D]: key_0, value_0, key_1, …"""
        ...


class HostFrameModel:
    """A FrameModel whose cache lies in NumPy arrays; one utterance at a time (B = 1).

    `fused` runs step_frame, one call per frame; otherwise step, then frame: the same mathematics in two calls.
    `num_codebooks` below n_vq keeps the first codebooks of each frame and pads the others (MODEL.md section 4).
    """

    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        fused: bool = True,
        capacity: int | None = None,
        num_codebooks: int | None = None,
    ) -> None:
        self.config = manifest.model
        self.backend_name = backend.name
        limit = manifest.limits["max_positions"]
        self.capacity = limit if capacity is None else min(capacity, limit)
        names = ("prefill", "frame", "step_frame") if fused else ("prefill", "frame", "step")
        self._sessions: dict[str, Session] = {}
        try:
            for name in names:
                graph = manifest.graph(name)
                self._sessions[name] = backend.open(graph.spec, manifest.path(graph.file))
        except BaseException:
            self.close()
            raise
        self._fused = fused
        self._num_codebooks = num_codebooks or self.config.n_vq
        self._cache = HostKvCache(
            2 * self.config.num_layers, self.config.num_heads, self.config.head_size, self.capacity
        )
        self._hidden: Floats | None = None  # set: the next frame runs `frame` on it
        self._codes = np.zeros((1, self.config.n_vq), np.int32)
        self._seen = np.zeros((1, self.config.n_vq, self.config.codebook_size), np.float32)
        self._seen_before = self._seen

    def prefill(self, rows: Ints) -> None:
        check_prompt_fits(len(rows), self.capacity)
        feeds: dict[str, Array] = {
            "rows": rows[None].astype(np.int32),
            "positions": np.arange(len(rows), dtype=np.int32)[None],
            "last": np.array([len(rows) - 1], np.int32),
        }
        outputs = self._sessions["prefill"].run(feeds)
        layers = range(self.config.num_layers)
        self._cache.load([outputs[f"{kind}_{i}"] for i in layers for kind in ("key", "value")])
        self._hidden = outputs["hidden"]
        self._seen = np.zeros_like(self._seen)

    def next_frame(self, uniforms: Floats, sampling: SamplingParams, keep_logits: bool = False) -> Frame:
        feeds: dict[str, Array] = {"seen": self._seen, "uniforms": uniforms, **sampling.feeds()}
        if self._hidden is not None:
            hidden, self._hidden = self._hidden, None
            outputs = {"hidden": hidden, **self._sessions["frame"].run({"hidden": hidden, **feeds})}
        elif self._fused:
            outputs = self._sessions["step_frame"].run({**self._step_feeds(), **feeds})
            self._keep_rows(outputs)
        else:
            outputs = self._sessions["step"].run(self._step_feeds())
            self._keep_rows(outputs)
            outputs |= self._sessions["frame"].run({"hidden": outputs["hidden"], **feeds})
        self._seen_before = self._seen
        self._codes, self._seen = outputs["codes"], outputs["seen_next"]
        self._codes[:, self._num_codebooks :] = self.config.audio_pad_id
        kept = {name: outputs[name][0] for name in ("hidden", "slot_logits", "code_logits")} if keep_logits else {}
        return Frame(bool(outputs["go_on"][0]), self._codes[0], **kept)

    def force_frame(self, codes: Ints) -> None:
        self._codes = np.asarray(codes, np.int32)[None]
        self._seen = self._seen_before.copy()
        used = np.flatnonzero(codes < self.config.codebook_size)
        self._seen[0, used, codes[used]] = 1

    def cache_rows(self) -> Floats:
        return np.stack([tensor[0, :, : self._cache.length] for tensor in self._cache.visible()[0]])

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def _step_feeds(self) -> dict[str, Array]:
        position = self._cache.length
        if position >= self.capacity:
            raise CapacityError(
                f"row {position + 1} does not fit: the cache holds {self.capacity} rows; shorten the text"
            )
        past, mask = self._cache.visible()
        row = np.concatenate([[[self.config.audio_assistant_slot_id]], self._codes], axis=1).astype(np.int32)
        names = [f"past_{kind}_{i}" for i in range(self.config.num_layers) for kind in ("key", "value")]
        return {
            "row": row[None],
            "position": np.array([position], np.int32),
            "cache_mask": mask,
            **dict(zip(names, past, strict=True)),
        }

    def _keep_rows(self, outputs: dict[str, Array]) -> None:
        layers = range(self.config.num_layers)
        self._cache.append([outputs[f"new_{kind}_{i}"] for i in layers for kind in ("key", "value")])


class HostKvCache:
    """Keys and values [1, H, C, D] of every layer, allocated once for `capacity` rows.

    The visible C is the length rounded up to CACHE_BLOCK, so that the graph reads no more than that.
    """

    def __init__(self, num_tensors: int, num_heads: int, head_size: int, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._visible = capacity
        self._tensors = [GrowingRows(num_heads, capacity, head_size) for _ in range(num_tensors)]
        self._mask = np.full((1, 1, 1, capacity), MASKED, np.float32)

    def load(self, rows: list[Array]) -> None:
        """Start over with the prompt's rows [1, H, T, D]."""
        self.length = rows[0].shape[2]
        self._show(keep=0)
        for tensor, new in zip(self._tensors, rows, strict=True):
            tensor.array[:, :, : self.length] = new
        self._mask[...] = MASKED
        self._mask[..., : self.length] = 0

    def append(self, rows: list[Array]) -> None:
        """Write one new row [1, H, 1, D] per tensor behind the last one."""
        if self.length >= self._visible:
            self._show(keep=self.length)
        for tensor, new in zip(self._tensors, rows, strict=True):
            tensor.array[:, :, self.length] = new[:, :, 0]
        self._mask[..., self.length] = 0
        self.length += 1

    def visible(self) -> tuple[list[Floats], Floats]:
        """The arrays to feed, and the additive mask that covers their unused rows."""
        return [tensor.array for tensor in self._tensors], self._mask[..., : self._visible]

    def _show(self, keep: int) -> None:
        """Show the block that the next row falls into."""
        self._visible = min(round_up(self.length + 1, CACHE_BLOCK), self.capacity)
        for tensor in self._tensors:
            tensor.show(self._visible, keep)


def check_prompt_fits(num_rows: int, capacity: int) -> None:
    """Refuse a prompt that leaves no room for a single frame."""
    if num_rows >= capacity:
        raise CapacityError(
            f"the prompt has {num_rows} rows, the cache holds {capacity}; shorten the text or the reference clip"
        )
