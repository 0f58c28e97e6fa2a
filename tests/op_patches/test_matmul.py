from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("a", "b", "y", "ops"),
    [
        ("float[8]", "float[8]", "float", ["Unsqueeze", "Unsqueeze", "MatMul", "Squeeze"]),
        ("float[8]", "float[8,3]", "float[3]", ["Unsqueeze", "MatMul", "Squeeze"]),
        ("float[B,4,8]", "float[8]", "float[B,4]", ["Unsqueeze", "MatMul", "Squeeze"]),
        ("float[8]", "float[B,8,3]", "float[B,3]", ["Unsqueeze", "MatMul", "Squeeze"]),
        ("float[B,4,8]", "float[8,3]", "float[B,4,3]", ["MatMul"]),
    ],
)
def test_vectors_become_matrices(lower, a, b, y, ops):
    assert lower(f"g ({a} a, {b} b) => ({y} y) {{ y = MatMul (a, b) }}").ops == ops


def test_double_is_refused(lower):
    result = lower("g (double[4,8] a, double[8,3] b) => (double[4,3] y) { y = MatMul (a, b) }")
    assert result.ops == ["MatMul"]
    assert "float32 would change the numbers" in result.refusal("matmul")


def test_integers_of_unknown_range_are_refused(lower):
    result = lower("g (int32[4,8] a, int32[8,3] b) => (int32[4,3] y) { y = MatMul (a, b) }")
    assert "exceed 2^24" in result.refusal("matmul")


def test_integers_of_int64_inputs_are_refused(lower):
    result = lower("g (int64[4,8] a, int64[8,3] b) => (int64[4,3] y) { y = MatMul (a, b) }")
    assert "no range" in result.refusal("matmul")


def test_small_integers_are_multiplied_in_float32(lower):
    graph = """g (bool[4,8] m, bool[8,3] n) => (int32[4,3] y)
    { a = Cast <to = 6> (m) b = Cast <to = 6> (n) y = MatMul (a, b) }"""
    result = lower(graph)
    assert result.count("matmul") == 1
    assert result.ops[-2:] == ["MatMul", "Cast"]


GEMMS = [
    ("", "float[3]"),
    ("alpha = 0.5, beta = 2.0", "float[3]"),
    ("alpha = 3.0", "float[4,3]"),
    ("beta = 0.0", "float[3]"),
    ("alpha = 0.25, beta = 0.5", "float[4,1]"),
    ("alpha = 2.0", "float"),
    ("beta = 3.0", "float[1,3]"),
]


@pytest.mark.parametrize(("attrs", "c"), GEMMS)
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_gemm_in_all_its_forms(lower, attrs, c, trans_a, trans_b):
    a, b = ("8,4" if trans_a else "4,8"), ("3,8" if trans_b else "8,3")
    attributes = ", ".join(filter(None, [attrs, f"transA = {trans_a}", f"transB = {trans_b}"]))
    result = lower(f"g (float[{a}] a, float[{b}] b, {c} c) => (float[4,3] y) {{ y = Gemm <{attributes}> (a, b, c) }}")
    assert result.count("gemm") == 1
    assert "Gemm" not in result.ops


def test_gemm_without_c_is_a_matmul(lower):
    assert lower("g (float[4,8] a, float[8,3] b) => (float[4,3] y) { y = Gemm (a, b) }").ops == ["MatMul"]


def test_integer_gemm_is_refused(lower):
    result = lower("g (int32[4,8] a, int32[8,3] b) => (int32[4,3] y) { y = Gemm (a, b) }", compare=False)
    assert "integer" in result.refusal("gemm")


def test_a_dropped_alpha_is_caught_by_the_proof(lower, monkeypatch):
    monkeypatch.setattr("op_patches.gemm.attributes", lambda node: {"transB": 0})
    graph = "g (float[4,8] a, float[8,3] b) => (float[4,3] y) { y = Gemm <alpha = 0.5> (a, b) }"
    result = lower(graph)
    assert "proof: differs" in result.refusal("gemm")


@pytest.mark.parametrize("shape", ["B,8", "B,5,8", "B,2,5,8"])
def test_conv1x1_computes_the_same_product(lower, shape):
    out = shape[:-1] + "3"
    graph = f"""g (float[{shape}] x, float[4] z) => (float[{out}] y)
    {{ w0 = Constant <value = float[4,6] {{1,2,3,4,5,6,7,8,9,10,11,12,-1,-2,-3,-4,-5,-6,-7,-8,-9,-10,-11,-12}}> ()
      w = Reshape (w0, s)  y = MatMul (x, w) }}"""
    graph = graph.replace(f"=> (float[{out}] y)", f"=> (float[{out}] y) <int64[2] s = {{8, 3}}>")
    result = lower(graph, matmul="conv1x1")
    assert result.count("matmul_conv1x1") == 1
    assert "MatMul" not in result.ops and "Conv" in result.ops


def test_conv1x1_refuses_two_computed_operands(lower):
    result = lower("g (float[4,8] a, float[8,3] b) => (float[4,3] y) { y = MatMul (a, b) }", matmul="conv1x1")
    assert "no constant matrix" in result.refusal("matmul_conv1x1")


def test_conv1x1_refuses_five_axes(lower):
    graph = """g (float[1,1,1,4,8] x) => (float[1,1,1,4,1] y)
    { w = Constant <value = float[8,1] {1,2,3,4,5,6,7,8}> () y = MatMul (x, w) }"""
    assert "5 axes" in lower(graph, matmul="conv1x1").refusal("matmul_conv1x1")
