"""The padded-past hazard: found in the published form of a decode graph, not in the repaired ones.

Each graph here also runs on ONNX Runtime with a past of capacity 5 of which 2 rows are valid: the finding must agree
with whether the unused rows change the result.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from op_patches.readiness import Severity, check_model
from op_patches.targets import Target

TARGET = Target.parse("910B4")
HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
ATTENTION = """
   kt = Transpose <perm = [0, 2, 3, 1]> (key)
   qt = Transpose <perm = [0, 2, 1, 3]> (q)
   raw = MatMul (qt, kt)
   {mask}
   p = Softmax <axis = -1> (scores)
   vt = Transpose <perm = [0, 2, 1, 3]> (value)
   y = MatMul (p, vt)
"""
HEAD = """g (float[B,1,2,4] q, float[B,1,2,4] k, float[B,1,2,4] v, float[B,P,2,4] past_k, float[B,P,2,4] past_v,
   int32[B] length) => (float[B,2,1,4] y, float[B,T,2,4] key, float[B,T,2,4] value)
   <int64 zero = {0}, int64 one = {1}, int64[1] a0 = {0}, int64[1] a1 = {1}, int64[2] a12 = {1, 2}, float low = {-1e4}>
"""
JOIN = "key = Concat <axis = 1> (past_k, k)  value = Concat <axis = 1> (past_v, v)"
# As the published exporter writes it: position < length + 1 over all keys.
POSITIONS = """
   shape = Shape (key)  total = Gather (shape, one)  range = Range (zero, total, one)  pos = Unsqueeze (range, a0)
   long = Cast <to = 7> (length)
"""
BY_LENGTH = (
    POSITIONS
    + """
   limit = Add (long, one)  limit2 = Unsqueeze (limit, a1)  keep = Less (pos, limit2)
   keep4 = Unsqueeze (keep, a12)  drop = Not (keep4)  scores = Where (drop, low, raw)
"""
)
# Repaired: the new key sits at the last position.
NEW_KEY_APART = (
    POSITIONS
    + """
   length2 = Unsqueeze (long, a1)  old = Less (pos, length2)
   last = Sub (total, one)  new = Equal (pos, last)  keep = Or (old, new)
   keep4 = Unsqueeze (keep, a12)  drop = Not (keep4)  scores = Where (drop, low, raw)
"""
)
# Repaired: a mask of the past only, joined with a column for the new key.
MASKS_JOINED = """
   pshape = Shape (past_k)  size = Gather (pshape, one)  range = Range (zero, size, one)  pos = Unsqueeze (range, a0)
   long = Cast <to = 7> (length)  length2 = Unsqueeze (long, a1)  old = Less (pos, length2)
   self = GreaterOrEqual (length2, length2)  keep = Concat <axis = 1> (old, self)
   keep4 = Unsqueeze (keep, a12)  drop = Not (keep4)  scores = Where (drop, low, raw)
"""


def _model(mask: str) -> onnx.ModelProto:
    body = "{" + JOIN + ATTENTION.format(mask=mask) + "}"
    model = onnx.parser.parse_model(HEADER + HEAD + body)
    onnx.checker.check_model(model, full_check=True)
    return model


def _padding_matters(model: onnx.ModelProto) -> bool:
    """Whether the content of unused past rows, or their number, changes the attention output."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    feeds = {name: draw(1, 1, 2, 4) for name in ("q", "k", "v")}
    past = {name: draw(1, 2, 2, 4) for name in ("past_k", "past_v")}
    padded = {name: np.concatenate([rows, draw(1, 3, 2, 4)], axis=1) for name, rows in past.items()}
    length = np.array([2], np.int32)
    (exact,) = session.run(["y"], {**feeds, **past, "length": length})
    (filled,) = session.run(["y"], {**feeds, **padded, "length": length})
    return not np.allclose(exact, filled, atol=1e-5)


PAST = {name: [1, 5, 2, 4] for name in ("past_k", "past_v")}
SHAPES = PAST | {name: [1, 1, 2, 4] for name in "qkv"} | {"length": [1]}


@pytest.mark.parametrize(
    ("mask", "wrong"),
    [(BY_LENGTH, True), (NEW_KEY_APART, False), (MASKS_JOINED, False)],
    ids=["length", "apart", "joined"],
)
def test_the_finding_agrees_with_what_onnx_runtime_computes(mask: str, wrong: bool) -> None:
    model = _model(mask)
    assert _padding_matters(model) is wrong
    found = [f for f in check_model(model, TARGET, SHAPES).findings if f.rule == "hazard.padded-past"]
    assert [f.severity for f in found] == ([Severity.WRONG] if wrong else [])


def test_an_open_past_is_found_too_because_atc_compiles_it_at_a_number() -> None:
    (found,) = (f for f in check_model(_model(BY_LENGTH), TARGET).findings if f.rule == "hazard.padded-past")
    assert found.severity is Severity.WRONG and "on its open axis" in found.message


def test_the_hazard_survives_the_simplifier_which_turns_range_into_a_constant() -> None:
    folded = "pos = Constant <value: tensor = int64[1,6] {0, 1, 2, 3, 4, 5}> ()  long = Cast <to = 7> (length)"
    mask = folded + BY_LENGTH.replace(POSITIONS, "")
    head = HEAD.replace("P,", "5,").replace("T,", "6,").replace("B", "1")
    body = "{" + JOIN + ATTENTION.format(mask=mask) + "}"
    model = onnx.parser.parse_model(HEADER + head + body)
    onnx.checker.check_model(model, full_check=True)
    assert "hazard.padded-past" in {f.rule for f in check_model(model, TARGET).blocking}


def test_a_mask_that_is_a_graph_input_is_no_hazard() -> None:
    text = HEAD.replace("int32[B] length)", "float[B, T] bias)") + "{" + JOIN
    mask = "bias4 = Unsqueeze (bias, a12)  scores = Add (raw, bias4)"
    text += ATTENTION.format(mask=mask) + "}"
    model = onnx.parser.parse_model(HEADER + text)
    onnx.checker.check_model(model, full_check=True)
    assert all(f.rule != "hazard.padded-past" for f in check_model(model, TARGET, PAST).findings)
