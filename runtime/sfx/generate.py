"""The loop: prompt rows -> generated rows, one or several requests side by side, each with its own seed and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.errors import GenerationError
from runtime.sampling import draw_uniforms
from runtime.sfx.config import SfxConfig
from runtime.sfx.delay import DelayState, TextChoice
from runtime.sfx.sampling import SeenCodes, SfxSampling, choose_codes, choose_text

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class InsideLogits:
    """What the model says inside audio."""

    slots: Floats  # [B, 2]: gen_slot, delay_slot
    codes: Floats  # [B, n_vq, V]


class RowModel(Protocol):
    """What the loop sees: rows in, hidden states and logits out. Caches and device memory stay behind it."""

    @property
    def config(self) -> SfxConfig: ...

    @property
    def max_rows(self) -> int:
        """Rows that prompt and sound may take together."""
        ...

    @property
    def backend_name(self) -> str:
        """What runs, as the stats print it."""
        ...

    def start(self, batch: int, num_rows: int) -> None:
        """Begin a new run of at most num_rows rows per request; CapacityError when they do not fit."""
        ...

    def read(self, rows: Ints, lengths: Ints) -> Floats:
        """Read the next rows [B, T, 1 + n_vq], of which lengths [B] count; return the last hidden state [B, E]."""
        ...

    def inside(self, hidden: Floats) -> InsideLogits:
        """The heads that count inside audio."""
        ...

    def text(self, hidden: Floats) -> Floats:
        """The whole text head, [B, vocabulary]; needed outside audio only."""
        ...

    def close(self) -> None:
        """Free sessions and device memory."""
        ...


class FinishReason(Enum):
    """Why a run ended."""

    END = "end"  # the model said im_end
    LENGTH = "length"  # max_new_tokens was reached


@dataclass(frozen=True, slots=True)
class Run:
    """The generated rows [N, 1 + n_vq] of one request, prompt excluded."""

    rows: Ints
    finish_reason: FinishReason


def generate(
    model: RowModel,
    prompts: Sequence[Ints],
    sampling: SfxSampling,
    seeds: Sequence[int],
    max_new_tokens: int,
    on_row: Callable[[int], None] = lambda rows: None,
) -> list[Run]:
    """Generate until every request has ended; a request's rows do not depend on its neighbours.

    (With PenaltyScope.UPSTREAM_BATCH they do, by request.) `on_row` is told the number of rows after each one.
    """
    _check_requests(prompts, seeds, max_new_tokens)
    config, batch = model.config, len(prompts)
    lengths = np.array([len(p) for p in prompts], np.int32)
    model.start(batch, int(lengths.max()) + max_new_tokens)
    requests = [_Request(config, p, seed) for p, seed in zip(prompts, seeds, strict=True)]
    seen = SeenCodes(batch, config.n_vq, config.codebook_size)
    for i, prompt in enumerate(prompts):
        seen.add(i, prompt)
    hidden = model.read(_right_padded(prompts, config), lengths)
    for step in range(max_new_tokens):
        active = [i for i, r in enumerate(requests) if not r.state.finished]
        rows = _next_rows(model, hidden, requests, active, seen, sampling)
        for i in active:
            requests[i].take(rows[i])
            seen.add(i, rows[i][None])
        on_row(step + 1)
        if all(r.state.finished for r in requests) or step == max_new_tokens - 1:
            break
        hidden = model.read(rows[:, None], np.ones(batch, np.int32))
    return [r.result() for r in requests]


class _Request:
    """One prompt on its way: state, random numbers, rows so far."""

    def __init__(self, config: SfxConfig, prompt: Ints, seed: int) -> None:
        self.state = DelayState(config, prompt)
        self.rng = np.random.default_rng(seed)
        self.rows: list[Ints] = []

    def take(self, row: Ints) -> None:
        self.rows.append(row)
        self.state.advance(int(row[0]))

    def result(self) -> Run:
        reason = FinishReason.END if self.state.finished else FinishReason.LENGTH
        return Run(np.stack(self.rows), reason)


def _next_rows(
    model: RowModel,
    hidden: Floats,
    requests: Sequence[_Request],
    active: Sequence[int],
    seen: SeenCodes,
    sampling: SfxSampling,
) -> Ints:
    """The next row of each active request; finished ones read padding. Heads that no request needs do not run."""
    config = model.config
    rows = np.full((len(requests), config.row_size), config.audio_pad_code, np.int32)
    rows[:, 0] = config.pad_id
    states = {i: requests[i].state for i in active}
    needs_inside = any(s.text_choice is TextChoice.INSIDE or s.sampled_books().any() for s in states.values())
    inside = model.inside(hidden) if needs_inside else None
    needs_text = any(s.text_choice is TextChoice.OUTSIDE for s in states.values())
    text = model.text(hidden) if needs_text else None
    for i, state in states.items():
        uniforms = draw_uniforms(requests[i].rng, config.n_vq)[0]  # as many per row as ever, whatever is sampled
        rows[i, 0] = _text_id(state, i, inside, text, float(uniforms[0]), sampling)
        books = np.flatnonzero(state.sampled_books())
        if len(books):
            assert inside is not None
            table = seen.penalised(i, sampling.penalty_scope)[books]
            rows[i, 1 + books] = choose_codes(inside.codes[i, books], table, uniforms[1 + books], sampling)
    return rows


def _text_id(
    state: DelayState, i: int, inside: InsideLogits | None, text: Floats | None, uniform: float, sampling: SfxSampling
) -> int:
    config = state.config
    if state.text_choice is TextChoice.FORCED:
        return state.forced_text
    banned = state.banned_text()
    if state.text_choice is TextChoice.INSIDE:
        assert inside is not None
        slots = [config.gen_slot_id, config.delay_slot_id]
        scores = inside.slots[i].copy()
        scores[[slot in banned for slot in slots]] = -np.inf
        return slots[choose_text(scores, uniform, sampling)]
    assert text is not None
    scores = text[i].copy()
    scores[list(banned)] = -np.inf
    return choose_text(scores, uniform, sampling)


def _right_padded(prompts: Sequence[Ints], config: SfxConfig) -> Ints:
    """Prompts as one array; padding on the right, where causality keeps it away from every row that counts."""
    rows = np.full((len(prompts), max(map(len, prompts)), config.row_size), config.audio_pad_code, np.int32)
    rows[:, :, 0] = config.pad_id
    for i, prompt in enumerate(prompts):
        rows[i, : len(prompt)] = prompt
    return rows


def _check_requests(prompts: Sequence[Ints], seeds: Sequence[int], max_new_tokens: int) -> None:
    if not prompts or any(len(p) == 0 for p in prompts):
        raise GenerationError("expected at least one prompt with at least one row")
    if len(seeds) != len(prompts):
        raise GenerationError(f"expected one seed per prompt, got {len(seeds)} seeds for {len(prompts)} prompts")
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens: expected a number above 0, got {max_new_tokens}")
