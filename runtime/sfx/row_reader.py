"""What every RowModel does alike: rows in chunks, lengths, limits. Where keys and values lie is up to the subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from runtime.errors import CapacityError
from runtime.sfx.config import SfxConfig

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class RowReader(ABC):
    """Reads rows chunk by chunk; a request's cache holds the rows that counted, without gaps."""

    def __init__(self, config: SfxConfig, chunk_rows: int, max_rows: int) -> None:
        self.config, self.chunk_rows, self.max_rows = config, chunk_rows, max_rows
        self._num_cached = np.zeros(0, np.int32)
        self._room = 0

    def start(self, batch: int, num_rows: int) -> None:
        """Begin a new run of at most num_rows rows per request and forget the one before."""
        if num_rows > self.max_rows:
            raise CapacityError(
                f"{num_rows} rows of prompt and sound; this model holds {self.max_rows}: lower --max-new-tokens"
            )
        self._num_cached, self._room = np.zeros(batch, np.int32), num_rows
        self._make_room(batch, num_rows)

    def read(self, rows: Ints, lengths: Ints) -> Floats:
        """Read rows [B, T, 1 + n_vq], of which lengths [B] count; return each request's last hidden state [B, E]."""
        if int((self._num_cached + lengths).max()) > self._room:
            raise CapacityError(f"{int((self._num_cached + lengths).max())} rows; room was made for {self._room}")
        last = np.zeros((len(rows), self.config.hidden_size), np.float32)
        for begin in range(0, rows.shape[1], self.chunk_rows):
            chunk = rows[:, begin : begin + self.chunk_rows]
            counts = np.clip(lengths - begin, 0, chunk.shape[1]).astype(np.int32)
            hidden = self._read_chunk(chunk, counts)
            self._num_cached = self._num_cached + counts
            ends = np.flatnonzero((lengths > begin) & (lengths <= begin + self.chunk_rows))
            last[ends] = hidden[ends, counts[ends] - 1]
        return last

    @abstractmethod
    def _make_room(self, batch: int, num_rows: int) -> None:
        """Empty caches for num_rows rows per request."""

    @abstractmethod
    def _read_chunk(self, rows: Ints, counts: Ints) -> Floats:
        """Hidden states [B, R, E] of rows [B, R, 1 + n_vq]; keys and values of the first counts [B] rows are kept."""
