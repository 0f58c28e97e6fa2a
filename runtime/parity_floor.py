"""Judge a reduced precision by what it can reach: limits from a precision floor (run-om precision) instead of 0.99.

The floor is a parity of float32 against the same graphs with the roundings of a precision mode. A device that does
those roundings in another order makes errors of the same size, not the same errors: FACTOR times the floor is allowed,
and a code that differs counts as a tie while its margins lie within that error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.compare import Tolerance
from runtime.errors import ParityError
from runtime.parity import FORMAT
from runtime.parity_verdict import FLOAT32_LIMITS, Limits

FACTOR = 2.0


def read_report(path: Path) -> dict[str, Any]:
    """A JSON report of run-om parity or run-om precision; ParityError when it is none."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParityError(f"{path} is not a readable parity report ({error})") from error
    if isinstance(data, dict) and isinstance(data.get("parity"), dict):
        data = data["parity"]  # a precision report holds one
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ParityError(f"{path}: format {found!r}, expected {FORMAT!r}; make it with run-om parity --report")
    report: dict[str, Any] = data
    return report


def floor_limits(report: Mapping[str, Any], name: str) -> Limits:
    """The limits that follow from a floor; ParityError when it has no figures for a kind of value."""

    def largest(stages: tuple[str, ...], smallest: Tolerance) -> Tolerance:
        values = []
        for stage in report["stages"]:
            if stage["name"] in stages and stage["metrics"] is not None:
                values.append(float(stage["metrics"]["max_abs"]))
        if not values or not max(values) < float("inf"):
            raise ParityError(
                f"{name}: no finite figure for {', '.join(stages)}; a floor that overflows is no floor: keep nodes in "
                "float32 (run-om precision --search)"
            )
        return Tolerance(max(smallest.atol, FACTOR * max(values)), smallest.rtol, f"{FACTOR:g} times the floor {name}")

    logits = largest(("slot logits", "code logits"), FLOAT32_LIMITS.logits)
    return Limits(
        hidden=largest(("prefill hidden", "prefill cache", "step hidden"), FLOAT32_LIMITS.hidden),
        logits=logits,
        waveform=largest(("waveform",), FLOAT32_LIMITS.waveform),
        tie_margin=max(FLOAT32_LIMITS.tie_margin, 2 * logits.atol),  # two logits may move towards each other
        source=f"the precision floor {name}",
        reference_share=max(0.0, 1 - FACTOR * (1 - _reference_share(report))),
    )


def _reference_share(report: Mapping[str, Any]) -> float:
    """Share of equal reference codes in the floor; 1 where no voice was measured: then nothing is allowed."""
    found = next((s.get("share") for s in report["stages"] if s["name"] == "reference codes"), None)
    return 1.0 if found is None else float(found)
