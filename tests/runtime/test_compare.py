"""Comparison never passes by accident."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.compare import FLOAT32_SAME_MATH, compare_tensors

ONE = np.ones((2, 3), np.float32)


def test_equal_tensors_pass_and_a_small_error_is_measured():
    assert compare_tensors("x", ONE, ONE, FLOAT32_SAME_MATH).passed
    found = compare_tensors("x", ONE, ONE + np.float32(1e-5), FLOAT32_SAME_MATH)
    assert found.passed and found.max_abs == pytest.approx(1e-5, rel=0.05)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (ONE + 1, "allowed"),
        (ONE[:1], "different tensors"),
        (ONE.astype(np.float64), "different tensors"),
        (np.where(np.arange(6).reshape(2, 3) == 4, np.nan, ONE).astype(np.float32), "NaN"),
        (np.full_like(ONE, np.inf), "NaN or infinity"),
    ],
)
def test_what_differs_fails_with_its_reason(other, reason):
    found = compare_tensors("x", ONE, other, FLOAT32_SAME_MATH)
    assert not found.passed and reason in found.reason
    assert not compare_tensors("x", other, ONE, FLOAT32_SAME_MATH).passed


def test_nan_on_both_sides_fails():
    nan = np.full_like(ONE, np.nan)
    assert not compare_tensors("x", nan, nan, FLOAT32_SAME_MATH).passed


def test_an_empty_comparison_fails():
    assert not compare_tensors("x", ONE[:0], ONE[:0], FLOAT32_SAME_MATH).passed


def test_integers_must_be_equal():
    a = np.arange(4, dtype=np.int32)
    b = a.copy()
    b[2] = 7
    assert compare_tensors("codes", a, a, FLOAT32_SAME_MATH).passed
    assert "1 of 4" in compare_tensors("codes", a, b, FLOAT32_SAME_MATH).reason
