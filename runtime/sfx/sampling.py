"""How one text id and 16 codes are chosen from logits: in NumPy on the host, so that a seed works on every backend.

For logits s[V] and one uniform u (docs/soundeffect.md):

    1. s = s / temperature
    2. penalty r on the codes seen before:  s * r if s < 0 else s / r
    3. top_k: keep every score that is not below the k-th;  top_p: keep, from the best down, while the probability
       before a score is <= top_p
    4. p = softmax(kept);  the first index, in index order, whose cumulative probability exceeds u

A temperature of 0 is greedy: the best score after masks and penalty. What counts as seen is upstream's rule and odd:
codebook 0 has its own set, codebooks 1 … 15 share ONE set, the union of what any of them used. `PenaltyScope` names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from runtime.errors import GenerationError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class PenaltyScope(Enum):
    """Which codes the repetition penalty counts as seen."""

    UNION = "union"  # upstream's rule for one request: codebook 0 alone, codebooks 1 … in one set; rows independent
    UPSTREAM_BATCH = "upstream-batch"  # upstream with several prompts: the sets are shared by the whole batch
    PER_CODEBOOK = "per-codebook"  # what upstream's docstring promises and its code never reaches


@dataclass(frozen=True, slots=True)
class SfxSampling:
    """Settings of one request; the defaults are the ones recommended for SoundEffect (1.5 / 0.6 / 50 / 1.2)."""

    temperature: float = 1.5
    top_p: float = 0.6
    top_k: int = 50
    repetition_penalty: float = 1.2
    text_temperature: float = 1.5
    text_top_p: float = 1.0
    text_top_k: int = 50
    penalty_scope: PenaltyScope = PenaltyScope.UNION

    def __post_init__(self) -> None:
        for name in ("temperature", "text_temperature"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise GenerationError(f"{name}: expected 0 (greedy) or a number above it, got {value}")
        if not (np.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise GenerationError(f"repetition_penalty: expected a number above 0, got {self.repetition_penalty}")
        for name in ("top_k", "text_top_k"):
            if getattr(self, name) < 1:
                raise GenerationError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("top_p", "text_top_p"):
            if not 0 < getattr(self, name) <= 1:
                raise GenerationError(f"{name}: expected a number in (0, 1], got {getattr(self, name)}")

    @staticmethod
    def greedy(repetition_penalty: float = 1.0) -> SfxSampling:
        """The best id and the best codes every time."""
        return SfxSampling(temperature=0.0, text_temperature=0.0, repetition_penalty=repetition_penalty)


class SeenCodes:
    """The codes that each request of a batch has used, [B, n_vq, V]."""

    def __init__(self, batch: int, n_vq: int, codebook_size: int) -> None:
        self.table = np.zeros((batch, n_vq, codebook_size), np.bool_)

    def add(self, request: int, rows: Ints) -> None:
        """Count the codes of rows [T, 1 + n_vq]; pad codes are never candidates and are left out."""
        codes = np.asarray(rows)[:, 1:]
        time, book = np.nonzero(codes < self.table.shape[2])
        self.table[request, book, codes[time, book]] = True

    def penalised(self, request: int, scope: PenaltyScope) -> Bools:
        """The table [n_vq, V] of codes that the penalty applies to."""
        own: Bools = self.table[request]
        if scope is PenaltyScope.UPSTREAM_BATCH:
            own = np.logical_or.reduce(self.table, axis=0)
        if scope is PenaltyScope.PER_CODEBOOK:
            return own.copy()
        seen = np.broadcast_to(own[1:].any(axis=0), own.shape).copy()
        seen[0] = own[0]
        return seen


def penalise(scores: Floats, seen: Bools, penalty: float) -> Floats:
    """Make seen scores smaller: divide positive ones, multiply negative ones."""
    r = np.float32(penalty)
    return np.where(seen, np.where(scores < 0, scores * r, scores / r), scores).astype(np.float32)


def probabilities(scores: Floats, top_k: int, top_p: float) -> Floats:
    """The filtered distribution over the last axis of scores [n, V] (temperature and penalty already applied)."""
    top_k = min(top_k, scores.shape[-1])
    threshold = np.partition(scores, -top_k, axis=-1)[:, -top_k, None]
    kept = np.where(scores < threshold, -np.inf, scores).astype(np.float32)
    if top_p < 1:
        order = np.argsort(-kept, axis=-1, kind="stable")
        ranked = _softmax(np.take_along_axis(kept, order, axis=-1))
        before = np.cumsum(ranked, axis=-1, dtype=np.float32) - ranked
        drop = np.empty_like(before, np.bool_)
        np.put_along_axis(drop, order, before > np.float32(top_p), axis=-1)
        kept[drop] = -np.inf
    return _softmax(kept)


def draw(distribution: Floats, uniforms: Floats) -> Ints:
    """One index per row of distribution [n, V] by inverse CDF at uniforms [n]."""
    chosen = np.empty(len(distribution), np.int32)
    for i, (p, u) in enumerate(zip(distribution, uniforms, strict=True)):
        candidates = np.flatnonzero(p)
        cumulative = np.cumsum(p[candidates], dtype=np.float32)
        chosen[i] = candidates[min(int((cumulative <= u).sum()), len(candidates) - 1)]
    return chosen


def choose_text(logits: Floats, uniform: float, sampling: SfxSampling) -> int:
    """An index into logits [n]; what the state bans must be -inf or absent."""
    if sampling.text_temperature == 0:
        return int(logits.argmax())
    scores = (logits / np.float32(sampling.text_temperature)).astype(np.float32)
    p = probabilities(scores[None], sampling.text_top_k, sampling.text_top_p)
    return int(draw(p, np.array([uniform], np.float32))[0])


def code_scores(logits: Floats, seen: Bools, sampling: SfxSampling) -> Floats:
    """Steps 1 and 2 for logits [n, V]."""
    warm = logits if sampling.temperature == 0 else logits / np.float32(sampling.temperature)
    return penalise(warm.astype(np.float32), seen, sampling.repetition_penalty)


def choose_codes(logits: Floats, seen: Bools, uniforms: Floats, sampling: SfxSampling) -> Ints:
    """One code for each row of logits [n, V]; `seen` [n, V] marks the penalised codes."""
    scores = code_scores(logits, seen, sampling)
    if sampling.temperature == 0:
        return np.asarray(scores.argmax(axis=-1), np.int32)
    return draw(probabilities(scores, sampling.top_k, sampling.top_p), uniforms)


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)
