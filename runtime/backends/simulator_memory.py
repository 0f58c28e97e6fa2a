"""Device and pinned host memory of the simulator.

Device addresses lie where no process has memory, so host code that dereferences one dies with SIGSEGV as it would
on a device box. Fresh memory is filled with 0xFF: NaN for floats, -1 for integers. Every device byte remembers
whether it was written, so that a model never reads what nobody put there.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Byte = TypeVar("Byte", np.uint8, np.bool_)  # both take one byte per element

# Bits 49 and 52: outside the user address range of x86-64 and of aarch64 (whose top byte alone is ignored).
DEVICE_BASE = 0x0012_4100_0000_0000
ALIGNMENT = 64
POISON = 0xFF
_GUARD = 64  # bytes after a host allocation that nobody may write


class AclMisuse(RuntimeError):  # noqa: N818  the name says whose fault it is
    """The caller did what corrupts memory or crashes on a device. A bug, never an expected failure."""


@dataclass(slots=True)
class Allocation:
    """One piece of device or pinned memory."""

    address: int
    data: Bytes
    written: npt.NDArray[np.bool_] | None  # None: host memory, which is not tracked
    owner: Bytes = field(repr=False)  # keeps host memory alive

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def is_device(self) -> bool:
        return self.written is not None


@dataclass(frozen=True, slots=True)
class Span:
    """`height` rows of `width` bytes, `pitch` apart, inside one allocation."""

    allocation: Allocation
    offset: int
    width: int
    pitch: int
    height: int

    def view(self) -> Bytes:
        """The bytes as [height, width]; writing to it writes the memory."""
        return self._strided(self.allocation.data)

    def written(self) -> npt.NDArray[np.bool_]:
        """One flag per byte, in the same arrangement."""
        assert self.allocation.written is not None
        return self._strided(self.allocation.written)

    def _strided(self, data: npt.NDArray[Byte]) -> npt.NDArray[Byte]:
        span = data[self.offset : self.offset + self.pitch * (self.height - 1) + self.width]
        return np.lib.stride_tricks.as_strided(span, (self.height, self.width), (self.pitch, 1))

    def overlaps(self, other: Span) -> bool:
        """Whether the address ranges meet (conservative for pitched rows)."""
        if self.allocation is not other.allocation:
            return False
        ends = [s.offset + s.pitch * (s.height - 1) + s.width for s in (self, other)]
        return self.offset < ends[1] and other.offset < ends[0]


class Memory:
    """All allocations; resolves raw pointers and refuses what no allocation holds."""

    def __init__(self) -> None:
        self._addresses: list[int] = []  # sorted
        self._allocations: dict[int, Allocation] = {}
        self._freed: set[int] = set()
        self._next_device_address = DEVICE_BASE

    def allocate_device(self, size: int) -> int:
        address = self._next_device_address
        self._next_device_address += -(-size // 4096) * 4096 + (1 << 16)
        data = np.full(size, POISON, np.uint8)
        self._add(Allocation(address, data, np.zeros(size, np.bool_), data))
        return address

    def allocate_host(self, size: int) -> int:
        owner = np.full(size + ALIGNMENT + _GUARD, POISON, np.uint8)
        start = -owner.ctypes.data % ALIGNMENT
        self._add(Allocation(owner.ctypes.data + start, owner[start : start + size], None, owner))
        return int(owner.ctypes.data + start)

    def _add(self, allocation: Allocation) -> None:
        bisect.insort(self._addresses, allocation.address)
        self._allocations[allocation.address] = allocation
        self._freed.discard(allocation.address)

    def free(self, pointer: int, device: bool) -> None:
        if pointer in self._freed:
            raise AclMisuse(f"{pointer:#x} is freed twice")
        allocation = self._allocations.get(pointer)
        if allocation is None or allocation.is_device != device:
            raise AclMisuse(f"{pointer:#x} is no start of {'device' if device else 'pinned host'} memory")
        if not device:
            start = allocation.address - allocation.owner.ctypes.data + allocation.size
            if (allocation.owner[start : start + _GUARD] != POISON).any():
                raise AclMisuse(f"host code wrote past the end of the {allocation.size} bytes at {pointer:#x}")
        del self._allocations[pointer]
        self._addresses.remove(pointer)
        self._freed.add(pointer)

    def span(self, pointer: int, width: int, pitch: int = 0, height: int = 1) -> Span:
        """The memory behind a pointer; AclMisuse unless one live allocation holds all of it."""
        index = bisect.bisect_right(self._addresses, pointer) - 1
        if index >= 0:
            allocation = self._allocations[self._addresses[index]]
            offset = pointer - allocation.address
            end = offset + pitch * (height - 1) + width
            if end <= allocation.size:
                return Span(allocation, offset, width, pitch or width, height)
            if offset < allocation.size:
                raise AclMisuse(
                    f"{pointer:#x}: the access ends {end - allocation.size} bytes past its {allocation.size} bytes"
                )
        raise AclMisuse(f"{pointer:#x} is no live memory of acl.rt.malloc or malloc_host: freed, made up, or pageable")

    @property
    def device_bytes(self) -> int:
        return sum(a.size for a in self._allocations.values() if a.is_device)

    def live(self) -> list[str]:
        """What has not been freed, in words."""
        return [
            f"{'device' if a.is_device else 'host'} memory of {a.size} bytes at {a.address:#x}"
            for a in self._allocations.values()
        ]

    def starts(self) -> set[int]:
        return set(self._allocations)
