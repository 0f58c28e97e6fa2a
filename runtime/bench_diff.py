"""Two bench results side by side; refused unless fixture and protocol agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.bench import SCHEMA
from runtime.errors import BenchError

# figure -> (label, whether more is better)
FIGURES = {
    "frames_per_second": ("frames per second", True),
    "cpu_ms_per_frame": ("CPU ms per frame", False),
    "rtf": ("RTF", False),
    "first_audio_ms": ("first audio ms", False),
    "load_seconds": ("load seconds", False),
    "peak_rss_bytes": ("peak RSS bytes", False),
}


def read_result(path: Path) -> dict[str, Any]:
    """A result that `run-om bench --out` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: expected a JSON file that run-om bench --out wrote ({error})") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise BenchError(f"{path}: expected a bench result of schema {SCHEMA}; measure again with run-om bench --out")
    return data


def diff(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Every figure of both, and the ratio in which more is better; BenchError when they measured different things."""
    for part in ("fixture", "protocol"):
        if a[part] != b[part]:
            raise BenchError(f"the results differ in {part}: {_first_difference(a[part], b[part])}; they say nothing "
                             "about each other")  # fmt: skip
    lines = [f"{'':<24}{'A':>14}{'B':>14}{'B is better by':>17}"]
    for name, (label, more_is_better) in FIGURES.items():
        lines.append(_line(label, a[name], b[name], more_is_better))
    stages = {s["name"]: s["median_ms"] for s in a["stages"]}
    for stage in b["stages"]:
        if stage["name"] in stages:
            lines.append(_line(f"{stage['name']} ms", stages[stage["name"]], stage["median_ms"], False))
    for part in ("weights", "backend", "fused", "threads_asked"):
        if a[part] != b[part]:
            lines.append(f"note: {part}: {a[part]} against {b[part]}")
    cpus = {a["machine"]["cpu"], b["machine"]["cpu"]}
    if len(cpus) > 1:
        lines.append(f"note: different machines: {' / '.join(sorted(cpus))}")
    lines.append("codes: the same" if a["codes"] == b["codes"] else "codes: DIFFERENT")
    return "\n".join(lines)


def _line(label: str, a: float, b: float, more_is_better: bool) -> str:
    better = (b / a if more_is_better else a / b) if a and b else float("nan")
    return f"{label:<24}{a:>14,.2f}{b:>14,.2f}{better:>16.2f}x"


def _first_difference(a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        name = next(k for k in {**a, **b} if a.get(k) != b.get(k))
        return f"{name} is {a.get(name)} and {b.get(name)}"
    return f"{a} and {b}"
