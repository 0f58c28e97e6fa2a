"""Memory that a session gets is moved onto large pages; everything else stays as it is."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest

from runtime.backends import large_pages
from runtime.backends.large_pages import PAGE, _anonymous, _without, on_large_pages


@pytest.mark.parametrize(
    ("regions", "others", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 4)], [(0, 2), (4, 10)]),
        ([(5, 10)], [(0, 6), (9, 20)], [(6, 9)]),
        ([(0, 4), (8, 12)], [(4, 8)], [(0, 4), (8, 12)]),
        ([(0, 4), (8, 12)], [(3, 9)], [(0, 3), (9, 12)]),
    ],
)
def test_only_new_memory_counts(regions, others, left) -> None:
    assert _without(regions, others) == left


def test_what_was_there_before_and_small_memory_is_left_alone(monkeypatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(large_pages, "_collapse", asked.extend)
    old = [(0, 8 * PAGE)]
    monkeypatch.setattr(large_pages, "_anonymous", lambda: old)
    with on_large_pages():
        old = [(0, 11 * PAGE - 1), (20 * PAGE, 20 * PAGE + 4096)]
    for thread in threading.enumerate():
        if thread.name == "large pages":
            thread.join()
    assert asked == [(8 * PAGE, 10 * PAGE)]


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux")
def test_new_memory_lies_on_large_pages_afterwards_with_its_contents() -> None:
    with on_large_pages():
        memory = mmap.mmap(-1, 6 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page : page + 2] = b"ok"
        before = _huge_bytes()
    for thread in threading.enumerate():
        if thread.name == "large pages":
            thread.join()
    assert all(memory[page : page + 2] == b"ok" for page in range(0, len(memory), mmap.PAGESIZE))
    if _huge_bytes() == before:
        pytest.skip("this kernel has no MADV_COLLAPSE, or no large page is free")
    assert _huge_bytes() - before >= 4 * PAGE


def test_where_proc_says_nothing_nothing_is_asked(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(large_pages, "_MAPS", tmp_path / "maps")
    assert _anonymous() == []


def _huge_bytes() -> int:
    """On large pages, of the whole process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
