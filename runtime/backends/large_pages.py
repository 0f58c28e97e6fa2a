"""Packed weights on 2 MiB pages: a step reads every weight once, and on 4 KiB pages it waits for address translation.

ONNX Runtime allocates its packed weights with malloc, which most Linux systems back with 4 KiB pages unless the program
asks otherwise (transparent_hugepage = madvise). `on_large_pages` asks, after the fact, for what was allocated inside:
MADV_COLLAPSE (Linux 6.1 and later) moves memory that is there onto large pages, while the model runs already. Where a
system does not do that, nothing changes; results never do. docs/performance.md has what it brings.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, include/uapi/asm-generic/mman-common.h
_MAPS = Path("/proc/self/maps")

Region = tuple[int, int]  # first address, end


@contextmanager
def on_large_pages() -> Iterator[None]:
    """Collapse the large anonymous memory that this process gets inside the block, behind its back."""
    before = _anonymous()
    yield
    whole = [(-(-start // PAGE) * PAGE, end // PAGE * PAGE) for start, end in _without(_anonymous(), before)]
    if whole := [(start, end) for start, end in whole if start < end]:
        threading.Thread(target=_collapse, args=(whole,), name="large pages", daemon=True).start()


def _anonymous() -> list[Region]:
    """Writable private memory without a file behind it; empty where /proc says nothing."""
    if not sys.platform.startswith("linux") or not _MAPS.is_file():
        return []
    found = []
    for line in _MAPS.read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append((start, end))
    return found


def _without(regions: list[Region], others: list[Region]) -> list[Region]:
    """The parts of `regions` that lie in none of `others`."""
    parts = regions
    for start, end in others:
        cut = []
        for first, last in parts:
            cut += [(a, b) for a, b in ((first, min(last, start)), (max(first, end), last)) if a < b]
        parts = cut
    return parts


def _collapse(regions: list[Region]) -> None:
    """Best effort: a system that cannot, or has no free large page, or memory that is gone again, stays as it is."""
    libc = ctypes.CDLL(None)
    for start, end in regions:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_COLLAPSE))
