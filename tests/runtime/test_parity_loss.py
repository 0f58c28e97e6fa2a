"""The loss of reduced weights: figures that can be worked out by hand, and the cases in which there is none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from runtime.parity_loss import measure_loss
from runtime.parity_record import Identity, Trace
from runtime.parity_stages import Common
from runtime.parity_verdict import Verdict

FLOAT = Identity("ort", "made", "artifacts/made", True, {}, "aa", "bb", "pytorch", 128, True, False, {})
INT8, INT4 = (dataclasses.replace(FLOAT, cpu_weights=kind) for kind in ("int8", "int4"))
F, Q, V = 6, 2, 4


def trace(logits: list[float], hidden: tuple[float, float] = (3.0, 4.0)) -> Trace:
    codes = np.full((F, Q), int(np.argmax(logits)), np.int32)
    slots = np.tile(np.array([1, -1], np.float32), (F, 1))
    values = np.broadcast_to(np.array(logits, np.float32), (F, Q, V)).copy()
    return Trace(codes, np.ones(F, bool), np.tile(np.array(hidden, np.float32), (F, 1)), slots, values)


def common(a: Trace, b: Trace, counts: np.ndarray | None = None, source: str = "replay of a's codes") -> Common:
    return Common(a, b, F, np.ones((F, Q), bool) if counts is None else counts, True, source)


def test_kl_top1_and_cosine_are_those_worked_out_by_hand() -> None:
    a, b = trace(list(np.log([0.5, 0.25, 0.125, 0.125]))), trace([0.0] * 4, hidden=(4.0, 3.0))
    b.code_logits[:, :, 0] += 1e-6  # the first of four equal ones
    found = measure_loss(FLOAT, INT8, common(a, b))
    assert found is not None
    # 0.5 log 2 + 0.25 log 1 + 2 * 0.125 log 0.5
    assert found.kl_mean == pytest.approx(0.25 * np.log(2), rel=1e-4)
    assert found.kl_p95 == pytest.approx(found.kl_mean)
    assert (found.top1, found.distributions, found.slot_top1, found.slot_kl_mean) == (1.0, F * Q, 1.0, 0.0)
    assert found.hidden_cosine_mean == pytest.approx(24 / 25)
    assert found.verdict is Verdict.DIVERGENT  # 0.17 nats are too many for int8
    assert measure_loss(FLOAT, INT4, common(a, b)).verdict is Verdict.WITHIN_TOLERANCE


def test_too_many_different_first_choices_are_a_divergence_at_any_kl() -> None:
    a, b = trace([0.01, 0.0, 0.0, 0.0]), trace([0.0, 0.01, 0.0, 0.0])
    found = measure_loss(FLOAT, INT8, common(a, b))
    assert found.kl_mean < 1e-3
    assert (found.top1, found.verdict) == (0.0, Verdict.DIVERGENT)


def test_logits_behind_a_different_code_of_the_frame_do_not_count() -> None:
    a, b = trace([1.0, 0.0, 0.0, 0.0]), trace([1.0, 0.0, 0.0, 0.0])
    b.code_logits[2, 1] = [-50, 50, 0, 0]
    counts = np.ones((F, Q), bool)
    counts[2, 1] = False
    found = measure_loss(FLOAT, INT8, common(a, b, counts))
    assert (found.distributions, found.kl_mean, found.top1) == (F * Q - 1, 0.0, 1.0)


def test_sides_of_one_precision_and_free_runs_have_no_loss() -> None:
    a = trace([1.0, 0.0, 0.0, 0.0])
    assert measure_loss(FLOAT, FLOAT, common(a, a)) is None
    assert measure_loss(INT8, INT8, common(a, a)) is None
    assert measure_loss(FLOAT, INT8, common(a, a, source="greedy runs up to the first different choice")) is None
    assert measure_loss(INT8, INT4, common(a, a)).text.startswith("int8 against int4 weights")


def test_values_that_are_missing_or_no_numbers_have_no_loss() -> None:
    a, b = trace([1.0, 0.0, 0.0, 0.0]), trace([1.0, 0.0, 0.0, 0.0])
    b.code_logits[0, 0, 0] = np.nan
    assert measure_loss(FLOAT, INT8, common(a, b)) is None
    assert measure_loss(FLOAT, INT8, common(a, dataclasses.replace(a, hidden=None))) is None
