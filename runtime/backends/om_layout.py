"""Where tensors lie inside one piece of device memory.

Two rules of self-managed memory (ATC_AND_ACL.md C.5): a tensor starts at a multiple of 64 bytes and owns
ALIGN32(length) + 32 bytes, because kernels read and write whole 32-byte blocks.

The KV cache must also take the rows of a step in one 2-D copy, which wants one pitch over all layers and heads:

    source   tensor 0: head 0, head 1 … head H-1, spare,   tensor 1: head 0 …      pitch = one row
    target   tensor 0: head 0 [C rows] …         , spare,  tensor 1: …             pitch = C rows

So tensors follow each other at the same pitch as their heads, and the room that the 64 and 32 byte rules ask for
between two tensors is a whole number of spare heads. The copy moves the spare rows too; no graph ever reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALIGNMENT = 64


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def owned_bytes(num_bytes: int) -> int:
    """What a tensor of `num_bytes` must own in a self-managed piece of memory."""
    return round_up(num_bytes, 32) + 32


@dataclass(frozen=True, slots=True)
class Block:
    """Tensors one after another: offset and length of each, and the size of the whole."""

    offsets: dict[str, int]
    lengths: dict[str, int]
    num_bytes: int

    def end(self, name: str) -> int:
        return self.offsets[name] + self.lengths[name]


def pack(lengths: Mapping[str, int]) -> Block:
    """Lay tensors of these byte lengths out in the given order."""
    offsets, position = {}, 0
    for name, length in lengths.items():
        offsets[name] = position
        position = round_up(position + owned_bytes(length), ALIGNMENT)
    return Block(offsets, dict(lengths), position)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """`num_tensors` tensors of `heads` runs each; a run is one row of a step, T rows of a prefill, C rows of the cache.

    `spare` runs separate two tensors; it is the same for source and target, so that one copy covers all runs.
    """

    num_tensors: int
    heads: int  # B × H
    spare: int
    run_bytes: int

    @property
    def num_runs(self) -> int:
        return self.num_tensors * (self.heads + self.spare)

    @property
    def num_bytes(self) -> int:
        return self.num_runs * self.run_bytes

    @property
    def tensor_bytes(self) -> int:
        return self.heads * self.run_bytes

    def offset(self, tensor: int, head: int = 0) -> int:
        """Byte offset of a tensor, or of one of its heads."""
        return (tensor * (self.heads + self.spare) + head) * self.run_bytes


def spare_heads(heads: int, row_bytes: int) -> int:
    """The fewest spare heads that keep both rules when a run is a single row, hence also when it is longer."""
    spare = 1
    while (heads + spare) * row_bytes % ALIGNMENT or (heads + spare) * row_bytes < owned_bytes(heads * row_bytes):
        spare += 1
    return spare
