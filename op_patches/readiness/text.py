"""A report for people: lines for the terminal, and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from op_patches.readiness.report import (
    ENGINE_NAMES,
    Finding,
    FindingGroup,
    ReadinessReport,
    Severity,
    grouped,
    summary_line,
)
from op_patches.targets import Engine
from runtime import page

_COLORS = {
    Engine.AICORE: "var(--good)",
    Engine.LOCAL: "var(--line)",
    Engine.AICPU: "var(--warn)",
    Engine.HOST: "var(--a)",
    Engine.NONE: "var(--bad)",
    Engine.UNKNOWN: "var(--dim)",
}
_NODES_SHOWN = 4


def report_lines(report: ReadinessReport, notes: bool = False) -> Iterator[str]:
    """The verdict, then each kind of finding once with its nodes, its fix and its source."""
    yield summary_line(report)
    hidden = 0
    for group in grouped(report.findings):
        finding = group.first
        if finding.severity is Severity.NOTE and not notes:
            hidden += len(group.nodes)
            continue
        count = f"{len(group.nodes)} × {finding.op_type}" if finding.op_type else "graph"
        yield f"  {_mark(finding)} {finding.severity.value}{_code(finding)}, {count}: {finding.message}"
        if any(group.nodes):
            yield f"      at: {_nodes(group)}"
        yield f"      fix: {finding.fix}{_lowering(finding)}"
        yield f"      source: {finding.source} ({finding.certainty.value})"
    yield from (f"  remark: {remark}" for remark in report.remarks)
    if hidden:
        yield f"  {hidden} notes are not shown; --notes shows them"


def html_page(reports: Sequence[ReadinessReport]) -> str:
    """The verdict first, then per graph: engines, findings, what to do."""
    failing = [report for report in reports if not report.ready]
    target = reports[0].target
    if not failing:
        head = page.verdict("good", f"Ready for {target}: no blocking finding in {_graphs(len(reports))}.")
    else:
        blocking = sum(len(report.blocking) for report in failing)
        found = f"{blocking} blocking findings in {_graphs(len(failing))} of {len(reports)}"
        head = page.verdict("bad", f"Not ready for {target}: {found}.")
    note = page.paragraph(
        "Predicted from tables and rules read in public sources; nothing ran on a device. Each finding says its source."
    )
    return page.page("Readiness", head, note, *(_section(report) for report in reports))


def _section(report: ReadinessReport) -> str:
    parts = [_verdict(report), _engines(report), _findings(report)]
    if report.remarks:
        parts.append("<ul>" + "".join(f"<li>{escape(remark)}</li>" for remark in report.remarks) + "</ul>")
    return page.section(report.graph, *parts)


def _verdict(report: ReadinessReport) -> str:
    if report.ready:
        return page.verdict("good", "No blocking finding.")
    first = report.first_refusal or report.blocking[0]
    stop = "The parser stops at" if first is report.first_refusal else "The first is"
    return page.verdict("bad", f"{len(report.blocking)} blocking. {stop} {first.code or first.rule}: {first.message}")


def _engines(report: ReadinessReport) -> str:
    """A bar of the nodes per engine, and its legend with the numbers."""
    counts = [(engine, report.engines.get(engine, 0)) for engine in ENGINE_NAMES]
    total = max(sum(count for _, count in counts), 1)
    bars, legend, left = [], [], 0.0
    for engine, count in counts:
        if not count:
            continue
        width = 900 * count / total
        bars.append(f"<rect x='{left:.2f}' width='{width:.2f}' height='14' fill='{_COLORS[engine]}'/>")
        left += width
        legend.append(
            f"<span style='display:inline-block;width:.8em;height:.8em;background:{_COLORS[engine]}'></span>"
            f" <b>{count}</b> {escape(ENGINE_NAMES[engine])}"
        )
    bar = f"<svg viewBox='0 0 900 14' role='img' aria-label='nodes per engine'>{''.join(bars)}</svg>"
    return f"<p>{report.num_nodes} nodes: {' &nbsp; '.join(legend)}</p>{bar}"


def _findings(report: ReadinessReport) -> str:
    groups = grouped(report.findings)
    if not groups:
        return page.paragraph("No findings.")
    columns = "".join(f"<col style='width:{width}%'>" for width in (13, 22, 37, 28))
    head = "".join(f"<th>{name}</th>" for name in ("Severity", "Where", "What ATC says, or does not say", "Fix"))
    style = "table-layout:fixed;overflow-wrap:anywhere"
    return f"<table style='{style}'>{columns}<tr>{head}</tr>\n" + "\n".join(map(_row, groups)) + "</table>"


def _row(group: FindingGroup) -> str:
    finding = group.first
    quiet = finding.severity is Severity.NOTE
    kind = "bad" if finding.severity.blocking else "dim" if quiet else "warn"
    count = f"{len(group.nodes)} × {escape(finding.op_type)}" if finding.op_type else "the graph"
    names = "".join(f"<br><code>{escape(node)}</code>" for node in group.nodes[:_NODES_SHOWN] if node)
    more = f"<br>and {len(group.nodes) - _NODES_SHOWN} more" if len(group.nodes) > _NODES_SHOWN else ""
    code = f"<br><code>{escape(finding.code)}</code>" if finding.code else ""
    lowering = (
        f"<br><span class='dim'>lowering <code>{escape(finding.lowering)}</code></span>" if finding.lowering else ""
    )
    source = f"<br><small class='dim'>{escape(finding.certainty.value)}: {escape(finding.source)}</small>"
    return (
        f"<tr><td><b class='{kind}'>{escape(finding.severity.value)}</b>{code}</td><td>{count}{names}{more}</td>"
        f"<td>{escape(finding.message)}{source}</td><td>{escape(finding.fix)}{lowering}</td></tr>"
    )


def _graphs(count: int) -> str:
    return f"{count} graph" if count == 1 else f"{count} graphs"


def _mark(finding: Finding) -> str:
    return "!!" if finding.severity.blocking else "--"


def _code(finding: Finding) -> str:
    return f" [{finding.code}]" if finding.code else ""


def _lowering(finding: Finding) -> str:
    return f" (lowering {finding.lowering})" if finding.lowering else ""


def _nodes(group: FindingGroup) -> str:
    shown = ", ".join(group.nodes[:_NODES_SHOWN])
    return shown + (f", … {len(group.nodes) - _NODES_SHOWN} more" if len(group.nodes) > _NODES_SHOWN else "")
