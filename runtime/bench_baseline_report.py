"""Our loop beside the official one, for people: lines for the terminal, one HTML page."""

from __future__ import annotations

import os

from runtime.bench_baseline import OURS, BaselineResult, SideResult
from runtime.bench_report import BUSY
from runtime.manifest import MADE_UP_NOTICE
from runtime.page import page, paragraph, section, table, verdict

_UNITS = {"prefill": "ms", "frame": "ms per frame", "encode": "ms"}


def as_text(r: BaselineResult) -> str:
    """A row per figure, a column per side, and how many times better ours is."""
    headers, rows = _table(r)
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    lines = [_what(r), ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
              for row in [headers, *rows]]  # fmt: skip
    return "\n".join([*lines, "", *(f"note: {note}" for note in _notes(r))])


def as_html(r: BaselineResult) -> str:
    """The same as a page."""
    headers, rows = _table(r)
    same = all(side.codes == r.sides[0].codes for side in r.sides)
    ratios = ", ".join(f"{r.ratio(side, 'frame'):.2f} x against the {side.name}" for side in r.sides[1:])
    return page(
        f"Bench: {r.artifacts} beside the official loop",
        verdict("good" if same else "bad", f"frames: {ratios}; {'the same codes' if same else 'the codes DIFFER'}"),
        *(paragraph(note) for note in _notes(r)),
        section("Side by side", table(headers, rows, "x: how many times better ours is; medians of the repeats")),
    )


def _table(r: BaselineResult) -> tuple[list[str], list[list[str]]]:
    ours, *others = r.sides
    headers = ["figure", OURS]
    for other in others:
        headers += [other.name, "x"]

    def row(name: str, value: str, of_others: list[tuple[str, float]]) -> list[str]:
        return [name, value, *(cell for text, ratio in of_others for cell in (text, f"{ratio:.2f}"))]

    rows = [
        row("frames/s", f"{ours.frames_per_second:.2f}",
            [(f"{o.frames_per_second:.2f}", r.ratio(o, "frame")) for o in others]),
        *(
            row(f"{stage}, {_UNITS.get(stage, 'ms per frame' if stage.startswith('stream') else 'ms')}", f"{ms:.2f}",
                [(f"{o.milliseconds[stage]:.2f}", r.ratio(o, stage)) for o in others])
            for stage, ms in ours.milliseconds.items()
        ),
        row("load of all sessions, s", f"{ours.load_seconds:.2f}",
            [(f"{o.load_seconds:.2f}", o.load_seconds / ours.load_seconds) for o in others]),
        row("peak RSS without codec, MiB", _mib(ours.llm_peak_rss_bytes),
            [(_mib(o.llm_peak_rss_bytes), o.llm_peak_rss_bytes / ours.llm_peak_rss_bytes) for o in others]),
        row("peak RSS, MiB", _mib(ours.peak_rss_bytes),
            [(_mib(o.peak_rss_bytes), o.peak_rss_bytes / ours.peak_rss_bytes) for o in others]),
    ]  # fmt: skip
    rows.append(["same codes", "", *(cell for o in others for cell in (_same(o, ours), ""))])
    return headers, rows


def _same(side: SideResult, ours: SideResult) -> str:
    return "yes" if side.codes == ours.codes else "NO"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f}"


def _what(r: BaselineResult) -> str:
    p = r.protocol
    return (
        f"{r.artifacts} beside {r.package}: {p.prompt_rows} prompt rows, {p.frames} frames, "
        f"{'greedy' if p.greedy else 'sampled'}, {p.repeat} repeats in turn, threads: {r.threads or 'not said'}"
    )


def _notes(r: BaselineResult) -> list[str]:
    found = ["each side is a process of its own; the package runs its graphs with the semantics of the official loop"]
    if r.made_up:
        found.append(MADE_UP_NOTICE + "; times do not depend on the values")
    cores = os.cpu_count() or 1
    if max(r.load_averages) / cores > BUSY + (r.threads or cores) / cores:
        found.append(f"the machine was busy (load average {r.load_averages[0]:.1f} to {r.load_averages[1]:.1f})")
    return found
