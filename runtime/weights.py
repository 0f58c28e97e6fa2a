"""weights.bin: the state of every module, stored once and shared by all graphs of an artifacts directory.

Raw little-endian tensors at offsets that are multiples of 4,096 (the alignment that ONNX asks of external data, so
that files can be mapped). The index lies in the manifest; ONNX graphs point at the same offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtime.errors import ManifestError
from runtime.spec import Array

WEIGHTS_NAME = "weights.bin"
ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """Where one tensor lies in weights.bin."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def write_weights(file: BinaryIO, tensors: Iterable[tuple[str, Array]]) -> dict[str, WeightRecord]:
    """Append every tensor to an open, empty file; return the index."""
    index: dict[str, WeightRecord] = {}
    for name, tensor in tensors:
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
        index[name] = WeightRecord(str(tensor.dtype), tensor.shape, file.tell())
        file.write(np.ascontiguousarray(tensor).data)
    return index


def map_weights(path: Path, index: Mapping[str, WeightRecord]) -> dict[str, Array]:
    """Every tensor as a read-only view of the mapped file; nothing is read before it is used."""
    size = path.stat().st_size if path.is_file() else 0
    end = max((r.offset + r.num_bytes for r in index.values()), default=0)
    if size < end:
        raise ManifestError(f"{path}: expected at least {end} bytes, got {size}; export again")
    data = np.memmap(path, mode="c")  # copy on write: torch asks for writable memory and never writes
    return {name: data[r.offset : r.offset + r.num_bytes].view(r.dtype).reshape(r.shape) for name, r in index.items()}
