"""The words of a parity report: verdicts, stages, and what was found where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from runtime.compare import FLOAT32_SAME_MATH, Metrics, Tolerance


class Verdict(str, Enum):
    """What a comparison says. NOT_MEASURED and ERROR are never a pass."""

    EXACT = "EXACT"  # the same bits
    WITHIN_TOLERANCE = "WITHIN_TOLERANCE"
    NEAR_TIE = "NEAR_TIE"  # the first different code was a tie within the margin, on both sides
    NOT_MEASURED = "NOT_MEASURED"  # nothing was there to compare, or it proves nothing
    DIVERGENT = "DIVERGENT"
    ERROR = "ERROR"  # one side lacks what the other has, or failed

    @property
    def agrees(self) -> bool:
        return self in (Verdict.EXACT, Verdict.WITHIN_TOLERANCE, Verdict.NEAR_TIE)

    @property
    def exit_code(self) -> int:
        """0 agreement, 1 divergence, 2 could not compare."""
        return 0 if self.agrees else 1 if self is Verdict.DIVERGENT else 2


_ORDER = tuple(Verdict)  # from best to worst, but a divergence that was found counts more than a stage that is missing


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of the whole; of nothing, NOT_MEASURED."""
    return max(verdicts, key=_ORDER.index, default=Verdict.NOT_MEASURED)


@dataclass(frozen=True, slots=True)
class Limits:
    """What still counts as agreement."""

    hidden: Tolerance
    logits: Tolerance
    waveform: Tolerance
    tie_margin: float  # in logits: how far the first choice may lead the other side's choice, on both sides
    source: str
    reference_share: float = 1.0  # smallest share of equal reference codes


# ONNX Runtime against PyTorch, full size, 28 frames: 2.2e-6 on hidden states below 0.4, 3.0e-5 on cache rows below 10,
# 5.6e-5 on logits below 18 (docs/parity.md). The bounds leave about ten times that to another order of sums.
FLOAT32_LIMITS = Limits(
    hidden=Tolerance(5e-5, 2e-5, "float32 through 12 layers and the cache"),
    logits=Tolerance(5e-5, 2e-5, "float32 through 12 layers, the cache and the local transformer"),
    waveform=Tolerance(FLOAT32_SAME_MATH.atol, 5e-5, "float32 through the whole codec"),
    tie_margin=1e-3,
    source="float32 on both sides",
)


@dataclass(frozen=True, slots=True)
class CodeDifference:
    """The first choice in which the two sides part. Scores are logits after the repetition penalty."""

    frame: int
    codebook: int | None  # None: the decision whether a frame follows; codes are then 1 (frame) and 0 (end)
    a_code: int
    b_code: int
    a_scores: tuple[float, float]  # of a_code and of b_code, on side a
    b_scores: tuple[float, float]  # the same two codes on side b
    a_follows: bool  # a's choice follows from a's logits under the sampling rule
    b_follows: bool
    logit_gap: float  # largest |a - b| over the logits of this choice
    tie: bool

    @property
    def a_margin(self) -> float:
        """By how much a prefers its own choice to b's."""
        return self.a_scores[0] - self.a_scores[1]

    @property
    def b_margin(self) -> float:
        return self.b_scores[1] - self.b_scores[0]

    @property
    def where(self) -> str:
        part = "the end decision" if self.codebook is None else f"codebook {self.codebook}"
        return f"frame {self.frame}, {part}"

    def __str__(self) -> str:
        return (
            f"{self.where}: a chose {self.a_code} ({self.a_scores[0]:.6g} against {self.a_scores[1]:.6g}, margin "
            f"{self.a_margin:.3g}), b chose {self.b_code} ({self.b_scores[1]:.6g} against {self.b_scores[0]:.6g}, "
            f"margin {self.b_margin:.3g})"
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the path from text to waveform."""

    name: str
    verdict: Verdict
    text: str
    metrics: Metrics | None = None
    allowed: float | None = None  # largest |difference| that passes, here
    passing: float | None = None  # the absolute tolerance that would have passed; None when none would
    frame: int | None = None  # where it first went wrong
    codebook: int | None = None
    share: float | None = None  # of equal codes, where codes are compared


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of generating on both sides: greedy, seeded, or replay (both sides are fed a's codes)."""

    name: str
    verdict: Verdict
    text: str
    frames: tuple[int, int] = (0, 0)
    same_codes: int = 0  # equal codes of `compared`
    compared: int = 0
    per_codebook: tuple[float, ...] = ()  # share of equal codes
    first: CodeDifference | None = None
    num_ties: int = 0  # replay: frames whose first difference is a tie
    num_divergent: int = 0  # replay: frames whose first difference is not

    @property
    def agreement(self) -> float | None:
        return self.same_codes / self.compared if self.compared else None


@dataclass(frozen=True, slots=True)
class Growth:
    """Whether the error of the hidden state grows with the position."""

    verdict: Verdict
    text: str
    slope: float | None = None  # of the relative error, per frame
    per_frame: tuple[float, ...] = field(default=())  # relative error of each frame's hidden state


@dataclass(frozen=True, slots=True)
class Cause:
    """A guess, with what speaks for it."""

    kind: str
    text: str
    evidence: str
