"""What the checker says: findings in the order ATC would meet them, and how many nodes each engine runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from op_patches.targets import Certainty, Engine, Target


class Severity(Enum):
    """How bad a finding is. The first four are blocking: no .om, or an .om that computes something else."""

    REFUSED = "refused by the parser"
    FAILS = "fails after the parser"
    NO_KERNEL = "no kernel"
    WRONG = "silent wrong result"
    AICPU = "falls back to AICPU"
    PRECISION = "precision risk"
    SLOW = "slow"
    NOTE = "note"

    @property
    def blocking(self) -> bool:
        return self in (Severity.REFUSED, Severity.FAILS, Severity.NO_KERNEL, Severity.WRONG)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that ATC would say, or would not say although it should."""

    severity: Severity
    rule: str  # a stable name, "parser.not-registered"
    node: str  # as ATC prints it; "" for the whole graph
    op_type: str
    message: str
    fix: str  # what to change in the graph, or in the command
    source: str
    certainty: Certainty
    code: str = ""  # the code ATC would print; "" when it prints none
    lowering: str | None = None  # the lowering of op_patches that makes the change

    def to_dict(self) -> dict[str, Any]:
        return {
            "severity": self.severity.value,
            "blocking": self.severity.blocking,
            "code": self.code,
            "rule": self.rule,
            "node": self.node,
            "op_type": self.op_type,
            "message": self.message,
            "fix": self.fix,
            "lowering": self.lowering,
            "source": self.source,
            "certainty": self.certainty.value,
        }


@dataclass(frozen=True, slots=True)
class ReadinessReport:
    """The answer of `check_model` for one graph and one target."""

    graph: str
    target: Target
    findings: tuple[Finding, ...]
    engines: Mapping[Engine, int]  # nodes per engine, constants not counted
    num_nodes: int
    remarks: tuple[str, ...] = field(default=())  # what could not be looked at, and why

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity.blocking)

    @property
    def first_refusal(self) -> Finding | None:
        """The finding at which the parser would stop."""
        return next((f for f in self.findings if f.severity is Severity.REFUSED), None)

    @property
    def ready(self) -> bool:
        return not self.blocking

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity is severity)

    def to_dict(self) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "target": str(self.target),
            "ready": self.ready,
            "nodes": self.num_nodes,
            "engines": {engine.value: self.engines.get(engine, 0) for engine in Engine},
            "findings": [finding.to_dict() for finding in self.findings],
            "remarks": list(self.remarks),
        }


def summary_line(report: ReadinessReport) -> str:
    """Say the verdict, the engines and the findings in one line."""
    verdict = "ready" if report.ready else f"NOT ready ({len(report.blocking)} blocking)"
    engines = ", ".join(
        f"{report.engines[engine]} {name}" for engine, name in ENGINE_NAMES.items() if report.engines.get(engine)
    )
    others = ", ".join(
        f"{len(report.of(severity))} {severity.value}"
        for severity in (Severity.AICPU, Severity.PRECISION, Severity.SLOW)
        if report.of(severity)
    )
    return f"{report.graph}: {verdict} for {report.target}; {report.num_nodes} nodes: {engines or 'none'}" + (
        f"; {others}" if others else ""
    )


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Findings that differ in the node alone; people read these, machines read the single ones."""

    first: Finding
    nodes: tuple[str, ...]


def grouped(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Group findings of one kind, in the order in which each kind appears first."""
    kinds: dict[tuple[object, ...], list[Finding]] = {}
    for f in findings:
        kinds.setdefault((f.severity, f.code, f.rule, f.op_type, f.fix, f.certainty), []).append(f)
    return [FindingGroup(group[0], tuple(f.node for f in group)) for group in kinds.values()]


ENGINE_NAMES = {
    Engine.AICORE: "on AICore",
    Engine.AICPU: "on AICPU",
    Engine.HOST: "on the host",
    Engine.LOCAL: "without a kernel (GE itself)",
    Engine.NONE: "nowhere",
    Engine.UNKNOWN: "not in the tables",
}
