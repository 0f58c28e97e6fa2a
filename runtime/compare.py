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
