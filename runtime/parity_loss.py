"""What weights of fewer bits cost: artifacts of convert-moss export --cpu-weights against float32 ones.

Both sides are fed the same codes (teacher forcing), so every frame starts from the same past, and the distributions
that they would draw the next code from are compared. After free running codes differ for good at the first draw that
falls differently, which says little about the quality.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.compare import Tolerance
from runtime.manifest import FLOAT32
from runtime.parity_record import Identity, Recording
from runtime.parity_stages import Common
from runtime.parity_verdict import FLOAT32_LIMITS, Limits, Verdict
from runtime.spec import Array


@dataclass(frozen=True, slots=True)
class Allowed:
    """How far reduced weights may go before they count as damaged."""

    hidden: float  # of the largest value
    logits: float  # of the largest value
    kl: float  # mean, in nats
    top1: float  # share of equal first choices


# Full-size made-up weights lose 0.10 and 0.05 of the largest hidden value and logit at int8, 0.70 and 0.36 at int4, and
# no first choice (docs/cpu-weights.md). A scale or a block at the wrong place leaves nothing alike.
ALLOWED = {"int8": Allowed(0.3, 0.15, 0.05, 0.95), "int4": Allowed(1.0, 0.5, 0.5, 0.8)}


@dataclass(frozen=True, slots=True)
class Loss:
    """Teacher-forced figures of b against a; KL is that of b from a, over all codes at temperature 1, in nats."""

    verdict: Verdict
    text: str
    a_weights: str
    b_weights: str
    distributions: int  # code distributions compared: those behind equal codes of the same frame
    top1: float  # share of them with the same most likely code
    kl_mean: float
    kl_p95: float
    slot_top1: float  # the same for the decision whether a frame follows
    slot_kl_mean: float
    hidden_cosine_mean: float
    hidden_cosine_min: float


def limits_between(a: Recording, b: Recording) -> Limits:
    """Float32 limits for sides of one precision; else those of the fewest bits."""
    weights = _reduced(a.identity, b.identity)
    if weights is None:
        return FLOAT32_LIMITS
    allowed, source = ALLOWED[weights], f"{a.identity.cpu_weights} against {b.identity.cpu_weights} weights"
    largest = max((_largest(trace.code_logits) for trace in a.traces.values()), default=0.0)
    return Limits(
        hidden=Tolerance(FLOAT32_LIMITS.hidden.atol, allowed.hidden, source),
        logits=Tolerance(FLOAT32_LIMITS.logits.atol, allowed.logits, source),
        waveform=FLOAT32_LIMITS.waveform,  # the codec is float32 on both sides
        tie_margin=max(FLOAT32_LIMITS.tie_margin, 2 * allowed.logits * largest),  # two logits may move together
        source=source,
    )


def measure_loss(a: Identity, b: Identity, common: Common) -> Loss | None:
    """None for sides of one precision, or without a replay of the same codes with finite values."""
    weights, n = _reduced(a, b), common.frames
    first, second = common.a, common.b
    if weights is None or not n or not common.source.startswith("replay"):
        return None
    pairs = [(getattr(first, name), getattr(second, name)) for name in ("hidden", "slot_logits", "code_logits")]
    if any(x is None or y is None or not (np.isfinite(x[:n]).all() and np.isfinite(y[:n]).all()) for x, y in pairs):
        return None
    hidden, slots, codes = [(x[:n], y[:n]) for x, y in pairs]
    codes = codes[0][common.counts], codes[1][common.counts]
    cosine, kl, slot_kl = _cosines(*hidden), _kl(*codes), _kl(*slots)
    top1, kl_mean, allowed = _same_choice(*codes), float(kl.mean()), ALLOWED[weights]
    passed = top1 >= allowed.top1 and kl_mean <= allowed.kl
    text = (
        f"{a.cpu_weights} against {b.cpu_weights} weights, fed the same codes: {top1:.2%} of {len(kl)} most likely "
        f"codes equal (at least {allowed.top1:.0%}), KL {kl_mean:.3g} nats on average (at most {allowed.kl:g}), cosine "
        f"of the hidden state {cosine.mean():.4f} on average, {cosine.min():.4f} at worst"
    )
    return Loss(
        verdict=Verdict.WITHIN_TOLERANCE if passed else Verdict.DIVERGENT,
        text=text,
        a_weights=a.cpu_weights,
        b_weights=b.cpu_weights,
        distributions=len(kl),
        top1=top1,
        kl_mean=kl_mean,
        kl_p95=float(np.percentile(kl, 95)),
        slot_top1=_same_choice(*slots),
        slot_kl_mean=float(slot_kl.mean()),
        hidden_cosine_mean=float(cosine.mean()),
        hidden_cosine_min=float(cosine.min()),
    )


def _reduced(a: Identity, b: Identity) -> str | None:
    """The weights with the fewest bits when the sides differ in them."""
    kinds = {a.cpu_weights, b.cpu_weights}
    return min(kinds - {FLOAT32}) if len(kinds) > 1 else None  # int4 sorts before int8


def _largest(values: Array | None) -> float:
    finite = values[np.isfinite(values)] if values is not None else np.zeros(0)
    return float(np.abs(finite).max(initial=0.0))


def _cosines(a: Array, b: Array) -> npt.NDArray[np.float64]:
    """One per frame; 0 where a side is zero."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    cosines: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.maximum(norms, 1e-30)
    return cosines


def _kl(a: Array, b: Array) -> npt.NDArray[np.float64]:
    """KL(a ‖ b) of each row of logits."""
    p, q = _log_softmax(a), _log_softmax(b)
    divergence: npt.NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=-1)
    return divergence


def _log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalised: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def _same_choice(a: Array, b: Array) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).mean())
