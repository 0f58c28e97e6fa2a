"""What changed between two parity reports: verdicts, agreement, errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import ParityError
from runtime.parity_verdict import Verdict

WORSE_FACTOR = 1.5  # errors of the same code on another machine differ by less than this
_ORDER = [v.value for v in Verdict]
_ASKED = ("text", "seed", "frames", "sampling")


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the comparison."""

    what: str
    before: str
    after: str
    worse: bool


def diff_reports(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Everything that differs; ParityError when the reports are not about the same request."""
    different = [k for k in _ASKED if before["plan"][k] != after["plan"][k]]
    if different:
        raise ParityError(f"the reports are not about the same request: {', '.join(different)} differ")
    changes = _verdict("overall", before, after)
    for kind in ("stages", "modes"):
        later = {entry["name"]: entry for entry in after[kind]}
        for entry in before[kind]:
            other = later.pop(entry["name"], None)
            if other is None:
                changes.append(Change(entry["name"], entry["verdict"], "missing", True))
                continue
            changes += _verdict(entry["name"], entry, other)
            changes += _error(entry, other) if kind == "stages" else _agreement(entry, other)
        changes += [Change(name, "missing", entry["verdict"], False) for name, entry in later.items()]
    return changes


def _verdict(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    first, second = before["verdict"], after["verdict"]
    if first == second:
        return []
    return [Change(f"{name}: verdict", first, second, _ORDER.index(second) > _ORDER.index(first))]


def _error(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    if before["metrics"] is None or after["metrics"] is None:
        return []
    first, second = (float(x["metrics"]["max_abs"]) for x in (before, after))
    if first == second or (max(first, second) <= WORSE_FACTOR * min(first, second)):
        return []
    return [Change(f"{before['name']}: largest |a − b|", f"{first:.4g}", f"{second:.4g}", second > first)]


def _agreement(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    first, second = before["agreement"], after["agreement"]
    if first == second or first is None or second is None:
        return []
    return [Change(f"{before['name']}: agreement", f"{first:.2%}", f"{second:.2%}", second < first)]
