"""The precision floor: what the best device result could be, measured on the CPU with a mode's roundings.

The floor is a parity (runtime/parity.py) of float32 against the rounded graphs, on the same text. What lies below it no
device can reach in that mode; what reaches it cannot be blamed on the device. The graphs are rounded by
op_patches/precision.py; this module only runs them, and searches what has to stay float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime.backends.ort import OrtBackend, OrtSession
from runtime.frame_model import HostFrameModel
from runtime.manifest import Manifest
from runtime.parity import Parity, compare, plain_numbers
from runtime.parity_record import GREEDY, Plan, Recording, record, run_frames
from runtime.parity_verdict import FLOAT32_LIMITS
from runtime.spec import Array, GraphSpec
from runtime.synthesizer import open_synthesizer

FORMAT = "moss-precision-1"
FLOOR_GRAPHS = ("prefill", "frame", "step_frame", "codec_encode", "codec_stream")
SEARCH_GRAPHS = ("prefill", "frame", "step_frame")
Report = Callable[[str], None]


class NodeValues(Protocol):
    """What one node computed; op_patches.precision.NodeRange is one."""

    @property
    def node(self) -> str: ...
    @property
    def op_type(self) -> str: ...
    @property
    def largest(self) -> float: ...
    @property
    def overflows(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Loudest:
    """One node of the overflow table."""

    graph: str
    node: str
    op_type: str
    largest: float
    overflows: bool


@dataclass(frozen=True, slots=True)
class Margins:
    """By how much float32's chosen code leads the next one, and by how much the mode moves logits."""

    smallest_lead: float
    median_lead: float
    largest_logit_error: float | None  # over the codes that can be compared
    leads_below_error: int  # choices whose lead is below twice that error: any device may decide them differently
    of_choices: int


@dataclass(frozen=True, slots=True)
class Floor:
    """The result of run-om precision."""

    mode: str
    target: str
    kept: tuple[str, ...]  # lines of the keep list that was in force
    parity: Parity
    margins: Margins | None
    first_overflow: Loudest | None
    loudest: tuple[Loudest, ...]  # nodes with the largest results
    search: Search | None = None

    @property
    def code_agreement(self) -> float | None:
        """Share of float32's codes that the mode chooses again when it is fed float32's codes."""
        return self.parity.mode("replay").agreement

    @property
    def text(self) -> str:
        """The conclusion in one sentence."""
        if self.first_overflow is not None:
            first = self.first_overflow
            return (
                f"{self.mode} overflows, first in {first.graph} at {first.node} "
                f"({first.op_type}, {first.largest:.4g}): "
                "nothing behind it can be trusted"
            )
        agreement = "no code was compared" if self.code_agreement is None else f"{self.code_agreement:.2%} of the codes"
        audio = self.parity.audio
        snr = "no waveform" if audio is None or audio.snr_db is None else f"a waveform SNR of {audio.snr_db:.1f} dB"
        return f"the best that {self.mode} can reach on this text: {agreement} in replay, {snr} from the same codes"

    def to_dict(self) -> dict[str, Any]:
        """As JSON data; `parity` is a whole parity report, which run-om parity --floor takes."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "mode": self.mode,
            "target": self.target,
            "kept": list(self.kept),
            "text": self.text,
            "code_agreement": self.code_agreement,
            "margins": dataclasses.asdict(self.margins) if self.margins else None,
            "first_overflow": dataclasses.asdict(self.first_overflow) if self.first_overflow else None,
            "loudest": [dataclasses.asdict(x) for x in self.loudest],
            "search": dataclasses.asdict(self.search) if self.search else None,
            "parity": self.parity.to_dict(),
        }
        plain: dict[str, Any] = plain_numbers(data)
        return plain


class CapturingBackend(OrtBackend):
    """ONNX Runtime that remembers what each graph was fed last."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.feeds: dict[str, dict[str, Array]] = {}

    def open(self, spec: GraphSpec, path: Path) -> OrtSession:
        session = super().open(spec, path)
        run = session.run

        def capturing(feeds: Mapping[str, Array]) -> dict[str, Array]:
            self.feeds[spec.name] = {name: np.array(value) for name, value in feeds.items()}
            return run(feeds)

        session.run = capturing  # type: ignore[method-assign]  # this one session, not the class
        return session


def record_reference(
    manifest: Manifest, plan: Plan, threads: int | None = None
) -> tuple[Recording, dict[str, dict[str, Array]]]:
    """The float32 side, and what each graph was fed last."""
    backend = CapturingBackend(threads)
    with open_synthesizer(manifest, backend) as synthesizer:
        return record(synthesizer, backend, plan), backend.feeds


def measure_floor(
    reference: Recording, reduced: Manifest, threads: int | None = None, command: str = ""
) -> tuple[Parity, Recording]:
    """Float32 against the rounded graphs."""
    backend = OrtBackend(threads)
    with open_synthesizer(reduced, backend) as synthesizer:
        rounded = record(synthesizer, backend, reference.plan, reference)
    return compare(reference, rounded, FLOAT32_LIMITS, command=command), rounded


def build_floor(
    reference: Recording,
    reduced: Manifest,
    mode: str,
    target: str,
    kept: tuple[str, ...],
    ranges: Mapping[str, Iterable[NodeValues]],
    search: Search | None = None,
    threads: int | None = None,
    command: str = "",
) -> tuple[Floor, Recording]:
    """Measure, and put together what the reports show; also the recording of the rounded side."""
    parity, rounded = measure_floor(reference, reduced, threads, command)
    first, loudest = loudest_nodes(ranges)
    margins = code_margins(reference, parity)
    return Floor(mode, target, kept, parity, margins, first, tuple(loudest), search), rounded


def code_margins(reference: Recording, parity: Parity) -> Margins | None:
    """The leads of the greedy choices in the replay, against the error of the logits."""
    logits = reference.traces["replay"].code_logits
    if logits is None or not logits.size or not np.isfinite(logits).all():
        return None
    best = np.partition(logits, -2, axis=-1)[..., -2:]
    leads = best[..., 1] - best[..., 0]
    metrics = parity.stage("code logits").metrics
    error = metrics.max_abs if metrics is not None else None
    below = int((leads < 2 * error).sum()) if error is not None else 0
    return Margins(float(leads.min()), float(np.median(leads)), error, below, int(leads.size))


def loudest_nodes(ranges: Mapping[str, Iterable[NodeValues]], count: int = 12) -> tuple[Loudest | None, list[Loudest]]:
    """The first node that overflows, in the order in which an utterance runs them, and the largest results of all."""
    found = [Loudest(graph, r.node, r.op_type, r.largest, r.overflows) for graph, rows in ranges.items() for r in rows]
    first = next((x for x in found if x.overflows), None)
    return first, sorted(found, key=lambda x: -x.largest)[:count]


# -- the search for what has to stay float32


@dataclass(frozen=True, slots=True)
class Search:
    """What has to stay float32. Minimal: without any one entry the agreement falls below what was asked for."""

    reach: float
    agreement_without: float  # when nothing is kept
    agreement: float
    op_types: tuple[str, ...]
    names: tuple[str, ...]
    num_nodes: int  # nodes that stay float32
    of_nodes: int  # nodes that the mode reduces
    evaluations: int
    complete: bool  # False: the search stopped at its limit of evaluations, the set may be larger than needed


Evaluate = Callable[[frozenset[str], frozenset[str]], float]  # (names, op types) kept -> agreement


def replay_agreement(references: Sequence[Recording], reduced: Manifest, threads: int | None = None) -> float:
    """Share of the references' codes that the rounded graphs choose again when fed them; 0 where they break."""
    model = HostFrameModel(reduced, OrtBackend(threads))
    equal = total = 0
    try:
        for reference in references:
            fed, seed = reference.replay_codes, reference.plan.seed
            trace = run_frames(model, reference.replay_rows, GREEDY, seed, len(fed), fed)
            if trace.code_logits is None or not np.isfinite(trace.code_logits).all():
                return 0.0
            expected = reference.traces["replay"].codes
            equal += int((trace.codes == expected).sum())
            total += expected.size
    finally:
        model.close()
    return equal / total if total else 0.0


def search_keep(
    nodes: Mapping[str, set[str]], evaluate: Evaluate, reach: float, limit: int, report: Report = lambda line: None
) -> Search:
    """Find a minimal set of op types, then of nodes of those types, that reaches an agreement when kept in float32.

    First single types, the fewest nodes first; when none suffices, all types, from which the one with the most nodes is
    dropped while the agreement holds. Then the nodes of the types that are left are halved the same way.
    """
    counter = _Counted(evaluate, reach, limit, report)
    without = counter.agreement(frozenset(), frozenset())
    total = sum(len(names) for names in nodes.values())
    if without >= reach:
        return Search(reach, without, without, (), (), 0, total, counter.used, True)
    by_size = sorted(nodes, key=lambda t: (len(nodes[t]), t))
    single = next((t for t in by_size if counter.reaches(frozenset(), frozenset({t}))), None)
    types = [single] if single is not None else _drop(by_size[::-1], lambda kept: counter.reaches(frozenset(), kept))
    names = sorted(n for t in types for n in nodes[t])
    smaller = _halve(names, lambda kept: counter.reaches(kept, frozenset()))
    if len(smaller) < len(names):
        agreement = counter.agreement(frozenset(smaller), frozenset())
        return Search(
            reach, without, agreement, (), tuple(smaller), len(smaller), total, counter.used, counter.complete
        )
    agreement = counter.agreement(frozenset(), frozenset(types))
    kept_types = tuple(sorted(types))
    return Search(reach, without, agreement, kept_types, (), len(names), total, counter.used, counter.complete)


class _Counted:
    """Evaluates, remembers, and stops at the limit: then a set counts as not reaching."""

    def __init__(self, evaluate: Evaluate, reach: float, limit: int, report: Report) -> None:
        self.used, self.complete = 0, True
        self._evaluate, self._reach, self._limit, self._report = evaluate, reach, limit, report
        self._known: dict[tuple[frozenset[str], frozenset[str]], float] = {}

    def agreement(self, names: frozenset[str], types: frozenset[str]) -> float:
        key = (names, types)
        if key not in self._known:
            self.used += 1
            self._known[key] = self._evaluate(names, types)
            kept = ", ".join(sorted(types)) or f"{len(names)} nodes"
            self._report(f"{self.used}: {kept} in float32: {self._known[key]:.2%} of the codes agree")
        return self._known[key]

    def reaches(self, names: frozenset[str], types: frozenset[str]) -> bool:
        if (names, types) not in self._known and self.used >= self._limit:
            self.complete = False
            return False
        return self.agreement(names, types) >= self._reach


def _drop(items: list[str], reaches: Callable[[frozenset[str]], bool]) -> list[str]:
    """Drop single items, in the given order, as long as the rest reaches; until no item can go."""
    kept = list(items)
    changed = True
    while changed:
        changed = False
        for item in list(kept):
            rest = frozenset(x for x in kept if x != item)
            if rest and reaches(rest):
                kept.remove(item)
                changed = True
    return kept


def _halve(items: list[str], reaches: Callable[[frozenset[str]], bool]) -> list[str]:
    """Drop pieces, halves first and single items last (delta debugging); minimal unless the search was cut off."""
    kept, size = list(items), max(len(items) // 2, 1)
    while kept:
        dropped = False
        start = 0
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if rest and reaches(frozenset(rest)):
                kept, dropped = rest, True
            else:
                start += size
        if size == 1 and not dropped:
            break
        size = size if dropped and size == 1 else max(size // 2, 1)
    return kept
