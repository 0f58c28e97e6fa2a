"""Operators of com.microsoft and opset 23 that are written as primitives: norms, rotary embedding, fused products."""

from __future__ import annotations

import numpy as np
import pytest

MS = '"com.microsoft": 1'


@pytest.mark.parametrize("target", ["910B4", "310P3"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_rms_normalization_23(lower, target, axis):
    params = "96" if axis == -1 else "4,96"
    graph = f"""g (float[2,4,96] x, float[{params}] s) => (float[2,4,96] y)
    {{ y = RMSNormalization <axis = {axis}> (x, s) }}"""
    result = lower(graph, target, opset=23)
    assert result.count("rms_norm") == 1
    half = result.report.rule("rms_norm").half
    assert (half.overflows, half.nans) == (0, 0)


def test_simplified_layer_normalization_of_onnx_runtime(lower):
    graph = (
        "g (float[2,4,96] x, float[96] s) => (float[2,4,96] y) { y = SimplifiedLayerNormalization <axis = -1> (x, s) }"
    )
    result = lower(graph)
    assert result.ops == ["Mul", "ReduceMean", "Add", "Sqrt", "Div", "Mul"]


@pytest.mark.parametrize("target", ["910B4", "310P3"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_skip_layer_normalization(lower, target, bias, used):
    extra, total = (", float[32] c", ", c") if bias else ("", ""), ", , , total" if used else ""
    outputs = 'y, "", "", total' if used else "y"
    graph = f"""g (float[2,4,32] x, float[2,4,32] s, float[32] g, float[32] b{extra[0]})
    => (float[2,4,32] y{", float[2,4,32] total" if used else ""})
    {{ {outputs} = com.microsoft.SkipLayerNormalization <epsilon = 1e-5> (x, s, g, b{extra[1]}) }}"""
    assert total is not None
    result = lower(graph, target, domains=MS)
    assert result.count("skip_layer_norm") == 1
    assert [o.domain for o in result.model.opset_import] == [""]


def test_skip_simplified_layer_normalization(lower):
    graph = """g (float[2,4,32] x, float[2,4,32] s, float[32] g, float[32] c) => (float[2,4,32] y)
    { y = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (x, s, g, c) }"""
    assert lower(graph, domains=MS).count("skip_layer_norm") == 1


def rotary_feeds(shape, rows, half, positions):
    rng = np.random.default_rng(5)
    angles = rng.standard_normal((rows, half))
    return {
        "x": rng.standard_normal(shape).astype(np.float32),
        "c": np.cos(angles).astype(np.float32),
        "s": np.sin(angles).astype(np.float32),
        "p": np.asarray(positions, dtype=np.int64),
    }


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(
    ("shape", "attrs"),
    [((2, 3, 4, 8), ""), ((2, 4, 24), ", num_heads = 3"), ((2, 3, 4, 12), ", rotary_embedding_dim = 8")],
)
def test_rotary_embedding_23(lower, interleaved, shape, attrs):
    dims = ",".join(map(str, shape))
    graph = f"""g (float[{dims}] x, float[10,4] c, float[10,4] s, int64[2,4] p) => (float[{dims}] y)
    {{ y = RotaryEmbedding <interleaved = {interleaved}{attrs}> (x, c, s, p) }}"""
    feeds = rotary_feeds(shape, 10, 4, [[0, 1, 2, 3], [5, 6, 7, 9]])
    assert lower(graph, opset=23, feeds=feeds).count("rotary_embedding") == 1


def test_rotary_embedding_without_positions(lower):
    graph = """g (float[2,3,4,8] x, float[2,4,4] c, float[2,4,4] s) => (float[2,3,4,8] y)
    { y = RotaryEmbedding (x, c, s) }"""
    assert lower(graph, opset=23).count("rotary_embedding") == 1


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("kind", "positions"), [("2,4", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("1", [3])])
def test_rotary_embedding_of_onnx_runtime(lower, interleaved, kind, positions):
    graph = f"""g (float[2,3,4,8] x, int64[{kind}] p, float[10,4] c, float[10,4] s) => (float[2,3,4,8] y)
    {{ y = com.microsoft.RotaryEmbedding <interleaved = {interleaved}> (x, p, c, s) }}"""
    feeds = rotary_feeds((2, 3, 4, 8), 10, 4, positions)
    assert lower(graph, domains=MS, feeds=feeds).count("rotary_embedding") == 1


def test_a_scaled_rotary_embedding_is_refused(lower):
    graph = """g (float[2,3,4,8] x, int64[2,4] p, float[10,4] c, float[10,4] s) => (float[2,3,4,8] y)
    { y = com.microsoft.RotaryEmbedding <scale = 2.0> (x, p, c, s) }"""
    assert "scale" in lower(graph, domains=MS, compare=False).refusal("rotary_embedding")


@pytest.mark.parametrize(
    "attrs", ["", "alpha = 0.5", "transA = 1", "transB = 1", "alpha = 2.0, transA = 1, transB = 1"]
)
def test_fused_matmul(lower, attrs):
    a, b = ("8,4" if "transA" in attrs else "4,8"), ("5,8" if "transB" in attrs else "8,5")
    graph = f"""g (float[2,{a}] a, float[2,{b}] b) => (float[2,4,5] y)
    {{ y = com.microsoft.FusedMatMul <{attrs}> (a, b) }}"""
    graph = graph.replace("<> ", "")
    assert lower(graph, domains=MS).count("fused_matmul") == 1


def test_fused_matmul_with_batch_inside_is_refused(lower):
    graph = """g (float[4,2,8] a, float[2,8,5] b) => (float[2,4,5] y)
    { y = com.microsoft.FusedMatMul <transBatchA = 1> (a, b) }"""
    assert "transBatchA" in lower(graph, domains=MS, compare=False).refusal("fused_matmul")


def test_fused_gemm_becomes_a_product_and_its_activation(lower):
    graph = """g (float[4,8] a, float[8,5] b, float[5] c) => (float[4,5] y)
    { y = com.microsoft.FusedGemm <activation = "Relu", alpha = 0.5> (a, b, c) }"""
    result = lower(graph, domains=MS)
    assert result.ops == ["Mul", "MatMul", "Add", "Relu"]


@pytest.mark.parametrize("activation", ["Relu", "Tanh", "Sigmoid"])
def test_fused_conv(lower, activation):
    graph = f"""g (float[1,2,8] x, float[3,2,3] w, float[3] b) => (float[1,3,6] y)
    {{ y = com.microsoft.FusedConv <kernel_shape = [3], activation = "{activation}"> (x, w, b) }}"""
    assert lower(graph, domains=MS).ops == ["Conv", activation]


def test_fused_conv_with_a_sum_and_bounds(lower):
    graph = """g (float[1,2,8,8] x, float[3,2,3,3] w, float[3] b) => (float[1,3,6,6] y)
    { y = com.microsoft.FusedConv <kernel_shape = [3,3], activation = "Clip", activation_params = [0.0, 1.0]>
      (x, w, b) }"""
    assert lower(graph, domains=MS).ops == ["Conv", "Clip"]


def test_an_unknown_activation_is_refused(lower):
    graph = """g (float[1,2,8] x, float[3,2,3] w, float[3] b) => (float[1,3,6] y)
    { y = com.microsoft.FusedConv <kernel_shape = [3], activation = "Odd"> (x, w, b) }"""
    assert "activation Odd" in lower(graph, domains=MS, compare=False).refusal("fused_conv")


def test_a_chain_of_foreign_operators_unravels_though_each_hides_the_types_behind_it(lower):
    graph = """g (float[2,4,32] x, float[32,32] w, float[32] g, float[32] b) => (float[2,4,32] y)
    { a = com.microsoft.FusedMatMul <alpha = 0.5> (x, w)  c = com.microsoft.SkipLayerNormalization (a, x, g, b)
      d = com.microsoft.BiasGelu (c, b)  e = com.microsoft.FusedMatMul (d, w)  y = com.microsoft.QuickGelu (e) }"""
    result = lower(graph, domains=MS)
    assert result.report.counts["gelu"] == 2 and result.count("fused_matmul") == 2
    assert not result.report.remaining
