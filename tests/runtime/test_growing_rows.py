"""Rows that are shown as one contiguous array and move apart in place."""

from __future__ import annotations

import numpy as np

from runtime.growing_rows import GrowingRows


def test_rows_stay_when_more_are_shown_and_the_array_is_contiguous() -> None:
    rows = GrowingRows(num_heads=3, capacity=40, head_size=2)
    expected = np.zeros((1, 3, 0, 2), np.float32)
    rows.show(1, keep=0)
    for shown in (1, 2, 5, 17, 40):
        kept = expected.shape[2]
        rows.show(shown, keep=kept)
        np.testing.assert_array_equal(rows.array[:, :, :kept], expected)
        assert rows.array.shape == (1, 3, shown, 2)
        assert rows.array.flags["C_CONTIGUOUS"]
        expected = np.random.default_rng(shown).random((1, 3, shown, 2), np.float32)
        rows.array[:] = expected


def test_it_can_begin_again_with_few_rows() -> None:
    rows = GrowingRows(2, 16, 4)
    whole = rows.array
    whole[:] = 7
    rows.show(3, keep=0)
    assert rows.array.shape == (1, 2, 3, 4)
    assert np.shares_memory(rows.array, whole)
    assert np.isfinite(rows.array).all()
