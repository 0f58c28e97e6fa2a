from __future__ import annotations

import numpy as np
import pytest

from op_patches.evaluate import half_run

X = "g (float[B,5,32] x) => (float[B,5,32] y)"
ERF = ["Div", "Erf", "Mul", "Add", "Mul"]
TANH = ["Mul", "Mul", "Mul", "Add", "Mul", "Tanh", "Mul", "Add", "Mul"]


def test_gelu_20_none_becomes_erf(lower):
    result = lower(X + "{ y = Gelu (x) }", opset=20)
    assert result.ops == ERF
    assert result.model.opset_import[0].version == 17


def test_gelu_20_tanh_becomes_tanh(lower):
    assert lower(X + '{ y = Gelu <approximate = "tanh"> (x) }', opset=20).ops == TANH


def test_where_float16_may_be_stored_the_cube_is_clipped(lower):
    result = lower(X + '{ y = Gelu <approximate = "tanh"> (x) }', "310P3", opset=20)
    assert result.ops == ["Clip", *TANH]
    x = np.array([[-60000, -300, -41, 0, 41, 300, 60000, 1]], np.float16).astype(np.float32).reshape(1, 1, 8)
    (y,), overflows, nans = half_run(result.model, {"x": np.tile(x, (1, 5, 4))}, keep_float32=False)
    assert (overflows, nans) == (0, 0)
    np.testing.assert_allclose(
        y[0, 0, :8], np.where(x[0, 0] > 0, x[0, 0], 0) * [1, 1, 1, 1, 1, 1, 1, 0.8412], rtol=1e-3
    )


@pytest.mark.parametrize(
    ("body", "num_nodes"),
    [
        ("y = com.microsoft.Gelu (x)", 5),
        ("y = com.microsoft.FastGelu (x)", 9),
        ("y = com.microsoft.QuickGelu <alpha = 1.5> (x)", 3),
        ("y = com.microsoft.QuickGelu (x)", 3),
    ],
)
def test_the_operators_of_onnx_runtime(lower, body, num_nodes):
    result = lower(X + f"{{ {body} }}", domains='"com.microsoft": 1')
    assert len(result.ops) == num_nodes
    assert [o.domain for o in result.model.opset_import] == [""]


@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu"])
def test_the_bias_is_added_first(lower, op):
    graph = f"g (float[B,5,32] x, float[32] b) => (float[B,5,32] y) {{ y = com.microsoft.{op} (x, b) }}"
    result = lower(graph, domains='"com.microsoft": 1')
    assert result.ops[0] == "Add"


def test_a_double_gelu_stays_double(lower):
    graph = "g (double[4] x) => (double[4] y) { y = Gelu (x) }"
    assert lower(graph, opset=20, rtol=1e-6).count("gelu") == 1


SPELLINGS = {
    "torch": "p = Pow (x, three) q = Mul (p, c) r = Add (x, q) s = Mul (r, k) t = Tanh (s) u = Add (t, one)"
    " v = Mul (x, half) y = Mul (v, u)",
    "half last": "p = Pow (x, three) q = Mul (c, p) r = Add (q, x) s = Mul (k, r) t = Tanh (s) u = Add (one, t)"
    " v = Mul (x, u) y = Mul (v, half)",
    "half in the gate": "p = Pow (x, three) q = Mul (c, p) r = Add (q, x) s = Mul (k, r) t = Tanh (s) u = Add (one, t)"
    " v = Mul (u, half) y = Mul (x, v)",
    "x outside the polynomial": "p = Pow (x, two) q = Mul (c, p) w = Add (q, one) r = Mul (x, w) s = Mul (k, r)"
    " t = Tanh (s) u = Add (one, t) v = Mul (x, half) y = Mul (u, v)",
}
CONSTANTS = (
    "<float three = {3.0}, float two = {2.0}, float c = {0.044715}, float k = {0.7978845608}, float one = {1.0},"
)
CONSTANTS += " float half = {0.5}>"


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("target", ["910B4", "310P3"])
def test_the_tanh_pattern_loses_its_pow_in_every_spelling(lower, spelling, target):
    result = lower(X + CONSTANTS + "{" + SPELLINGS[spelling] + "}", target)
    assert result.count("gelu_pattern") == 1
    assert "Pow" not in result.ops
    assert ("Clip" in result.ops) == (target == "310P3")


ERF_CONSTANTS = "<float root = {1.41421356}, float one = {1.0}, float half = {0.5}>"
DOUBLING = "s = Div (x, root) t = Erf (s) u = Add (t, one) v = Mul (x, u) y = Mul (v, half)"


def test_the_erf_pattern_is_kept_where_float32_is(lower):
    result = lower(X + ERF_CONSTANTS + "{" + DOUBLING + "}")
    assert result.count("gelu_pattern") == 0
    assert result.ops == ["Div", "Erf", "Add", "Mul", "Mul"]


def test_the_erf_pattern_that_doubles_first_is_turned_round_for_float16(lower):
    result = lower(X + ERF_CONSTANTS + "{" + DOUBLING + "}", "310P3")
    assert result.count("gelu_pattern") == 1
    x = np.full((1, 5, 32), 40000, np.float32)
    assert half_run(result.model, {"x": x}, keep_float32=False)[1:] == (0, 0)


@pytest.mark.parametrize(
    "near_miss",
    [
        "p = Pow (x, two) q = Mul (p, c) r = Add (x, q) s = Mul (r, k) t = Tanh (s) u = Add (t, one) v = Mul (x, half)"
        " y = Mul (v, u)",  # square for cube
        "p = Pow (x, three) q = Mul (p, c) r = Add (x, q) s = Mul (r, k) t = Tanh (s) u = Add (t, one) v = Mul (x, two)"
        " y = Mul (v, u)",  # factor 2 for 0.5
        "p = Pow (x, three) q = Mul (p, k) r = Add (x, q) s = Mul (r, k) t = Tanh (s) u = Add (t, one)"
        " v = Mul (x, half) y = Mul (v, u)",  # another cubic coefficient
    ],
)
def test_what_only_looks_like_gelu_is_left_alone(lower, near_miss):
    report = lower(X + CONSTANTS + "{" + near_miss + "}", "310P3").report.rule("gelu_pattern")
    assert report.count == 0 and not report.refused


def test_a_pattern_whose_middle_is_read_elsewhere_keeps_the_middle(lower):
    graph = "g (float[B,5,32] x) => (float[B,5,32] y, float[B,5,32] t)"
    result = lower(graph + CONSTANTS + "{" + SPELLINGS["torch"] + "}")
    assert result.count("gelu_pattern") == 1
    assert result.ops.count("Tanh") == 2


def test_a_wrong_constant_is_caught_by_the_proof(lower, monkeypatch):
    monkeypatch.setattr("op_patches.gelu.CUBIC", 0.04)
    result = lower(X + '{ y = Gelu <approximate = "tanh"> (x) }', opset=20, compare=False)
    assert result.count("gelu") == 0
    assert "proof: differs" in result.refusal("gelu")


def test_an_unknown_type_is_refused(lower):
    graph = "g (float[4] x) => (float[4] y) { z = odd.Thing (x) y = com.microsoft.FastGelu (z) }"
    result = lower(graph, domains='"com.microsoft": 1, "odd": 1', compare=False)
    assert "type of z is unknown" in result.refusal("gelu")
