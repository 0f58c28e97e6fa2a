from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from op_patches.evaluate import half_run, in_float16, run_replacement

PLAIN = ["ReduceMean", "Sub", "Mul", "ReduceMean", "Add", "Sqrt", "Div", "Mul", "Add"]


def layer_norm(axis: int = -1, shape: str = "B,4,96", extra: str = "", dtype: str = "float", params: str = "96") -> str:
    return (
        f"g ({dtype}[{shape}] x, {dtype}[{params}] s, {dtype}[{params}] b) => ({dtype}[{shape}] y)"
        f" {{ y = LayerNormalization <axis = {axis}{extra}> (x, s, b) }}"
    )


def test_float32_that_stays_float32_gets_the_form_that_ge_fuses(lower):
    result = lower(layer_norm())
    assert result.ops == PLAIN
    assert result.report.rule("layer_norm").lowered[0].detail == "plain"
    assert result.report.rule("layer_norm").max_difference_random < 1e-5


@pytest.mark.parametrize(
    ("axis", "params"), [(-1, "96"), (2, "96"), (-2, "4,96"), (1, "4,96"), (-2, "96"), (1, "1,96"), (-2, "4,1")]
)
def test_any_axis_with_full_and_broadcast_scale(lower, axis, params):
    assert lower(layer_norm(axis, params=params)).count("layer_norm") == 1


def test_axis_0_normalizes_everything(lower):
    assert lower(layer_norm(0, shape="2,4,96", params="2,4,96")).count("layer_norm") == 1


def test_without_bias_there_is_no_add_at_the_end(lower):
    result = lower("g (float[B,96] x, float[96] s) => (float[B,96] y) { y = LayerNormalization (x, s) }")
    assert result.ops == PLAIN[:-1]


@pytest.mark.parametrize("target", ["910B4", "310P3"])
def test_mean_and_inverse_deviation_are_written_when_they_are_used(lower, target):
    graph = """g (float[B,4,96] x, float[96] s) => (float[B,4,96] y, float[B,4,1] mean, float[B,4,1] inverse)
    { y, mean, inverse = LayerNormalization (x, s) }"""
    assert lower(graph, target).count("layer_norm") == 1


def test_epsilon_counts(lower):
    small = lower(layer_norm(extra=", epsilon = 1e-12"), feeds=None)
    assert small.count("layer_norm") == 1
    large = lower(layer_norm(extra=", epsilon = 0.5"))
    assert large.count("layer_norm") == 1


def test_a_float16_graph_gets_a_float32_island_where_dtypes_are_kept(lower):
    result = lower(layer_norm(dtype="float16"), rtol=4e-3)
    assert result.ops[0] == "Cast" and result.ops[-1] == "Cast"
    proof = result.report.rule("layer_norm").half
    assert proof is not None and "float32 island" in proof.how
    assert (proof.overflows, proof.nans) == (0, 0)


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(("offset", "deviation"), [(0, 1), (1000, 1000), (1000, 1), (0, 1000), (0, 1e-3), (5, 0)])
def test_the_scaled_form_survives_float16(lower, dtype, offset, deviation):
    result = lower(layer_norm(dtype=dtype), "310P3", rtol=1e-5 if dtype == "float" else 4e-3)
    assert result.report.rule("layer_norm").lowered[0].detail == "scaled"
    rng = np.random.default_rng(1)
    x = in_float16((offset + deviation * rng.standard_normal((2, 4, 96))).astype(np.float32))
    s, b = (in_float16(rng.standard_normal(96).astype(np.float32)) for _ in range(2))
    (half,), overflows, nans = half_run(result.model, {"x": x, "s": s, "b": b}, keep_float32=False)
    assert (overflows, nans) == (0, 0)
    d = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    want = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * s + b
    # An offset of 1,000 leaves float16 steps of 0.5 in x - mean when the deviation is 1.
    np.testing.assert_allclose(half, want, atol=0.02 if offset == 0 or deviation == 1000 else 1.2)


def test_the_plain_form_overflows_float16_which_is_why_the_other_exists(lower):
    result = lower(layer_norm())
    x = np.full((2, 4, 96), 1000, dtype=np.float32) * np.linspace(-2, 2, 96, dtype=np.float32)
    ones = np.ones(96, dtype=np.float32)
    _, overflows, _ = half_run(result.model, {"x": x, "s": ones, "b": ones}, keep_float32=False)
    assert overflows > 0


def test_bfloat16_computes_in_float32(lower):
    result = lower(layer_norm(dtype="bfloat16"), "cann=8.5,soc=Ascend910B4,precision=mixed_bfloat16", compare=False)
    assert result.report.rule("layer_norm").lowered[0].detail == "float32 island"


def test_another_stash_type_is_refused(lower):
    result = lower(layer_norm(extra=f", stash_type = {TensorProto.BFLOAT16}", dtype="bfloat16"), compare=False)
    assert result.count("layer_norm") == 0
    assert "stash_type" in result.refusal("layer_norm")


def test_an_axis_from_the_front_of_an_unknown_rank_is_refused(lower):
    graph = """g (float[2,3] a, int64[K] shape, float[3] s) => (float y)
    { x = Reshape (a, shape)  z = LayerNormalization <axis = 1> (x, s)  y = ReduceSum <keepdims = 0> (z) }"""
    result = lower(graph, compare=False)
    assert "rank is unknown" in result.refusal("layer_norm")


def test_every_layer_of_a_stack_is_counted_and_proved_once(lower):
    layers = 7
    body = " ".join(f"x{i + 1} = LayerNormalization (x{i}, s)" for i in range(layers))
    result = lower(f"g (float[B,32] x0, float[32] s) => (float[B,32] x{layers}) {{ {body} }}", rtol=1e-4)
    assert result.count("layer_norm") == layers
    assert len({id(n.proof) for n in result.report.rule("layer_norm").lowered}) == 1


def test_opset_18_takes_axes_as_an_input_and_still_ends_at_17(lower):
    result = lower(layer_norm(), opset=20)
    assert result.model.opset_import[0].version == 17
    assert result.ops == PLAIN


def test_a_flipped_sign_is_caught_by_the_proof(lower, monkeypatch):
    from op_patches import normalization
    from op_patches.rewriter import Builder

    original = Builder.op

    def flipped(self, op_type, *inputs, **rest):
        return original(self, "Add" if op_type == "Sub" else op_type, *inputs, **rest)

    monkeypatch.setattr(normalization.Builder, "op", flipped)
    result = lower(layer_norm())
    assert result.count("layer_norm") == 0
    assert "proof: differs by" in result.refusal("layer_norm")


def test_the_lowered_graph_runs_beside_the_old_one_on_large_values(lower):
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], axis=-1)],
            "g",
            [helper.make_tensor_value_info(n, 1, d) for n, d in (("x", [2, 768]), ("s", [768]), ("b", [768]))],
            [helper.make_tensor_value_info("y", 1, [2, 768])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    rng = np.random.default_rng(3)
    feeds = {
        "x": (1000 + 1000 * rng.standard_normal((2, 768))).astype(np.float32),
        "s": np.ones(768, np.float32),
        "b": np.zeros(768, np.float32),
    }
    result = lower(model, feeds=feeds, rtol=1e-4)
    (y,) = run_replacement(result.model, feeds)
    assert abs(float(y.std()) - 1) < 1e-3
