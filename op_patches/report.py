"""What a run of lowerings did, as data: per rule the nodes, the measured differences, and the refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class HalfProof:
    """What happens when intermediate results are stored in float16."""

    how: str  # "every intermediate rounded to float16" or which island keeps float32
    cases: int
    overflows: int  # values beyond ±65504 that the original operator's own result does not force
    nans: int
    relative_difference: float  # largest, over the largest |value| of the output


@dataclass(frozen=True, slots=True)
class SiteProof:
    """The numbers of one rewritten site, or of several that are equal in everything that matters."""

    cases: int
    random: float  # largest |difference| on random inputs, in the model's own precision
    extreme: float  # the same on extreme inputs
    relative: float  # the largest of both, over the largest |value| of its output
    half: HalfProof | None  # None where no floating-point value is computed


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """A node that a rule looked at and left alone, with the reason."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"


@dataclass(frozen=True, slots=True)
class LoweredNode:
    """A node that a rule replaced. `proof` is None for a change that computes nothing (a name, an import)."""

    node: str
    op_type: str
    detail: str
    proof: SiteProof | None


@dataclass(frozen=True, slots=True)
class RuleReport:
    """Everything one rule did to one model."""

    rule: str
    lowered: tuple[LoweredNode, ...]
    refused: tuple[RefusedNode, ...]

    @property
    def count(self) -> int:
        return len(self.lowered)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(n.node for n in self.lowered)

    @property
    def max_difference_random(self) -> float | None:
        """Largest float32 difference on random inputs; None when the rule computes nothing."""
        return max((n.proof.random for n in self.lowered if n.proof), default=None)

    @property
    def max_difference_extreme(self) -> float | None:
        return max((n.proof.extreme for n in self.lowered if n.proof), default=None)

    @property
    def max_relative_difference(self) -> float | None:
        """Largest difference over the largest |value| of the same output."""
        return max((n.proof.relative for n in self.lowered if n.proof), default=None)

    @property
    def half(self) -> HalfProof | None:
        """The half-precision proofs of all nodes together."""
        proofs = [n.proof.half for n in self.lowered if n.proof and n.proof.half]
        if not proofs:
            return None
        return HalfProof(
            how="; ".join(dict.fromkeys(p.how for p in proofs)),
            cases=sum(p.cases for p in proofs),
            overflows=sum(p.overflows for p in proofs),
            nans=sum(p.nans for p in proofs),
            relative_difference=max(p.relative_difference for p in proofs),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "count": self.count,
            "max_difference_random": self.max_difference_random,
            "max_difference_extreme": self.max_difference_extreme,
            "max_relative_difference": self.max_relative_difference,
            "half": dataclasses.asdict(self.half) if self.half else None,
            "nodes": [{"node": n.node, "op_type": n.op_type, "detail": n.detail} for n in self.lowered],
            "refused": [dataclasses.asdict(r) for r in self.refused],
        }


@dataclass(frozen=True, slots=True)
class LoweringReport:
    """The report of `apply_lowerings`: rules in the order they ran, then what is left."""

    target: str
    rules: tuple[RuleReport, ...]
    num_nodes_before: int
    num_nodes_after: int
    remaining: tuple[str, ...] = ()  # blocking findings of the readiness check on the result

    @property
    def changed(self) -> bool:
        return any(r.count for r in self.rules)

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes each rule lowered; rules that found nothing are left out."""
        return {r.rule: r.count for r in self.rules if r.count}

    @property
    def refusals(self) -> tuple[RefusedNode, ...]:
        return tuple(refused for r in self.rules for refused in r.refused)

    def rule(self, name: str) -> RuleReport:
        return next((r for r in self.rules if r.rule == name), RuleReport(name, (), ()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "changed": self.changed,
            "num_nodes_before": self.num_nodes_before,
            "num_nodes_after": self.num_nodes_after,
            "rules": [r.to_dict() for r in self.rules if r.count or r.refused],
            "remaining": list(self.remaining),
        }

    def lines(self) -> Iterable[str]:
        """The report as text, one line per rule and per refusal."""
        yield f"target {self.target}: {self.num_nodes_before} -> {self.num_nodes_after} nodes"
        for r in self.rules:
            if r.count:
                yield f"{r.rule:20} {r.count:5} lowered, {_numbers(r)}"
        for r in self.rules:
            for refused in r.refused:
                yield f"{r.rule:20} refused {refused}"
        for finding in self.remaining:
            yield f"remains: {finding}"


def _numbers(report: RuleReport) -> str:
    random, extreme, half = report.max_difference_random, report.max_difference_extreme, report.half
    if random is None or extreme is None:
        return "no arithmetic changed"
    text = f"difference {random:.2g} random, {extreme:.2g} extreme, {report.max_relative_difference:.2g} relative"
    if half:
        text += f"; float16: {half.overflows} overflows, {half.nans} NaN in {half.cases} cases ({half.how})"
    return text
