"""The one place that compares tensors.

NaN on either side fails, an empty comparison fails, different shapes or dtypes fail before values are looked at.
A float comparison passes while max |a - b| <= atol + rtol * max |reference|: the error of a matrix product grows with
the largest values that enter it, not with each single result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.spec import Array


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference of float tensors; integers must be equal."""

    atol: float
    rtol: float
    reason: str


# Two float32 implementations of the same sum differ by about sqrt(n) ulp of the largest term; the golden runs of
# upstream's own eager and sdpa paths differ by 2.2e-6 on values of a few units (golden README).
FLOAT32_SAME_MATH = Tolerance(2e-5, 1e-5, "float32, same mathematics, other order of sums")


@dataclass(frozen=True, slots=True)
class Difference:
    """What one comparison found. `passing_atol` is the absolute tolerance that would have been enough."""

    name: str
    passed: bool
    max_abs: float
    reference_max: float
    passing_atol: float
    reason: str  # why it failed, or what held


def compare_tensors(name: str, reference: Array, other: Array, tolerance: Tolerance) -> Difference:
    """Compare `other` with `reference`."""
    if reference.shape != other.shape or reference.dtype != other.dtype:
        got = f"{other.dtype}{list(other.shape)}, expected {reference.dtype}{list(reference.shape)}"
        return Difference(name, False, np.inf, np.inf, np.inf, f"different tensors: got {got}")
    if not reference.size:
        return Difference(name, False, np.inf, np.inf, np.inf, "nothing to compare: both are empty")
    if not np.issubdtype(reference.dtype, np.floating):
        wrong = int((reference != other).sum())
        gap = float(np.abs(reference.astype(np.int64) - other.astype(np.int64)).max())
        reason = f"{wrong} of {reference.size} integers differ" if wrong else "equal"
        return Difference(name, not wrong, gap, float(np.abs(reference.astype(np.int64)).max()), gap, reason)
    if not (np.isfinite(reference).all() and np.isfinite(other).all()):
        return Difference(name, False, np.inf, np.inf, np.inf, "NaN or infinity")
    max_abs = float(np.abs(reference.astype(np.float64) - other.astype(np.float64)).max())
    reference_max = float(np.abs(reference).max())
    allowed = tolerance.atol + tolerance.rtol * reference_max
    reason = f"max |difference| {max_abs:.3g}, allowed {allowed:.3g} ({tolerance.reason})"
    return Difference(name, max_abs <= allowed, max_abs, reference_max, max_abs, reason)


def largest_gap(reference: Array, other: Array) -> float:
    """Largest |difference| of two tensors of any kind; infinite where shapes, kinds, NaN or infinities disagree.

    For proofs: there a NaN or an infinity of the reference must come out as the same NaN or infinity.
    """
    if reference.shape != other.shape or reference.dtype.kind != other.dtype.kind:
        return float("inf")
    if reference.dtype.kind not in "fc":
        return 0.0 if np.array_equal(reference, other) else float("inf")
    a, b = reference.astype(np.float64), other.astype(np.float64)
    numbers = np.isfinite(a)
    if not np.array_equal(a[~numbers], b[~numbers], equal_nan=True) or not np.isfinite(b[numbers]).all():
        return float("inf")
    return float(np.max(np.abs(a[numbers] - b[numbers]), initial=0.0))


@dataclass(frozen=True, slots=True)
class Metrics:
    """How far apart two float tensors of one shape are. None is "not defined here": never a good value.

    `correlation` is the cosine after the means are taken away: a common offset makes a plain cosine blind.
    """

    max_abs: float
    mean_abs: float
    relative: float | None  # |a - b| / |a|, Euclidean; None for a zero reference
    cosine: float | None  # None when either side is zero
    correlation: float | None  # None when either side is constant
    top1: float | None  # share of rows of the last axis whose largest entry is at the same place
    reference_max: float


NOT_COMPARABLE = Metrics(np.inf, np.inf, None, None, None, None, np.inf)


def measure(reference: Array, other: Array) -> Metrics:
    """Metrics of `other` against `reference`; NOT_COMPARABLE for other shapes, no elements, NaN or infinity."""
    if reference.shape != other.shape or not reference.size:
        return NOT_COMPARABLE
    a, b = reference.astype(np.float64), other.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return NOT_COMPARABLE
    gap = np.abs(a - b)
    rows = a.ndim > 0 and a.shape[-1] > 1
    top1 = float((a.argmax(-1) == b.argmax(-1)).mean()) if rows else None
    norm = float(np.linalg.norm(a))
    return Metrics(
        max_abs=float(gap.max()),
        mean_abs=float(gap.mean()),
        relative=float(np.linalg.norm(a - b)) / norm if norm else None,
        cosine=_cosine(a, b),
        correlation=None if is_constant(a) or is_constant(b) else _cosine(a - a.mean(), b - b.mean()),
        top1=top1,
        reference_max=float(np.abs(a).max()),
    )


def is_constant(values: Array) -> bool:
    """Whether every element is the same: agreement with such a reference proves nothing."""
    return values.size > 1 and bool((values == values.flat[0]).all())


def _cosine(a: Array, b: Array) -> float | None:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.clip((a * b).sum() / norms, -1, 1)) if norms else None
