"""What a block needs beside hidden states: rotations and masks of the next rows, made on the host.

A block reads R rows at positions p, p + 1, …; rows of a request that do not count lie on the right, where causality
keeps them away from the ones that do. Their keys land in the cache beyond the request's length, are masked there, and
are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.sampling import MASKED
from runtime.sfx.config import SfxConfig

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowFeeds:
    """The inputs of a block but hidden and cache."""

    cos: Floats  # [B, 1, 1, R, D]
    sin: Floats  # [B, 1, 1, R, D]; negative where it multiplies the first half, as the rotation asks
    cache_mask: Floats  # [B, 1, 1, C], added to the scores: 0 where a cached row counts
    row_mask: Floats  # [g R, R]: causal among the new rows, once per query head of a key/value head

    def by_name(self) -> dict[str, Floats]:
        return {"cos": self.cos, "sin": self.sin, "cache_mask": self.cache_mask, "row_mask": self.row_mask}


def row_feeds(config: SfxConfig, num_cached: Ints, num_rows: int, capacity: int) -> RowFeeds:
    """Feeds for the next num_rows rows of requests that hold num_cached [B] rows each."""
    positions = num_cached[:, None] + np.arange(num_rows, dtype=np.int32)
    half = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    frequencies = (1.0 / np.float32(config.rope_base) ** half).astype(np.float32)  # float32, as upstream computes them
    angles = positions.astype(np.float32)[:, None, None, :, None] * np.concatenate([frequencies, frequencies])
    sign = np.where(np.arange(config.head_size) < config.head_size // 2, -1, 1).astype(np.float32)
    counts = np.arange(capacity) < num_cached[:, None]
    causal = np.where(np.tri(num_rows, dtype=bool), 0, MASKED).astype(np.float32)
    return RowFeeds(
        np.cos(angles).astype(np.float32),
        (np.sin(angles) * sign).astype(np.float32),
        np.where(counts, 0, MASKED).astype(np.float32)[:, None, None, :],
        np.tile(causal, (config.heads_per_kv, 1)),
    )
