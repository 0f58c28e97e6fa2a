"""What a backend is: it opens a graph file and runs it. Nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from runtime.spec import Array, GraphSpec


class Session(Protocol):
    """One loaded graph; a context manager that frees it."""

    spec: GraphSpec

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Check the feeds against the spec, run once, return every output by name."""
        ...

    def close(self) -> None:
        """Free the graph; a second call does nothing."""
        ...


class Backend(Protocol):
    """One way to run graphs; `name` is what the stats print."""

    name: str

    def open(self, spec: GraphSpec, path: Path) -> Session:
        """Load a graph file; SpecMismatchError when the file's own description differs from `spec`."""
        ...
