"""The node cases that ship inside the `onnx` package keep their expected outputs through the lowerings.

Left out: cases whose inputs or outputs are no tensors (sequences, optionals), since a device graph has none; random
numbers; and the *_expanded twins, which spell an operator as the function body that the lowerings write anyway.
"""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np

from op_patches.evaluate import EvaluationError, run_replacement
from op_patches.pipeline import apply_lowerings
from op_patches.targets import Target

# Measured with onnx 1.23.2 and onnxruntime 1.32.0; a new release of either may move them a little.
MIN_KEPT, MIN_LOWERED = 1220, 600
# ONNX Runtime itself differs from the expected outputs here, without any lowering.
BESIDE_THE_POINT = ("the original differs", "not evaluable")


def _cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return [c for c in collect_testcases(None) if "_expanded" not in c.name]


def _agree(want, got):
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if want.dtype.kind in "fc" or want.dtype.name in ("bfloat16", "float16"):
        tolerance = 5e-3 if want.dtype.itemsize == 2 else 2e-4
        return np.allclose(want.astype(np.complex128), got.astype(np.complex128), tolerance, tolerance, equal_nan=True)
    return np.array_equal(want, got)


def _verdict(case, target):
    """kept (untouched), lowered (and kept), beside the point, or what went wrong."""
    if any(node.op_type == "Bernoulli" for node in case.model.graph.node):
        return "random"
    inputs, outputs = case.data_sets[0]
    if not all(isinstance(x, np.ndarray | np.generic) for x in (*inputs, *outputs)):
        return "no tensors"
    patched, report = apply_lowerings(case.model, target)
    feeds = dict(zip((i.name for i in case.model.graph.input), map(np.asarray, inputs), strict=False))
    try:
        results = run_replacement(patched, feeds)
    except EvaluationError:
        results = []
    if len(results) == len(outputs) and all(map(_agree, map(np.asarray, outputs), results)):
        return "lowered" if set(report.counts) - {"names", "opset_imports", "node_order"} else "kept"
    try:
        original = run_replacement(case.model, feeds)
    except EvaluationError:
        return "not evaluable"
    if not all(map(_agree, map(np.asarray, outputs), original)):
        return "the original differs"
    return f"WRONG after {report.counts}"


def test_every_node_case_keeps_its_outputs():
    target = Target.parse("910B4")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        verdicts = {case.name: _verdict(case, target) for case in _cases()}
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict.startswith("WRONG")}
    assert not wrong
    counts = Counter(verdicts.values())
    print(dict(counts))
    assert counts["lowered"] >= MIN_LOWERED
    assert counts["kept"] + counts["lowered"] >= MIN_KEPT
    assert sum(counts[b] for b in BESIDE_THE_POINT) <= 40
