from __future__ import annotations

import numpy as np
import pytest

from op_patches.evaluate import half_run, run_replacement

CAUSAL = """g (float[B,T,8] x) => (float[B,T,T] y)
<int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}, int64[1] first = {0},
 float lowest = {-3.4028235e38}, float o = {0}>
{ shape = Shape (x) t = Gather (shape, one) r = Range (zero, t, one) column = Unsqueeze (r, last)
  row = Unsqueeze (r, first) future = Greater (row, column) mask = Where (future, lowest, o)
  xt = Transpose <perm = [0, 2, 1]> (x) scores = MatMul (x, xt) masked = Add (scores, mask) y = Softmax (masked) }"""


def test_shape_chains_fold_when_the_shapes_are_bound(lower):
    result = lower(CAUSAL, input_shapes={"x": [1, 5, 8]})
    assert result.ops == ["Transpose", "MatMul", "Add", "Softmax"]
    assert result.count("fold_constants") == 7
    assert [d.dim_value for d in result.model.graph.input[0].type.tensor_type.shape.dim] == [1, 5, 8]
    assert [d.dim_value for d in result.model.graph.output[0].type.tensor_type.shape.dim] == [1, 5, 5]


def test_open_shapes_do_not_fold(lower):
    result = lower(CAUSAL)
    assert result.count("fold_constants") == 0
    assert "Range" in result.ops


def test_the_known_part_of_a_shape_folds_though_the_batch_is_open(lower):
    result = lower(CAUSAL.replace("B,T,8", "B,5,8").replace("B,T,T", "B,5,5"))
    assert "Shape" not in result.ops and "Range" not in result.ops


def test_binding_another_rank_or_axis_is_refused(lower):
    from runtime.errors import PatchError

    with pytest.raises(PatchError, match="expected 3 numbers"):
        lower(CAUSAL, input_shapes={"x": [1, 5]})
    with pytest.raises(PatchError, match="no such input"):
        lower(CAUSAL, input_shapes={"z": [1, 5, 8]})
    with pytest.raises(PatchError, match="contradicts"):
        lower(CAUSAL, input_shapes={"x": [1, 5, 9]})


def test_a_graph_output_is_never_folded(lower):
    graph = "g (float[4] x) => (float[4] y, float[2] k) <float[2] c = {1, 2}> { k = Neg (c) y = Neg (x) }"
    assert lower(graph).ops == ["Neg", "Neg"]


def test_random_numbers_are_never_folded(lower):
    graph = """g (float[4] x) => (float[4] y) { r = RandomNormal <shape = [4]> () y = Add (x, r) }"""
    assert "RandomNormal" in lower(graph, compare=False).ops


def test_a_large_result_is_not_written_out(lower):
    graph = """g (float[2000,2000] x) => (float[2000,2000] y) <int64[2] s = {2000, 2000}>
    { z = ConstantOfShape (s) y = Add (x, z) }"""
    assert "ConstantOfShape" in lower(graph, compare=False).ops


MASKED = {
    "where": "g (bool[B,4] c, float[B,4] s) => (float[B,4] y) <float m = {%s}> { z = Where (c, s, m) y = Softmax (z) }",
    "added": """g (bool[B,4] c, float[B,4] s) => (float[B,4] y) <float m = {%s}, float o = {0}>
    { z = Where (c, o, m) w = Add (s, z) y = Softmax (w) }""",
    "product": """g (bool[B,4] c, float[B,4] s) => (float[B,4] y) <float m = {%s}, float one = {1}>
    { f = Cast <to = 1> (c) n = Sub (one, f) z = Mul (n, m) w = Add (s, z) y = Softmax (w) }""",
    "reshaped": """g (bool[B,4] c, float[B,1,4] s) => (float[B,1,4] y) <float m = {%s}, float o = {0}, int64[1] a = {1}>
    { z = Where (c, o, m) u = Unsqueeze (z, a) w = Add (s, u) y = Softmax (w) }""",
}


def mask_feeds(shape=(2, 4)):
    return {
        "c": np.array([[1, 0, 1, 0], [0, 0, 0, 1]], dtype=bool),
        "s": np.float32([[1, 2, 3, 4], [-5, 0, 5, 1]]).reshape(shape),
    }


@pytest.mark.parametrize("form", MASKED)
@pytest.mark.parametrize("value", ["-3.4028235e38", "-1e9"])
def test_masks_become_finite_for_float16(lower, form, value):
    feeds = mask_feeds((2, 1, 4) if form == "reshaped" else (2, 4))
    result = lower(MASKED[form] % value, "310P3", feeds=feeds)
    assert result.count("finite_masks") == 1
    (y,), overflows, nans = half_run(result.model, feeds, keep_float32=False)
    assert (overflows, nans) == (0, 0)
    np.testing.assert_allclose(y, run_replacement(result.model, feeds)[0], atol=2e-3)


def test_minus_infinity_becomes_finite(lower):
    from onnx import helper, numpy_helper

    def info(name, kind, shape):
        return helper.make_tensor_value_info(name, kind, shape)

    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Where", ["c", "s", "m"], ["z"]), helper.make_node("Softmax", ["z"], ["y"])],
            "g",
            [info("c", 9, [2, 4]), info("s", 1, [2, 4])],
            [info("y", 1, [2, 4])],
            [numpy_helper.from_array(np.float32(-np.inf), "m")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    assert lower(model, "310P3", feeds=mask_feeds()).count("finite_masks") == 1


def test_masks_stay_where_float32_stays(lower):
    assert lower(MASKED["where"] % "-3.4028235e38", feeds=mask_feeds()).count("finite_masks") == 0


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (
            "g (bool[4] c, float[4] s) => (float[4] y) <float m = {-1e9}> { y = Where (c, s, m) }",
            "a graph output",
        ),
        (
            "g (bool[B,4] c, float[B,4] s) => (float[B,4] y) <float m = {-1e9}>"
            " { z = Where (c, s, m) y = LogSoftmax (z) }",
            "LogSoftmax",
        ),
        (
            "g (float[B,4] f, float[B,4] s) => (float[B,4] y) <float m = {-1e9}>"
            " { z = Mul (f, m) w = Add (s, z) y = Softmax (w) }",
            "0 or 1 is not proven",
        ),
    ],
)
def test_masks_that_something_else_sees_are_refused(lower, graph, reason):
    assert reason in lower(graph, "310P3", compare=False).refusal("finite_masks")


def test_a_mask_that_is_not_low_enough_is_caught_by_the_proof(lower, monkeypatch):
    monkeypatch.setattr("op_patches.finite_masks.MASKED", -10.0)
    result = lower(MASKED["where"] % "-1e9", "310P3", feeds=mask_feeds())
    assert "proof: differs" in result.refusal("finite_masks")
