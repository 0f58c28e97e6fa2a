"""The precision floor as a page and as JSON: its conclusion first, then the nodes, then the whole parity report."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from runtime import page
from runtime.manifest import write_atomically
from runtime.parity_record import Recording
from runtime.parity_report import to_html
from runtime.precision import Floor, Search

JSON_NAME, HTML_NAME = "precision.json", "precision.html"


def write_floor(floor: Floor, directory: Path, a: Recording, b: Recording) -> Path:
    """Write both files; the JSON is what run-om parity --floor takes. Returns the page."""
    write_atomically(directory / JSON_NAME, floor_json(floor))
    write_atomically(directory / HTML_NAME, floor_html(floor, a, b))
    return directory / HTML_NAME


def floor_json(floor: Floor) -> str:
    return json.dumps(floor.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def floor_lines(floor: Floor) -> list[str]:
    """For a terminal."""
    lines = [floor.text]
    if floor.margins is not None and floor.margins.largest_logit_error is not None:
        m = floor.margins
        lines.append(
            f"margins: the chosen code leads by {m.median_lead:.3g} (median), at least {m.smallest_lead:.3g}; the mode "
            f"moves logits by up to {m.largest_logit_error:.3g}, so {m.leads_below_error} of {m.of_choices} choices "
            "are open"
        )
    for mode in floor.parity.modes:
        share = "" if mode.agreement is None else f", {mode.agreement:.2%} of the codes equal"
        lines.append(f"{mode.name}: {mode.verdict.value}{share}")
    loudest = floor.loudest[0] if floor.loudest else None
    if loudest is not None:
        lines.append(f"largest result: {loudest.largest:.4g} in {loudest.graph}, {loudest.node} ({loudest.op_type})")
    return lines + (search_lines(floor.search) if floor.search is not None else [])


def search_lines(search: Search) -> list[str]:
    """What has to stay float32."""
    kept = [f"OpType::{t}" for t in search.op_types] + list(search.names)
    if not kept:
        return [f"search: nothing has to stay float32 for {search.reach:.2%} (reached {search.agreement:.2%})"]
    cut = "" if search.complete else "; the search was cut off, the set may be larger than needed"
    return [
        f"search: {search.num_nodes} of {search.of_nodes} nodes in float32 reach {search.agreement:.2%} instead of "
        f"{search.agreement_without:.2%} ({search.evaluations} runs{cut})",
        *(f"  keep {entry}" for entry in kept[:20]),
        *([f"  and {len(kept) - 20} more"] if len(kept) > 20 else []),
        "  minimal for the frames of these texts; check it on another one: --text … --keep …",
    ]


def floor_html(floor: Floor, a: Recording, b: Recording) -> str:
    """The page."""
    kind = "bad" if floor.first_overflow is not None else "good"
    rows = [[x.graph, x.node, x.op_type, x.largest, "yes" if x.overflows else ""] for x in floor.loudest]
    top = [
        page.verdict(kind, f"{floor.mode} for {floor.target}: {floor.text}."),
        page.verdict("warn", "Emulated on the CPU, node by node. No Ascend device took part."),
        "<pre>" + escape("\n".join(floor_lines(floor)[1:])) + "</pre>",
    ]
    if floor.kept:
        top.append(page.section("Kept in float32", "<pre>" + escape("\n".join(floor.kept)) + "</pre>"))
    headers = ["graph", "node", "op", "largest |result|", "overflows"]
    top.append(page.section("Largest results (float16 ends at 65504)", page.table(headers, rows)))
    top.append("<h2>Against float32, with the tolerances of float32</h2>")
    title = f"Precision floor: {floor.parity.a.artifacts} in {floor.mode}"
    return to_html(floor.parity, a, b, title, top)
