from __future__ import annotations

import numpy as np
import pytest

REDUCE = "g (float[B,4,6] x) => (float[B,1,6] y) <int64[1] axes = {1}> { y = %s (x, axes) }"


def version(result):
    return next(o.version for o in result.model.opset_import if o.domain == "")


@pytest.mark.parametrize(
    "op", ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare"]
)
def test_axes_of_the_reduce_family_become_an_attribute_again(lower, op):
    result = lower(REDUCE % op, opset=18)
    assert version(result) == 17
    (node,) = result.model.graph.node
    assert list(node.input) == ["x"] and {a.name for a in node.attribute} == {"axes"}


def test_a_computed_axis_is_refused_and_keeps_the_opset(lower):
    graph = "g (float[B,4] x, int64[1] axes) => (float y) { y = ReduceMean <keepdims = 0> (x, axes) }"
    result = lower(graph, opset=18, compare=False)
    assert version(result) == 18
    assert "computed at run time" in result.refusal("opset")


def test_no_axes_and_noop_is_the_identity(lower):
    graph = "g (float[B,4] x) => (float[B,4] y) { y = ReduceMean <noop_with_empty_axes = 1> (x) }"
    assert lower(graph, opset=18).ops == ["Identity"]


def test_noop_of_an_operator_that_still_maps_is_refused(lower):
    graph = "g (float[B,4] x) => (float[B,4] y) { y = ReduceL2 <noop_with_empty_axes = 1> (x) }"
    assert "still maps" in lower(graph, opset=18).refusal("opset")


def test_equal_parts_need_no_num_outputs(lower):
    graph = "g (float[B,6] x) => (float[B,3] y, float[B,3] z) { y, z = Split <axis = 1, num_outputs = 2> (x) }"
    result = lower(graph, opset=18)
    assert len(result.model.graph.node[0].input) == 1


def test_unequal_parts_get_sizes(lower):
    graph = """g (float[B,7] x) => (float[B,3] y, float[B,3] z, float[B,1] w)
    { y, z, w = Split <axis = 1, num_outputs = 3> (x) }"""
    result = lower(graph, opset=18)
    assert len(result.model.graph.node[0].input) == 2


def test_an_open_split_axis_is_refused_until_it_is_bound(lower):
    graph = "g (float[N] x) => (float[M] y, float[K] z) { y, z = Split <axis = 0, num_outputs = 2> (x) }"
    assert "split axis is open" in lower(graph, opset=18, feeds={"x": np.float32([1, 2])}).refusal("opset")
    assert version(lower(graph, opset=18, input_shapes={"x": [5]})) == 17


def test_pad_axes_become_full_pads(lower):
    graph = """g (float[B,3,4] x) => (float[B,3,7] y) <int64[2] pads = {1, 2}, int64[1] axes = {-1}, float v = {2.5}>
    { y = Pad (x, pads, v, axes) }"""
    result = lower(graph, opset=18)
    assert len(result.model.graph.node[0].input) == 3


def test_pads_of_several_axes_keep_their_sides(lower):
    graph = """g (float[B,3,4] x) => (float[B,9,8] y) <int64[4] pads = {1, 2, 3, 4}, int64[2] axes = {2, 1}>
    { y = Pad (x, pads, , axes) }"""
    assert lower(graph, opset=18).count("opset") == 2


def test_wrap_mode_is_refused(lower):
    graph = (
        """g (float[B,3] x) => (float[B,5] y) <int64[4] pads = {0, 1, 0, 1}> { y = Pad <mode = "wrap"> (x, pads) }"""
    )
    assert "mode wrap" in lower(graph, opset=19).refusal("opset")


def test_attributes_at_their_default_are_dropped(lower):
    graph = "g (float[B,3] x) => (float16[B,3] y) { y = Cast <to = 10, saturate = 1> (x) }"
    result = lower(graph, opset=19)
    assert [a.name for a in result.model.graph.node[0].attribute] == ["to"]


def test_a_younger_attribute_that_says_something_is_refused(lower):
    graph = """g (float[1,1,8] x) => (float[1,1,4] y)
    { y = AveragePool <kernel_shape = [3], dilations = [2]> (x) }"""
    assert "dilations=[2] is younger" in lower(graph, opset=19).refusal("opset")


def test_a_younger_type_is_refused(lower):
    graph = "g (bool[4] x) => (bool[1] y) { y = ReduceMax (x) }"
    result = lower(graph, opset=20, compare=False)
    assert version(result) == 20


def test_a_younger_operator_without_a_definition_is_refused(lower):
    graph = "g (float[4] x, int64[1] a) => (float[4] y) { y = CumProd (x, a) }"
    result = lower(graph, opset=26, compare=False)
    assert "younger than opset 17" in result.refusal("opset")
    assert "ONNX defines no body" in result.refusal("function_body")


def test_an_unchanged_graph_of_opset_21_is_only_relabelled(lower):
    graph = "g (float[B,4] x) => (float[B,4] y) { a = Transpose <perm = [1, 0]> (x) y = Transpose <perm = [1, 0]> (a) }"
    result = lower(graph, opset=21)
    assert version(result) == 17
    assert result.count("opset") == 1


def test_opset_11_is_raised(lower):
    graph = "g (float[B,4] x) => (float[B,4,1] y) { y = Unsqueeze <axes = [2]> (x) }"
    result = lower(graph, opset=11)
    assert version(result) == 17
    (unsqueeze,) = [n for n in result.model.graph.node if n.op_type == "Unsqueeze"]
    assert len(unsqueeze.input) == 2


def test_softmax_of_opset_11_keeps_its_flattening(lower):
    result = lower("g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax <axis = 1> (x) }", opset=11)
    assert version(result) == 17


def test_opset_7_is_refused(lower):
    result = lower("g (float[4] x) => (float[4] y) { y = Neg (x) }", opset=7)
    assert "older than 8" in result.refusal("opset")


@pytest.mark.parametrize("opset", [13, 14, 15, 16, 17])
def test_13_to_17_stay(lower, opset):
    assert version(lower("g (float[4] x) => (float[4] y) { y = Neg (x) }", opset=opset)) == opset


BODIES = {
    "Swish": ("float[B,4]", "Swish (x)", 24),
    "Mish": ("float[B,4]", "Mish (x)", 18),
    "MeanVarianceNormalization": ("float[2,3,4,5]", "MeanVarianceNormalization (x)", 17),
}


@pytest.mark.parametrize("name", ["Swish", "Mish"])
def test_an_operator_that_onnx_defines_by_a_function_is_written_out(lower, name):
    kind, call, opset = BODIES[name]
    result = lower(f"g ({kind} x) => ({kind} y) {{ y = {call} }}", opset=opset)
    assert result.count("function_body") == 1
    assert version(result) == 17


def test_an_operator_that_parses_keeps_its_name(lower):
    kind, call, opset = BODIES["MeanVarianceNormalization"]
    assert lower(f"g ({kind} x) => ({kind} y) {{ y = {call} }}", opset=opset).count("function_body") == 0


@pytest.mark.parametrize("attributes", ["", "<is_causal = 1>", "<scale = 0.3, softcap = 2.0>"])
def test_attention_23_becomes_primitives(lower, attributes):
    graph = f"""g (float[1,2,5,8] q, float[1,2,6,8] k, float[1,2,6,8] v) => (float[1,2,5,8] y)
    {{ y = Attention {attributes} (q, k, v) }}"""
    result = lower(graph, opset=23)
    assert version(result) == 17
    assert "Attention" not in result.ops and "Shape" not in result.ops
    assert not result.report.remaining


def test_attention_23_with_a_mask_and_a_past(lower):
    graph = """g (float[1,4,2,8] q, float[1,2,2,8] k, float[1,2,2,8] v, float[2,5] m,
    float[1,2,3,8] pk, float[1,2,3,8] pv) => (float[1,4,2,8] y,
    float[1,2,5,8] nk, float[1,2,5,8] nv) { y, nk, nv = Attention (q, k, v, m, pk, pv) }"""
    result = lower(graph, opset=23)
    assert version(result) == 17
    assert not result.report.remaining
