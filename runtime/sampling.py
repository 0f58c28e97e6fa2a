"""How a frame is chosen from logits: the settings, and the NumPy reference of what the `frame` graph computes.

Rules (MODEL.md 5.3, 5.4), for the codes of one codebook with raw scores s[V] and one uniform number u in [0, 1):

    1. penalty r: for every code used before on this codebook, s = s * r if s < 0 else s / r
    2. s = s / temperature;   keep the top_k highest (the lower index first on ties), sorted descending
    3. p = softmax(kept);     drop what follows once the probability before it reaches top_p
    4. p = softmax(still kept);  code = the first whose cumulative probability reaches u

The slot decision has two candidates, [slot, end], in that order and not sorted: go on while u <= p(slot).
Greedy is top_k = 1. Where PyTorch's own sampler differs: it keeps every code that ties with the k-th score (here
exactly k are kept) and keeps a code while the probability before it is <= top_p (here < top_p).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.errors import GenerationError

TOP_K_MAX = 50  # constant of the frame graph's TopK; the largest top_k that can be asked for
MASKED = -1.0e4  # added to a score that must not count; finite in float16, exp() of it is 0
LARGEST_UNIFORM = float(np.nextafter(np.float32(1), np.float32(0)))  # 0.99999994, as the official graph clamps

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one request; the defaults are the published product defaults (MODEL.md 5.2)."""

    temperature: float = 0.8
    top_k: int = 25
    top_p: float = 0.95
    repetition_penalty: float = 1.2
    slot_temperature: float = 1.0
    slot_top_k: int = 50
    slot_top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "slot_temperature", "repetition_penalty"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise GenerationError(
                    f"{name}: expected a number above 0, got {value}; for greedy decoding use top_k 1"
                )
        for name in ("top_k", "slot_top_k"):
            if not 1 <= getattr(self, name) <= TOP_K_MAX:
                raise GenerationError(f"{name}: expected 1 to {TOP_K_MAX}, got {getattr(self, name)}")
        for name in ("top_p", "slot_top_p"):
            if not 0 < getattr(self, name) <= 1:
                raise GenerationError(f"{name}: expected a number in (0, 1], got {getattr(self, name)}")

    @staticmethod
    def greedy(repetition_penalty: float = 1.0) -> SamplingParams:
        """The best code every time."""
        return SamplingParams(top_k=1, slot_top_k=1, repetition_penalty=repetition_penalty)

    def feeds(self) -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]:
        """The graph inputs for one utterance (B = 1). A top_p of 1 is fed as 2, so that rounding drops nothing."""

        def edge(top_p: float) -> float:
            return top_p if top_p < 1 else 2.0

        return {
            "temperature": np.array([[self.slot_temperature, self.temperature]], np.float32),
            "top_k": np.array([[self.slot_top_k, self.top_k]], np.int32),
            "top_p": np.array([[edge(self.slot_top_p), edge(self.top_p)]], np.float32),
            "penalty": np.array([self.repetition_penalty], np.float32),
        }


def draw_uniforms(rng: np.random.Generator, n_vq: int) -> Floats:
    """The uniforms of one frame, [1, 1 + n_vq]: the slot decision first, then one per codebook (MODEL.md 5.4)."""
    return np.minimum(rng.random(1 + n_vq).astype(np.float32), np.float32(LARGEST_UNIFORM))[None]


def softmax(scores: Floats) -> Floats:
    """Softmax over the last axis in float32."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def decide_slot(slot_logits: Floats, u: float, params: SamplingParams) -> bool:
    """Whether a frame follows, from the logits [slot, end]."""
    scores = slot_logits / np.float32(params.slot_temperature)
    slot_is_best = scores[0] >= scores[1]
    p_slot = softmax(scores)[0]
    best_alone = params.slot_top_k == 1 or (params.slot_top_p < 1 and max(p_slot, 1 - p_slot) >= params.slot_top_p)
    return bool(slot_is_best) if best_alone else bool(np.float32(u) <= p_slot)


def choose_code(logits: Floats, seen: Floats, u: float, params: SamplingParams) -> int:
    """One code from the raw logits [V] of its codebook; `seen` [V] is 1 where a code was used before."""
    r = np.float32(params.repetition_penalty)
    scores = np.where(seen > 0, np.where(logits < 0, logits * r, logits / r), logits)
    scores = (scores / np.float32(params.temperature)).astype(np.float32)
    order = np.argsort(-scores, kind="stable")[: params.top_k]
    kept = scores[order]
    p = softmax(kept)
    before = np.cumsum(p, dtype=np.float32) - p
    if params.top_p < 1:
        kept = kept[before < np.float32(params.top_p)]
    cdf = np.cumsum(softmax(kept), dtype=np.float32)
    reached = min(np.float32(u), cdf[-1])  # rounding may leave the whole sum below u
    return int(order[int((cdf < reached).sum())])
