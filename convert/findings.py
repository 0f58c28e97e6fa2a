"""What examining a checkpoint found: notices that were handled, and faults that block its use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from runtime.errors import CheckpointError

Severity = Literal["blocks", "notice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation: where (file, tensor), what was expected and got, and what to do or what was done."""

    severity: Severity
    rule: str  # a short stable word, for machines and tests
    file: str
    tensor: str | None
    message: str  # expected and got
    fix: str  # for a fault what to do, for a notice what was done

    @property
    def blocks(self) -> bool:
        return self.severity == "blocks"

    def __str__(self) -> str:
        where = f"{self.file}: {self.tensor}" if self.tensor else self.file
        return f"{where}: {self.message}; {self.fix}"


def fault(rule: str, file: str, message: str, fix: str, tensor: str | None = None) -> Finding:
    """A finding that blocks."""
    return Finding("blocks", rule, file, tensor, message, fix)


def notice(rule: str, file: str, message: str, fix: str, tensor: str | None = None) -> Finding:
    """A finding that was handled."""
    return Finding("notice", rule, file, tensor, message, fix)


def refuse(where: str, findings: Iterable[Finding]) -> None:
    """CheckpointError with every blocking finding, one per line; nothing when none blocks."""
    faults = [f for f in findings if f.blocks]
    if len(faults) == 1:
        raise CheckpointError(f"{where}: {faults[0]}")
    if faults:
        lines = "\n".join(f"  {f}" for f in faults)
        raise CheckpointError(f"{where}: {len(faults)} faults block this checkpoint\n{lines}")
