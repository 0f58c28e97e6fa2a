"""float32 MatMul on 310P: forms that its vector unit takes, and weights that change shape without moving a byte."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from op_patches.evaluate import run_replacement
from op_patches.patch_file import patch_file
from op_patches.pipeline import apply_lowerings
from op_patches.readiness import check_model
from op_patches.targets import Engine, Target

ORIGIN = "310P3,precision=origin"


def product(a, b, weight=False):
    """One MatMul of the given shapes; `weight` makes the second operand an initializer."""
    inputs = [helper.make_tensor_value_info("a", TensorProto.FLOAT, a)]
    tensors = []
    if weight:
        value = np.random.default_rng(3).standard_normal(b).astype(np.float32)
        tensors = [numpy_helper.from_array(value, "b")]
    else:
        inputs.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, b))
    sizes = [[d if isinstance(d, int) else 2 for d in s] for s in (a, b)]
    result = np.matmul(np.zeros(sizes[0]), np.zeros(sizes[1])).shape
    open_axes = any(not isinstance(d, int) for d in (*a, *b))
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(result) if open_axes else result)
    node = helper.make_node("MatMul", ["a", "b"], ["y"], "product")
    graph = helper.make_graph([node], "g", inputs, [output], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def engines(model):
    return check_model(model, Target.parse(ORIGIN)).engines


@pytest.mark.parametrize(
    ("a", "b", "ops"),
    [
        ([3, 4], [4, 5], ["Unsqueeze", "Unsqueeze", "MatMul", "Squeeze"]),
        ([1, 3, 4], [4, 5], ["Unsqueeze", "MatMul"]),
        ([2, 3, 4], [4, 5], ["Unsqueeze", "Reshape", "MatMul", "Reshape"]),
        ([2, 3, 6, 4], [4, 5], ["Unsqueeze", "Reshape", "MatMul", "Reshape"]),
        ([2, 1, 1, 4], [2, 3, 4, 5], ["Expand", "MatMul"]),
        ([2, 3, 6, 4], [2, 1, 4, 5], ["Expand", "MatMul"]),
        ([3, 4], [2, 4, 5], ["Unsqueeze", "Expand", "MatMul"]),
        ([2, 1, 3, 4], [7, 4, 5], ["Expand", "Unsqueeze", "Expand", "MatMul"]),
        ([2, 3, 1], [1, 5], ["Mul"]),
        ([2, 3, 1], [2, 1, 5], ["Mul"]),
        ([3, 1], [1, 1], ["Mul"]),
        ([6, 4], [4, 1], ["Transpose", "Mul", "ReduceSum"]),
        ([2, 3, 1, 4], [2, 3, 4, 1], ["Transpose", "Mul", "ReduceSum"]),
    ],
)
def test_a_product_leaves_aicpu_for_aicore(lower, a, b, ops):
    model = product(a, b)
    assert engines(model)[Engine.AICPU] == 1
    done = lower(model, ORIGIN)
    assert done.ops == ops
    assert done.count("matmul_310p") == 1
    assert Engine.AICPU not in engines(done.model)


@pytest.mark.parametrize(("a", "b"), [([2, 3, 4], [2, 4, 5]), (["B", 3, "T", 4], ["B", 3, 4, "T"])])
def test_what_the_vector_form_takes_stays(lower, a, b):
    assert lower(product(a, b), ORIGIN).ops == ["MatMul"]


@pytest.mark.parametrize("target", ["910B4", "310P3", "310P3,precision=cube_fp16in_fp32out"])
def test_other_targets_keep_their_matrices(lower, target):
    assert lower(product([2, 3, 4], [4, 5]), target, compare=False).ops == ["MatMul"]


def test_float16_is_computed_by_the_matrix_unit(lower):
    model = product([3, 4], [4, 5])
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    assert lower(model, ORIGIN, rtol=1e-2).ops == ["MatMul"]


def test_one_open_axis_becomes_the_rows(lower):
    done = lower(product([2, "T", 4], [4, 5], weight=True), ORIGIN)
    assert done.ops == ["Reshape", "MatMul", "Reshape"]
    assert list(done.model.graph.initializer[0].dims) in ([1, 4, 5], [3])


def test_an_open_batch_is_asked_for_and_then_used(lower):
    model = product(["B", "T", 4], [4, 5], weight=True)
    refused = lower(model, ORIGIN)
    assert refused.refusal("matmul_310p") == (
        "float32 on 310P needs static batch axes, and those of [B, T, 4] @ [4, 5] are open: give the batch with "
        "--input-shape (-1 leaves an axis open), or compile with precision=fp16"
    )
    assert refused.ops == ["MatMul"]
    bound = lower(model, ORIGIN, input_shapes={"a": [2, -1, 4]}, feeds={"a": np.ones((2, 7, 4), np.float32)})
    assert bound.count("matmul_310p") == 1
    dims = bound.model.graph.input[0].type.tensor_type.shape.dim
    assert (dims[0].dim_value, dims[1].dim_param) == (2, "T")


def test_an_open_axis_cannot_be_a_number_of_copies(lower):
    done = lower(product([1, 3, 4], ["B", 4, 5]), ORIGIN)
    assert "[1, 3, 4] @ [B, 4, 5] are open" in done.refusal("matmul_310p")


def test_one_weight_with_many_readers_stays_one_constant(lower):
    model = product([3, 4], [4, 4], weight=True)
    model.graph.node.append(helper.make_node("MatMul", ["y", "b"], ["z"], "again"))
    model.graph.output[0].name = "z"
    done = lower(model, ORIGIN)
    assert done.count("lifted_weights") == 2
    weights = [t for t in done.model.graph.initializer if t.data_type == TensorProto.FLOAT]
    assert [(t.name, list(t.dims)) for t in weights] == [("b", [1, 4, 4])]


def test_a_matrix_that_others_read_keeps_its_shape(lower):
    model = product([3, 4], [4, 5], weight=True)
    model.graph.node.append(helper.make_node("Neg", ["b"], ["negative"], "reader"))
    model.graph.output.append(helper.make_tensor_value_info("negative", TensorProto.FLOAT, [4, 5]))
    done = lower(model, ORIGIN)
    assert done.count("lifted_weights") == 0
    assert "Unsqueeze" in done.ops


@pytest.mark.parametrize("shared", [False, True])
def test_weights_outside_the_file_are_not_moved(tmp_path, shared):
    model = product([3, 40], [40, 50], weight=True)  # 8 kB: above what is read as structure
    if shared:
        model.graph.node.append(helper.make_node("Neg", ["b"], ["negative"], "reader"))
        model.graph.output.append(helper.make_tensor_value_info("negative", TensorProto.FLOAT, [40, 50]))
    source, out = tmp_path / "g.onnx", tmp_path / "out.onnx"
    onnx.save(model, source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = (tmp_path / "weights.bin").read_bytes()
    report = patch_file(source, out, Target.parse(ORIGIN))
    assert report.counts == {"matmul_310p": 1, "lifted_weights": 1}
    assert (tmp_path / "weights.bin").read_bytes() == before
    light = onnx.load(out, load_external_data=False)
    outside = [t for t in light.graph.initializer if t.external_data]
    assert sorted(list(t.dims) for t in outside) == ([[1, 40, 50], [40, 50]] if shared else [[1, 40, 50]])
    assert len({tuple((e.key, e.value) for e in t.external_data) for t in outside}) == 1
    feeds = {"a": np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)}
    wanted, found = (run_replacement(onnx.load(path), feeds) for path in (source, out))
    for want, got in zip(wanted, found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shapes_that_matmul_takes_end_on_aicore(data):
    m, k, n = (data.draw(st.integers(1, 4)) for _ in range(3))
    full = data.draw(st.lists(st.integers(1, 3), max_size=3))
    batches = [
        [d if data.draw(st.booleans()) else 1 for d in full][data.draw(st.integers(0, len(full))) :] for _ in range(2)
    ]
    model = product([*batches[0], m, k], [*batches[1], k, n], weight=data.draw(st.booleans()))
    patched, report = apply_lowerings(model, Target.parse(ORIGIN))
    assert not report.refusals
    assert Engine.AICPU not in engines(patched)
    rng = np.random.default_rng(0)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for want, got in itertools.zip_longest(run_replacement(model, feeds), run_replacement(patched, feeds)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
