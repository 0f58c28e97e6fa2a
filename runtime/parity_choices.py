"""Why two sides chose different codes: the scores of both choices on both sides, and whether it was a tie.

Greedy: a tie when each side's own choice leads the other's by no more than the margin, on both sides.
Seeded: the choice also turns on the uniform number. It is a tie when both choices follow from their own logits by the
sampling rule (runtime/sampling.py is the reference) and the logits differ by no more than the margin.
A choice that does not follow from its own logits is never a tie: another seed, or another sampling rule, made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.parity_record import Trace
from runtime.parity_verdict import CodeDifference
from runtime.sampling import SamplingParams, choose_code, decide_slot, draw_uniforms

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rule:
    """How codes are chosen in one mode, and when a difference is a tie."""

    sampling: SamplingParams
    seed: int
    tie_margin: float


def differences(a: Trace, b: Trace, rule: Rule, fed: Ints | None) -> Iterator[CodeDifference]:
    """The first difference of each frame, in order. Without `fed` codes (free running) only the very first one.

    `fed` are the codes that count as seen in a replay; a free run has seen its own codes.
    """
    n_vq = a.codes.shape[1]
    rng = np.random.default_rng(rule.seed)
    seen = np.zeros((n_vq, 0), np.float32)
    if a.code_logits is not None:
        seen = np.zeros(a.code_logits.shape[1:], np.float32)
    for frame in range(min(len(a.codes), len(b.codes))):
        uniforms = draw_uniforms(rng, n_vq)[0]
        found = _slot_difference(a, b, frame, rule, float(uniforms[0]))
        if found is None and (fed is not None or a.go_on[frame]):
            found = _code_difference(a, b, frame, rule, uniforms[1:], seen)
        if found is not None:
            yield found
            if fed is None:
                return
        codes = a.codes[frame] if fed is None else fed[frame]
        used = np.flatnonzero((codes >= 0) & (codes < seen.shape[1]))
        seen[used, codes[used]] = 1


def _slot_difference(a: Trace, b: Trace, frame: int, rule: Rule, u: float) -> CodeDifference | None:
    if a.go_on[frame] == b.go_on[frame]:
        return None
    choices = int(a.go_on[frame]), int(b.go_on[frame])
    if a.slot_logits is None or b.slot_logits is None:
        return _unexplained(frame, None, choices)
    scores = a.slot_logits[frame], b.slot_logits[frame]  # [slot, end]: the choice 1 is index 0
    places = 1 - choices[0], 1 - choices[1]
    follows = [
        bool(np.isfinite(s).all()) and decide_slot(s, u, rule.sampling) == bool(c)
        for s, c in zip(scores, choices, strict=True)
    ]
    return _difference(frame, None, choices, places, scores, (follows[0], follows[1]), rule)


def _code_difference(
    a: Trace, b: Trace, frame: int, rule: Rule, uniforms: Floats, seen: Floats
) -> CodeDifference | None:
    different = np.flatnonzero(a.codes[frame] != b.codes[frame])
    if not len(different):
        return None
    q = int(different[0])
    choices = int(a.codes[frame, q]), int(b.codes[frame, q])
    if a.code_logits is None or b.code_logits is None or not all(0 <= c < seen.shape[1] for c in choices):
        return _unexplained(frame, q, choices)
    logits = a.code_logits[frame, q], b.code_logits[frame, q]
    follows = [
        bool(np.isfinite(x).all()) and choose_code(x, seen[q], float(uniforms[q]), rule.sampling) == c
        for x, c in zip(logits, choices, strict=True)
    ]
    scores = _penalised(logits[0], seen[q], rule), _penalised(logits[1], seen[q], rule)
    return _difference(frame, q, choices, choices, scores, (follows[0], follows[1]), rule)


def _penalised(logits: Floats, seen: Floats, rule: Rule) -> Floats:
    r = np.float32(rule.sampling.repetition_penalty)
    return np.asarray(np.where(seen > 0, np.where(logits < 0, logits * r, logits / r), logits), np.float32)


def _difference(
    frame: int,
    codebook: int | None,
    choices: tuple[int, int],
    places: tuple[int, int],
    scores: tuple[Floats, Floats],
    follows: tuple[bool, bool],
    rule: Rule,
) -> CodeDifference:
    a_scores = float(scores[0][places[0]]), float(scores[0][places[1]])
    b_scores = float(scores[1][places[0]]), float(scores[1][places[1]])
    with np.errstate(invalid="ignore"):  # infinities: NaN is then the right gap
        gap = float(np.abs(scores[0].astype(np.float64) - scores[1].astype(np.float64)).max())
    if rule.sampling.top_k == 1:
        margins = a_scores[0] - a_scores[1], b_scores[1] - b_scores[0]
        tie = all(follows) and max(margins) <= rule.tie_margin
    else:
        tie = all(follows) and gap <= rule.tie_margin
    return CodeDifference(frame, codebook, *choices, a_scores, b_scores, *follows, gap, tie)


def _unexplained(frame: int, codebook: int | None, choices: tuple[int, int]) -> CodeDifference:
    """Logits are missing, or a number is no code at all: a difference that cannot be called a tie."""
    unknown = (float("nan"), float("nan"))
    return CodeDifference(frame, codebook, *choices, unknown, unknown, True, True, float("nan"), False)
