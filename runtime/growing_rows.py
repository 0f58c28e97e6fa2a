"""Key or value rows in host memory: allocated once, shown to a graph only as far as they are in use.

A graph takes a contiguous array, and reading rows that hold nothing costs time. So the heads lie as many rows apart as
are shown, and move apart in place when more are shown. Between two such moves a row is written where it stays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class GrowingRows:
    """`array` [1, H, n, D]: the n rows per head that are shown, of `capacity`."""

    def __init__(self, num_heads: int, capacity: int, head_size: int) -> None:
        self._heads, self._head_size = num_heads, head_size
        self._flat = np.zeros(num_heads * capacity * head_size, np.float32)
        self.array = self._shaped(capacity)

    def show(self, rows: int, keep: int) -> None:
        """Show `rows` rows per head. When these are more than before, the first `keep` stay; the others are finite."""
        shown, before, kept = (n * self._head_size for n in (rows, self.array.shape[2], keep))
        for head in reversed(range(1, self._heads)) if shown > before else ():  # the last first: none is overwritten
            self._flat[head * shown : head * shown + kept] = self._flat[head * before : head * before + kept].copy()
        self.array = self._shaped(rows)

    def _shaped(self, rows: int) -> Floats:
        size = self._heads * rows * self._head_size
        return self._flat[:size].reshape(1, self._heads, rows, self._head_size)


def round_up(rows: int, block: int) -> int:
    """The next multiple of `block`."""
    return -(-rows // block) * block
