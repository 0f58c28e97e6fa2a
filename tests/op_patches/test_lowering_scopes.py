"""Branches of If, reports, options, and the pipeline as a whole."""

from __future__ import annotations

import onnx
import pytest

from op_patches.pipeline import Options, apply_lowerings, steps_for
from op_patches.targets import Target
from runtime.errors import PatchError

BRANCHES = """g (bool c, float[B,8] x, float[8] s, float[8,3] w) => (float[B,3] y)
{ y = If (c) <
    then_branch = t () => (float[B,3] a) { n = LayerNormalization (x, s) a = Gemm (n, w) },
    else_branch = e () => (float[B,3] b)
      { k = Constant <value_float = 2.0> () n = Mul (x, k) b = Gemm <alpha = 0.5> (n, w) }> }"""


@pytest.mark.parametrize("condition", [True, False])
def test_branches_of_if_are_lowered_too(lower, condition):
    import numpy as np

    rng = np.random.default_rng(0)
    feeds = {
        "c": np.array(condition),
        "x": rng.standard_normal((2, 8)).astype(np.float32),
        "s": rng.standard_normal(8).astype(np.float32),
        "w": rng.standard_normal((8, 3)).astype(np.float32),
    }
    result = lower(BRANCHES, feeds=feeds)
    assert result.report.counts == {"names": 6, "constant": 1, "layer_norm": 1, "gemm": 2}
    ops = {n.op_type for a in result.model.graph.node[0].attribute for n in a.g.node}
    assert not ops & {"LayerNormalization", "Gemm"}


def test_a_branch_sees_constants_and_types_of_the_graph_around_it(lower):
    import numpy as np

    graph = """g (bool c, float[2,3,4] x) => (float[A] y) <int64[1] e = {9223372036854775807}, int64[1] z = {1}>
    { y = If (c) <then_branch = t () => (float[A] a) { f = Transpose (x) m = Constant <value_ints = [-1]> ()
                                                        r = Reshape (f, m) a = Slice (r, z, e) },
                  else_branch = o () => (float[A] b) { n = Constant <value_ints = [-1]> () b = Reshape (x, n) }> }"""
    feeds = {"c": np.array(True), "x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
    result = lower(graph, feeds=feeds)
    assert result.count("transpose") == 1 and result.count("slice_bounds") == 1


def test_the_report_is_data_and_text(lower):
    report = lower(BRANCHES, compare=False).report
    data = report.to_dict()
    norm = next(r for r in data["rules"] if r["rule"] == "layer_norm")
    assert norm["count"] == 1 and norm["max_difference_random"] < 1e-5 and norm["half"]["nans"] == 0
    text = "\n".join(report.lines())
    assert "layer_norm" in text and "difference" in text
    assert report.num_nodes_before == 6 and report.num_nodes_after > 6


def test_a_graph_that_needs_nothing_is_returned_as_it_is():
    text = '<ir_version: 9, opset_import: ["": 17]> g (float[4] x) => (float[4] y) { ["n"] y = Neg (x) }'
    model = onnx.parser.parse_model(text)
    patched, report = apply_lowerings(model, Target.parse("910B4"))
    assert patched == model and not report.changed and not report.counts


def test_every_step_gives_its_reason_and_rules_have_one_name_each():
    steps = steps_for(Target.parse("910B4"), Options(matmul="conv1x1"))
    assert all(step.why for step in steps)
    names = {rule.name for step in steps for rule in step.rules}
    assert {"layer_norm", "gelu", "gemm", "matmul", "matmul_conv1x1", "opset", "names"} <= names


def test_unknown_options_are_refused():
    with pytest.raises(PatchError, match="expected keep or conv1x1"):
        Options(matmul="fast")
    with pytest.raises(PatchError, match="expected keep or rank"):
        Options(top_k="fast")


def test_a_model_that_the_checker_refuses_before_and_after_says_so():
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[4] x) => (float[5] y) { ["n"] y = Neg (x) }"""
    _, report = apply_lowerings(onnx.parser.parse_model(text), Target.parse("910B4"))
    assert any("ONNX checker" in line for line in report.remaining)


def test_what_onnx_runtimes_own_optimizer_writes_is_lowered(lower, tmp_path):
    import onnxruntime

    text = """<ir_version: 9, opset_import: ["": 17]>
    g (float[2,4,8] x, float[8] s) => (float[2,4,4] y)
    <float three = {3}, float c = {0.044715}, float k = {0.7978845608}, float one = {1}, float half = {0.5}>
    { n = LayerNormalization (x, s) p = Pow (n, three) q = Mul (p, c) r = Add (n, q) t = Mul (r, k) u = Tanh (t)
      v = Add (u, one) w = Mul (n, half) z = Mul (w, v) zt = Transpose <perm = [0, 2, 1]> (z) y = MatMul (n, zt) }"""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(onnx.parser.parse_model(text).SerializeToString(), options)
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert {n.op_type for n in optimized.graph.node if n.domain == "com.microsoft"} == {"FastGelu", "FusedMatMul"}
    result = lower(optimized)
    assert result.count("gelu") == result.count("fused_matmul") == 1
    assert [o.domain for o in result.model.opset_import] == [""]
    assert not result.report.remaining
