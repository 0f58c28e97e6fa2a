"""A bench result for people: lines for the terminal, one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.bench import BenchResult, Stage
from runtime.manifest import MADE_UP_NOTICE
from runtime.page import page, paragraph, section, table, verdict

BUSY = 0.5  # load average per core above which wall clock figures say little


def as_text(r: BenchResult) -> str:
    """The figures, and what limits them."""
    lines = [_what(r), ""]
    lines.append(f"{'stage':<16}{'calls':>7}{'median ms':>12}{'p95 ms':>10}{'share':>8}{'limit ms':>10}{'reached':>9}")
    lines += [
        f"{s.name:<16}{s.calls:>7}{s.median_ms:>12.2f}{s.p95_ms:>10.2f}{s.share:>8.1%}{limit:>10}{reached:>9}"
        for s in r.stages
        for limit, reached in [_limit(s)]
    ]
    lines += ["", *(f"{name:<30}{value}" for name, value in figures(r)), ""]
    lines += [f"note: {note}" for note in notes(r)]
    return "\n".join(lines).rstrip()


def as_html(r: BenchResult) -> str:
    """The same as a page, with the plot of the step time against the cache length."""
    stages = [(s.name, s.calls, s.median_ms, s.p95_ms, f"{s.share:.1%}", *_limit(s)) for s in r.stages]
    reads = [(b.graph, b.weights_distinct / 1e6, b.weights_read / 1e6, b.cache / 1e6) for b in r.graph_bytes]
    parts = [
        verdict("good" if r.rtf < 1 else "warn", f"{r.frames_per_second:.2f} frames/s, RTF {r.rtf:.3f}: {_what(r)}"),
        *(paragraph(note) for note in notes(r)),
        section("Figures", table(("figure", "value"), figures(r))),
        section("Stages", table(("stage", "calls", "median ms", "p95 ms", "share", "limit ms", "reached"), stages,
                                  "limit: weights once and cache, at the measured bandwidth; arithmetic may be more")),
        section(
            "Bytes read per call",
            table(("graph", "weights, each once MB", "weights, each use MB", "cache MB"), reads),
        ),
    ]  # fmt: skip
    if r.cache_curve:
        parts.append(
            section(
                "Step time against cache length",
                paragraph("dashed: weights once and cache, at the measured bandwidth"),
                cache_plot(r),
            )
        )
    parts.append(section("Machine", table(("what", "value"), _machine(r))))
    return page(f"Bench: {r.artifacts} on {r.backend}", *parts)


def figures(r: BenchResult) -> list[tuple[str, str]]:
    """Name and value, in the order of interest."""
    roofline = (
        f"{r.roofline_frames_per_second:.1f} frames/s, {r.roofline_share:.0%} of it reached"
        if r.roofline_frames_per_second and r.roofline_share is not None
        else "unknown (needs the package onnx, and a CPU backend)"
    )
    rows = [
        ("frames per second", f"{r.frames_per_second:.2f} (without prefill and codec; real time is 12.5)"),
        ("RTF", f"{r.rtf:.3f} (prefill, frames and codec; below 1 is faster than real time)"),
        ("first audio", f"{r.first_audio_ms:.1f} ms (prefill, one frame, one codec call)"),
        ("CPU time per frame", f"{r.cpu_ms_per_frame:.1f} ms (all threads, prefill and codec included)"),
        ("threads", f"{r.threads_asked or 'not said'} asked, {r.threads_working:.2f} worked (CPU / wall)"),
        ("load", f"{r.load_seconds:.2f} s, warm-up {r.warmup_seconds:.2f} s"),
        ("peak RSS", f"{r.peak_rss_bytes / 2**20:.0f} MiB"),
        ("read bandwidth", f"{r.bandwidth_bytes_per_second / 1e9:.1f} GB/s"),
        ("roofline", roofline),
    ]
    if len(r.cache_curve) > 1:
        first, last = r.cache_curve[0], r.cache_curve[-1]
        slope = 1e3 * (last.milliseconds - first.milliseconds) / (last.rows - first.rows)
        once = 1e6 * (last.cache_bytes - first.cache_bytes) / (last.rows - first.rows) / r.bandwidth_bytes_per_second
        value = f"{slope:.2f} us ({first.rows} to {last.rows} rows); reading the row once takes {once:.2f} us"
        rows.append(("step time per cache row", value))
    return rows


def _limit(stage: Stage) -> tuple[str, str]:
    """The limit of a stage, and how much of it was reached."""
    if stage.limit_ms is None:
        return "–", "–"
    return f"{stage.limit_ms:.2f}", f"{stage.limit_ms / stage.median_ms:.0%}"


def notes(r: BenchResult) -> list[str]:
    """What a reader must know before believing a figure."""
    found = []
    if r.made_up:
        found.append(MADE_UP_NOTICE + "; times do not depend on the values")
    busy = max(r.machine.load_average_before, r.machine.load_average_after) / r.machine.cores
    if busy > BUSY + (r.threads_asked or r.machine.cores) / r.machine.cores:
        found.append(
            f"the machine was busy (load average {r.machine.load_average_before:.1f} to "
            f"{r.machine.load_average_after:.1f} on {r.machine.cores} cores): wall clock figures are too high"
        )
    return found


def cache_plot(r: BenchResult) -> str:
    """Milliseconds over rows as SVG, both axes from zero; dashed: weights once and cache at the measured bandwidth."""
    width, height, left, right, bottom = 900, 300, 60, 60, 30
    points = r.cache_curve
    top_ms = 1.1 * max(p.milliseconds for p in points) or 1.0
    top_rows = max(p.rows for p in points)

    def at(rows: float, ms: float) -> tuple[float, float]:
        return left + (width - left - right) * rows / top_rows, (height - bottom) * (1 - min(ms / top_ms, 1.0))

    def line(spots: Sequence[tuple[float, float]], style: str) -> str:
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        return f"<polyline fill='none' stroke-width='2' {style} points='{where}'/>"

    parts = [f"<path d='M{left} 0V{height - bottom}H{width}' stroke='var(--line)' fill='none'/>"]
    weights = [b.weights_distinct for b in r.graph_bytes if b.graph == points[0].graph]
    for num_bytes in weights:
        limits = [1e3 * (num_bytes + p.cache_bytes) / r.bandwidth_bytes_per_second for p in points]
        spots = [at(p.rows, ms) for p, ms in zip(points, limits, strict=True)]
        parts.append(line(spots, "stroke='var(--dim)' stroke-dasharray='5 4'"))
    spots = [at(p.rows, p.milliseconds) for p in points]
    parts.append(line(spots, "stroke='var(--a)'"))
    for point, (x, y) in zip(points, spots, strict=True):
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='var(--a)'/>")
        parts.append(_label(x, y - 10, f"{point.milliseconds:.1f} ms") + _label(x, height - 10, f"{point.rows} rows"))
    title = f"{points[0].graph}: milliseconds over rows of cache"
    return f"<svg viewBox='0 0 {width} {height}' role='img' aria-label='{title}'>{''.join(parts)}</svg>"


def _label(x: float, y: float, text: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='middle' font-size='12' fill='var(--dim)'>{text}</text>"


def _what(r: BenchResult) -> str:
    p = r.protocol
    return (
        f"{r.artifacts} ({r.weights}) on {r.backend}: {p.prompt_rows} prompt rows, {p.frames} frames, "
        f"{'greedy' if p.greedy else 'sampled'}, {p.repeat} run{'s' * (p.repeat > 1)}"
    )


def _machine(r: BenchResult) -> list[tuple[str, str]]:
    m = r.machine
    return [
        ("CPU", f"{m.cpu}, {m.cores} cores"),
        ("system", m.system),
        ("Python", m.python),
        ("exported with", ", ".join(f"{k} {v}" for k, v in m.versions.items())),
        ("load average", f"{m.load_average_before:.2f} before, {m.load_average_after:.2f} after"),
        ("fixture", r.fixture),
    ]
