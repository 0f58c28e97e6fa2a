"""Several utterances at once: slots of one running batch that requests join and leave at frame boundaries.

    prefill(slot, rows)      reads one prompt at B = 1 and puts its keys and values into the slot
    next_frames(draws)       the next frame of every slot asked for: one launch of step_frame at B = slots
    release(slot)            the slot is free again

A float result of a kernel may depend on the batch size, so every step runs the full batch, idle slots included, and
prompt and first frame run at B = 1: what a request gets cannot depend on how many others there are. That it does not
depend on the slot, on the neighbours or on the visible cache either is not taken on trust: `settle` compares logits bit
by bit before the first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.backends.base import Backend, Session
from runtime.errors import BackendError, CapacityError
from runtime.frame_model import CACHE_BLOCK, Floats, Frame, FrameModel, Ints, check_prompt_fits
from runtime.manifest import Manifest
from runtime.sampling import MASKED, SamplingParams, draw_uniforms
from runtime.spec import Array

IDLE = SamplingParams()


@dataclass(frozen=True, slots=True)
class Draw:
    """What one slot needs to sample its next frame."""

    uniforms: Floats  # [1, 1 + n_vq]
    sampling: SamplingParams


class SlotModel(Protocol):
    """Utterances in numbered slots."""

    slots: int

    @property
    def capacity(self) -> int:
        """Rows that prompt and frames of one slot together may take."""
        ...

    @property
    def backend_name(self) -> str: ...

    def prefill(self, slot: int, rows: Ints) -> None:
        """Start an utterance; CapacityError before anything runs when the prompt does not fit."""
        ...

    def next_frames(self, draws: Mapping[int, Draw], keep_logits: bool = False) -> dict[int, Frame]:
        """The next frame of each slot that is asked for."""
        ...

    def release(self, slot: int) -> None: ...
    def close(self) -> None: ...


class SerialSlotModel:
    """Any FrameModel as a batch of one slot: for backends whose step was compiled for B = 1."""

    def __init__(self, model: FrameModel) -> None:
        self.slots, self._model = 1, model

    @property
    def capacity(self) -> int:
        return self._model.capacity

    @property
    def backend_name(self) -> str:
        return self._model.backend_name

    def prefill(self, slot: int, rows: Ints) -> None:
        self._model.prefill(rows)

    def next_frames(self, draws: Mapping[int, Draw], keep_logits: bool = False) -> dict[int, Frame]:
        return {slot: self._model.next_frame(draw.uniforms, draw.sampling, keep_logits) for slot, draw in draws.items()}

    def release(self, slot: int) -> None:
        """Nothing to free: the next prefill starts over."""

    def close(self) -> None:
        self._model.close()


class BatchFrameModel:
    """Slots on host memory, for ONNX Runtime and PyTorch."""

    def __init__(self, manifest: Manifest, backend: Backend, slots: int, capacity: int | None = None) -> None:
        self.config, self.backend_name, self.slots = manifest.model, backend.name, slots
        limit = manifest.limits["max_positions"]
        self.capacity = limit if capacity is None else min(capacity, limit)
        self._sessions: dict[str, Session] = {}
        try:
            for name in ("prefill", "frame", "step_frame"):
                graph = manifest.graph(name)
                self._sessions[name] = backend.open(graph.spec, manifest.path(graph.file))
        except BaseException:
            self.close()
            raise
        config = self.config
        self._cache = SlotKvCache(2 * config.num_layers, slots, config.num_heads, config.head_size, self.capacity)
        self._hidden: dict[int, Floats] = {}  # slots whose next frame runs `frame` on the prompt's hidden state
        self._codes = np.full((slots, config.n_vq), config.audio_pad_id, np.int32)
        self._seen = np.zeros((slots, config.n_vq, config.codebook_size), np.float32)

    def prefill(self, slot: int, rows: Ints) -> None:
        check_prompt_fits(len(rows), self.capacity)
        outputs = self._sessions["prefill"].run(
            {
                "rows": rows[None].astype(np.int32),
                "positions": np.arange(len(rows), dtype=np.int32)[None],
                "last": np.array([len(rows) - 1], np.int32),
            }
        )
        _check_finite(outputs["hidden"], "prefill")
        layers = range(self.config.num_layers)
        self._cache.load(slot, [outputs[f"{kind}_{i}"] for i in layers for kind in ("key", "value")])
        self._hidden[slot] = outputs["hidden"]
        self._seen[slot] = 0

    def next_frames(self, draws: Mapping[int, Draw], keep_logits: bool = False) -> dict[int, Frame]:
        first = [slot for slot in draws if slot in self._hidden]
        stepping = [slot for slot in draws if slot not in self._hidden]
        frames = self._step(stepping, draws, keep_logits) if stepping else {}
        for slot in first:
            draw, hidden = draws[slot], self._hidden.pop(slot)
            feeds = {"seen": self._seen[slot : slot + 1], "uniforms": draw.uniforms, **draw.sampling.feeds()}
            outputs = self._sessions["frame"].run({"hidden": hidden, **feeds})
            frames[slot] = self._keep(slot, 0, outputs, keep_logits)
        return frames

    def release(self, slot: int) -> None:
        self._hidden.pop(slot, None)
        self._cache.clear(slot)
        self._codes[slot] = self.config.audio_pad_id

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def fix_visible_rows(self) -> None:
        """Always feed the whole cache; for backends whose results depend on how much of it they get."""
        self._cache.fix_visible_rows()

    def _step(self, stepping: list[int], draws: Mapping[int, Draw], keep_logits: bool) -> dict[int, Frame]:
        if full := [slot for slot in stepping if self._cache.lengths[slot] >= self.capacity]:
            raise CapacityError(f"slots {full}: the cache holds {self.capacity} rows; shorten the text")
        past, mask = self._cache.visible()
        names = [f"past_{kind}_{i}" for i in range(self.config.num_layers) for kind in ("key", "value")]
        row = np.concatenate([np.full((self.slots, 1), self.config.audio_assistant_slot_id), self._codes], axis=1)
        feeds: dict[str, Array] = {
            "row": row.astype(np.int32)[:, None],
            "position": self._cache.lengths.astype(np.int32),
            "cache_mask": mask,
            **dict(zip(names, past, strict=True)),
            "seen": self._seen,
            **self._settings(stepping, draws),
        }
        outputs = self._sessions["step_frame"].run(feeds)
        _check_finite(outputs["hidden"][stepping], "step_frame")
        layers = range(self.config.num_layers)
        self._cache.append(stepping, [outputs[f"new_{kind}_{i}"] for i in layers for kind in ("key", "value")])
        return {slot: self._keep(slot, slot, outputs, keep_logits) for slot in stepping}

    def _settings(self, stepping: list[int], draws: Mapping[int, Draw]) -> dict[str, Array]:
        """Uniforms and sampling of every slot, [slots, …]; idle slots get defaults that nobody reads."""
        rows = [draws[slot].sampling.feeds() if slot in stepping else IDLE.feeds() for slot in range(self.slots)]
        uniforms = np.zeros((self.slots, 1 + self.config.n_vq), np.float32)
        for slot in stepping:
            uniforms[slot] = draws[slot].uniforms[0]
        return {"uniforms": uniforms, **{name: np.concatenate([row[name] for row in rows]) for name in rows[0]}}

    def _keep(self, slot: int, row: int, outputs: Mapping[str, Array], keep_logits: bool) -> Frame:
        self._codes[slot], self._seen[slot] = outputs["codes"][row], outputs["seen_next"][row]
        kept = {name: outputs[name][row] for name in ("slot_logits", "code_logits")} if keep_logits else {}
        return Frame(bool(outputs["go_on"][row]), outputs["codes"][row].copy(), **kept)


class SlotKvCache:
    """Keys and values [B, H, C, D] of every layer, allocated once; each slot has its own length and mask.

    The visible C is the longest slot rounded up to CACHE_BLOCK: the heads of all slots lie that far apart and move, in
    place, when it changes. Rows behind a slot's length are masked and finite, so they add exactly 0.
    """

    def __init__(self, num_tensors: int, slots: int, num_heads: int, head_size: int, capacity: int) -> None:
        self.slots, self.num_heads, self.head_size, self.capacity = slots, num_heads, head_size, capacity
        self.lengths = np.zeros(slots, np.int64)
        self._smallest = min(CACHE_BLOCK, capacity)
        self._visible = self._smallest
        self._flat = [np.zeros(slots * num_heads * capacity * head_size, np.float32) for _ in range(num_tensors)]
        self._mask = np.full((slots, 1, 1, capacity), MASKED, np.float32)

    def load(self, slot: int, rows: list[Array]) -> None:
        """Start a slot over with the prompt's rows [1, H, T, D]."""
        self.clear(slot)
        length = rows[0].shape[2]
        self._fit(length + 1)
        for flat, new in zip(self._flat, rows, strict=True):
            view = self._view(flat)[slot]
            view[:, :length] = new[0]
            view[:, length:] = 0
        self._mask[slot, ..., :length] = 0
        self.lengths[slot] = length

    def append(self, slots: list[int], rows: list[Array]) -> None:
        """Write the new row of each of `slots` behind its last one; `rows` are [B, H, 1, D]."""
        at = self.lengths[slots]
        self._fit(int(at.max()) + 1)
        for flat, new in zip(self._flat, rows, strict=True):
            view = self._view(flat)
            for slot, length in zip(slots, at, strict=True):
                view[slot, :, length] = new[slot, :, 0]
        self._mask[slots, 0, 0, at] = 0
        self.lengths[slots] += 1

    def clear(self, slot: int) -> None:
        """Forget a slot."""
        self._mask[slot] = MASKED
        self.lengths[slot] = 0

    def visible(self) -> tuple[list[Floats], Floats]:
        """The arrays to feed, and the additive mask that covers the unused rows of each slot."""
        self._fit(int(self.lengths.max()))
        return [self._view(flat) for flat in self._flat], self._mask[..., : self._visible]

    def fix_visible_rows(self) -> None:
        self._resize(self.capacity)
        self._smallest = self.capacity

    def _view(self, flat: Floats) -> Floats:
        shape = (self.slots, self.num_heads, self._visible, self.head_size)
        return flat[: int(np.prod(shape))].reshape(shape)

    def _fit(self, rows: int) -> None:
        needed = max(rows, int(self.lengths.max()))
        wanted = min(max(-(-needed // CACHE_BLOCK) * CACHE_BLOCK, self._smallest), self.capacity)
        if wanted != self._visible:
            self._resize(wanted)

    def _resize(self, new: int) -> None:
        """Move the heads apart or together, in the order in which none is overwritten before it has moved."""
        old, heads = self._visible, [(s, h) for s in range(self.slots) for h in range(self.num_heads)]
        for flat in self._flat:
            for slot, head in reversed(heads) if new > old else heads:
                index, used = slot * self.num_heads + head, int(self.lengths[slot]) * self.head_size
                source, target = index * old * self.head_size, index * new * self.head_size
                flat[target : target + used] = flat[source : source + used].copy()
        self._visible = new


def settle(model: SlotModel, rows: Ints, steps: int = 4) -> None:
    """Warm the model up and make sure that a request gets the same bits alone and in company.

    `rows` is any valid prompt. BackendError when the results depend on the slot or on the neighbours.
    """
    if not isinstance(model, BatchFrameModel):
        _logits(model, 0, rows, (), steps)
        return
    if _differs(model, rows, steps):
        model.fix_visible_rows()
        if _differs(model, rows, steps):
            raise BackendError(
                f"backend {model.backend_name}: the same request gives other logits in another slot or beside other "
                "requests; audio would depend on the load. Serve with --batch 1"
            )


def _differs(model: BatchFrameModel, rows: Ints, steps: int) -> bool:
    room = model.capacity - steps
    alone = _logits(model, 0, rows, (), steps)
    for slot in range(model.slots):
        # Longer neighbours move the rows of this slot apart; the last slot also sees the whole cache.
        for length in {min(2 * CACHE_BLOCK, room), room if slot == model.slots - 1 else min(2 * CACHE_BLOCK, room)}:
            long = np.resize(rows, (length, rows.shape[1]))
            others = [(other, long if other == (slot + 1) % model.slots else rows) for other in range(model.slots)]
            others = [(other, prompt) for other, prompt in others if other != slot]
            if not np.array_equal(alone, _logits(model, slot, rows, others, steps)):
                return True
    return False


def _logits(model: SlotModel, slot: int, rows: Ints, others: Iterable[tuple[int, Ints]], steps: int) -> Floats:
    """All logits of `steps` frames of the prompt `rows` in `slot`, beside `others`."""
    n_vq = rows.shape[1] - 1
    prompts = {slot: rows, **dict(others)}
    rngs = {number: np.random.default_rng(0 if number == slot else 1 + number) for number in prompts}
    for number, prompt in prompts.items():
        model.prefill(number, prompt)
    kept = []
    for _ in range(steps):
        frame = model.next_frames({n: Draw(draw_uniforms(rngs[n], n_vq), IDLE) for n in prompts}, True)[slot]
        assert frame.slot_logits is not None and frame.code_logits is not None, "asked for with keep_logits"
        kept.append(np.concatenate([frame.slot_logits, frame.code_logits.ravel()]))
    for number in prompts:
        model.release(number)
    return np.stack(kept)


def _check_finite(hidden: Array, graph: str) -> None:
    """A NaN in the cache would outlive its request: masked rows count 0 times what they hold."""
    if not np.isfinite(hidden).all():
        raise BackendError(f"{graph}: the hidden state holds NaN or infinity; the backend computes nonsense")
