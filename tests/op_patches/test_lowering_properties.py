"""Random small graphs per rule: the lowered graph equals the old one in ONNX Runtime and in onnx.reference."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from op_patches.evaluate import run_original, run_replacement
from op_patches.pipeline import Options, apply_lowerings
from op_patches.targets import Target

TARGETS = st.sampled_from([Target.parse("910B4"), Target.parse("310P3"), Target.parse("A3,cann=9.1")])
SEEDS = st.integers(0, 2**31)
check = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def one_node(op_type, arrays, outputs=1, constants=None, opset=17, domain="", **attributes):
    """A model of one node over the given inputs; the shapes of its outputs are left to inference."""
    constants = constants or {}
    names = [*arrays, *constants]
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(outputs)], domain=domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in arrays.items()
    ]
    tensors = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=o) for o in node.output], tensors)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    typed = onnx.shape_inference.infer_shapes(model)
    if not all(o.type.HasField("tensor_type") for o in typed.graph.output):
        for info, value in zip(model.graph.output, run_replacement(model, arrays), strict=True):
            info.CopyFrom(
                helper.make_tensor_value_info(info.name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            )
        return model
    return typed


def hold(model, arrays, target, rule, rtol=3e-5, options=None):
    """Lower and compare with the original in both evaluators."""
    patched, report = apply_lowerings(model, target, options=options)
    assert report.rule(rule).count >= 1, list(report.lines())
    wanted = run_original(model, arrays)
    for want, got, again in zip(wanted, run_replacement(patched, arrays), run_original(patched, arrays), strict=True):
        scale = max(1.0, float(np.abs(want).max(initial=0))) if want.dtype.kind == "f" else 0
        np.testing.assert_allclose(got.astype(want.dtype), want, rtol=rtol, atol=rtol * scale)
        np.testing.assert_allclose(again, want, rtol=rtol, atol=rtol * scale)
    return patched


def shapes(low=1, high=4, rank=(1, 4)):
    return st.lists(st.integers(low, high), min_size=rank[0], max_size=rank[1])


@check
@given(st.data(), TARGETS, SEEDS)
def test_layer_normalization(data, target, seed):
    shape = data.draw(shapes(2, 6))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    rng = np.random.default_rng(seed)
    offset, scale = data.draw(st.sampled_from([(0, 1), (100, 3), (0, 1e-2), (-20, 400)]))
    tail = shape[axis % len(shape) :]
    keep = data.draw(st.lists(st.booleans(), min_size=len(tail), max_size=len(tail)))
    params = [n if k else 1 for n, k in zip(tail, keep, strict=True)]
    arrays = {
        "x": (offset + scale * rng.standard_normal(shape)).astype(np.float32),
        "s": rng.standard_normal(params).astype(np.float32),
    }
    if data.draw(st.booleans()):
        arrays["b"] = rng.standard_normal(params).astype(np.float32)
    epsilon = data.draw(st.sampled_from([1e-5, 1e-3, 1e-12]))
    outputs = data.draw(st.sampled_from([1, 3]))
    if math.prod(tail) < 3:
        epsilon = 1e-3  # the deviation of two nearly equal numbers has no digits to compare
    model = one_node("LayerNormalization", arrays, outputs, axis=axis, epsilon=epsilon)
    hold(model, arrays, target, "layer_norm", rtol=2e-2 if abs(offset) > 50 else 2e-3)


@check
@given(st.data(), TARGETS, SEEDS)
def test_gelu(data, target, seed):
    rng = np.random.default_rng(seed)
    scale = data.draw(st.sampled_from([1e-3, 1, 8, 300]))
    x = {"x": (scale * rng.standard_normal(data.draw(shapes()))).astype(np.float32)}
    approximate = data.draw(st.sampled_from(["none", "tanh"]))
    hold(one_node("Gelu", x, opset=20, approximate=approximate), x, target, "gelu")


@check
@given(st.data(), TARGETS, SEEDS)
def test_gemm(data, target, seed):
    rng = np.random.default_rng(seed)
    m, k, n = (data.draw(st.integers(1, 5)) for _ in range(3))
    trans_a, trans_b = data.draw(st.booleans()), data.draw(st.booleans())
    arrays = {
        "a": rng.standard_normal((k, m) if trans_a else (m, k)).astype(np.float32),
        "b": rng.standard_normal((n, k) if trans_b else (k, n)).astype(np.float32),
    }
    if data.draw(st.booleans()):
        c = data.draw(st.sampled_from([(n,), (m, n), (1, n), (m, 1), (1,), ()]))
        arrays["c"] = np.asarray(rng.standard_normal(c)).astype(np.float32)
    scales = st.sampled_from([1.0, 0.5, 2.0, -1.5, 0.0])
    model = one_node(
        "Gemm", arrays, transA=int(trans_a), transB=int(trans_b), alpha=data.draw(scales), beta=data.draw(scales)
    )
    hold(model, arrays, target, "gemm")


@check
@given(st.data(), SEEDS)
def test_matmul_of_vectors(data, seed):
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(1, 5))
    batch = data.draw(shapes(rank=(0, 2)))
    a, b = data.draw(st.sampled_from([((k,), (k,)), ((k,), (*batch, k, 3)), ((*batch, 4, k), (k,))]))
    arrays = {"a": rng.standard_normal(a).astype(np.float32), "b": rng.standard_normal(b).astype(np.float32)}
    hold(one_node("MatMul", arrays), arrays, Target.parse("910B4"), "matmul")


@check
@given(st.data(), SEEDS)
def test_einsum(data, seed):
    labels = data.draw(st.permutations("abcdef"))[: data.draw(st.integers(2, 5))]
    sizes = {c: data.draw(st.integers(1, 4)) for c in labels}
    left = data.draw(st.permutations(labels))[: data.draw(st.integers(1, len(labels)))]
    right = data.draw(st.permutations(labels))[: data.draw(st.integers(1, len(labels)))]
    both = dict.fromkeys([*left, *right])
    result = [c for c in data.draw(st.permutations(list(both))) if data.draw(st.booleans())]
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.standard_normal([sizes[c] for c in left]).astype(np.float32),
        "y": rng.standard_normal([sizes[c] for c in right]).astype(np.float32),
    }
    equation = f"{''.join(left)},{''.join(right)}->{''.join(result)}"
    hold(one_node("Einsum", arrays, equation=equation), arrays, Target.parse("910B4"), "einsum")


@check
@given(st.data(), SEEDS)
def test_top_k_by_counting(data, seed):
    shape = data.draw(shapes(1, 7, rank=(1, 3)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    k = data.draw(st.integers(1, shape[axis]))
    rng = np.random.default_rng(seed)
    arrays = {"x": rng.integers(0, 4, shape).astype(np.float32)}  # many ties
    model = one_node("TopK", arrays, 2, {"k": np.int64([k])}, axis=axis, largest=data.draw(st.integers(0, 1)))
    hold(model, arrays, Target.parse("910B4"), "top_k", options=Options(top_k="rank"))


@check
@given(st.data(), SEEDS)
def test_scatter_nd(data, seed):
    shape = data.draw(shapes(1, 5, rank=(1, 3)))
    depth = data.draw(st.integers(1, len(shape)))
    places = math.prod(shape[:depth])
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(places)[: data.draw(st.integers(1, places))]
    indices = np.stack(np.unravel_index(chosen, shape[:depth]), -1).astype(np.int64)
    arrays = {
        "x": rng.standard_normal(shape).astype(np.float32),
        "i": indices,
        "u": rng.standard_normal((len(chosen), *shape[depth:])).astype(np.float32),
    }
    hold(one_node("ScatterND", arrays), arrays, Target.parse("910B4"), "scatter")


@check
@given(st.data(), SEEDS)
def test_trilu(data, seed):
    shape = data.draw(shapes(1, 6, rank=(2, 4)))
    arrays = {"x": np.random.default_rng(seed).standard_normal(shape).astype(np.float32)}
    k = np.int64(data.draw(st.integers(-7, 7)))
    model = one_node("Trilu", arrays, constants={"k": k}, upper=data.draw(st.integers(0, 1)))
    hold(model, arrays, Target.parse("910B4"), "trilu", rtol=0)


@check
@given(st.data(), SEEDS)
def test_slices(data, seed):
    shape = data.draw(shapes(1, 6, rank=(1, 3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    far = (1 << 63) - 1
    start = data.draw(st.sampled_from([0, 1, -2, far, -far]))
    end = data.draw(st.sampled_from([far, -far]))
    step = data.draw(st.sampled_from([1, 2, -1, -3]))
    arrays = {"x": np.random.default_rng(seed).standard_normal(shape).astype(np.float32)}
    taken = range(*slice(start, end, step).indices(shape[axis]))
    if not taken:
        return  # ATC takes no empty tensors, and a proof compares nothing there
    constants = {"s": np.int64([start]), "e": np.int64([end]), "a": np.int64([axis]), "t": np.int64([step])}
    hold(one_node("Slice", arrays, constants=constants), arrays, Target.parse("910B4"), "slice_bounds", rtol=0)


@check
@given(st.data(), SEEDS)
def test_reductions_of_opset_18(data, seed):
    shape = data.draw(shapes(1, 4))
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    op = data.draw(
        st.sampled_from(["ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceLogSumExp"])
    )
    arrays = {"x": np.random.default_rng(seed).standard_normal(shape).astype(np.float32)}
    model = one_node(
        op,
        arrays,
        constants={"axes": np.int64(axes)},
        opset=data.draw(st.integers(18, 22)),
        keepdims=data.draw(st.integers(0, 1)),
    )
    patched = hold(model, arrays, Target.parse("910B4"), "opset")
    assert patched.opset_import[0].version == 17


@check
@given(st.data(), SEEDS)
def test_splits_of_opset_18(data, seed):
    size = data.draw(st.integers(1, 12))
    count = data.draw(st.integers(1, size))
    if size - -(-size // count) * (count - 1) < 1:
        return  # the last part would be empty
    arrays = {"x": np.random.default_rng(seed).standard_normal((2, size)).astype(np.float32)}
    hold(one_node("Split", arrays, count, opset=18, axis=1, num_outputs=count), arrays, Target.parse("910B4"), "opset")


@pytest.mark.parametrize("rank", [2, 3, 4])
@check
@given(st.data(), SEEDS)
def test_matmul_as_conv1x1(rank, data, seed):
    k, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    lead = data.draw(shapes(rank=(rank - 1, rank - 1)))
    rng = np.random.default_rng(seed)
    arrays = {"x": rng.standard_normal((*lead, k)).astype(np.float32)}
    model = one_node("MatMul", arrays, constants={"w": rng.standard_normal((k, n)).astype(np.float32)})
    hold(model, arrays, Target.parse("910B4"), "matmul_conv1x1", options=Options(matmul="conv1x1"))
