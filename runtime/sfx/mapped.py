"""The tensors of a safetensors checkpoint directory, mapped into memory and never read as a whole.

A safetensors file is 8 bytes of header length, a JSON header, and the tensors. NumPy has no bfloat16: such an array
shows its bit patterns as uint16; a torch tensor is a view with the right dtype.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from runtime.errors import CheckpointError

if TYPE_CHECKING:
    import torch

STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: str  # F32, F16 or BF16
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class MappedTensors:
    """The tensors of a directory by name: model.safetensors, or the shards of its index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stored: Mapping[str, StoredTensor] = {
            name: tensor for file in _files(directory) for name, tensor in _header(file)
        }

    def dtype(self, name: str) -> str:
        """float32, float16 or bfloat16."""
        return DTYPE_NAMES[self.stored[name].dtype]

    def array(self, name: str) -> npt.NDArray[Any]:
        """The mapped tensor; bfloat16 as uint16 bit patterns."""
        stored = self.stored[name]
        # Mode "c": pages are read on use; a write (nobody writes) would stay private. torch warns about read-only maps.
        return np.memmap(stored.file, STORED[stored.dtype], mode="c", offset=stored.offset, shape=stored.shape)

    def tensor(self, name: str) -> torch.Tensor:
        """The mapped tensor as a torch view."""
        import torch

        view = torch.from_numpy(np.asarray(self.array(name)))
        return view.view(torch.bfloat16) if view.dtype == torch.uint16 else view

    def check(self, expected: Mapping[str, tuple[int, ...]], model: str) -> None:
        """CheckpointError unless names and shapes are the expected ones."""
        missing = sorted(set(expected) - set(self.stored))
        if missing:
            raise CheckpointError(f"{self.directory}: {len(missing)} of {model}'s {len(expected)} tensors are missing, "
                                  f"{missing[0]} for one; download the checkpoint again")  # fmt: skip
        unknown = sorted(set(self.stored) - set(expected))
        if unknown:
            raise CheckpointError(f"{self.directory}: {len(unknown)} tensors that {model} does not have, "
                                  f"{unknown[0]} for one; is it this model?")  # fmt: skip
        for name, shape in expected.items():
            if self.stored[name].shape != shape:
                raise CheckpointError(f"{self.directory}: {name}: expected {list(shape)}, got "
                                      f"{list(self.stored[name].shape)}; config.json and weights differ")  # fmt: skip


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is no safetensors index ({error!r}); download it again") from error
    else:
        names = ["model.safetensors"]
    files = [directory / name for name in names]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; expected model.safetensors or the shards of {INDEX_NAME}")
    return files


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise CheckpointError(f"{file} is no safetensors file ({size} bytes); download it again")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file}: its header is not JSON ({error}); download it again") from error
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: damaged entry for {name}; download it again") from error
        if dtype not in STORED:
            raise CheckpointError(f"{file}: {name} is {dtype}; expected {', '.join(STORED)}")
        if end - begin != math.prod(shape) * STORED[dtype].itemsize or 8 + length + end > size:
            raise CheckpointError(f"{file}: {name} does not fit into the file of {size} bytes; download it again")
        yield name, StoredTensor(file, dtype, shape, 8 + length + begin)
