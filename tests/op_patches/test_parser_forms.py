"""Forms that CANN's plugins refuse or misread: small rewrites, one section each."""

from __future__ import annotations

import numpy as np
import pytest


def test_transpose_without_perm_gets_the_reversed_axes(lower):
    result = lower("g (float[2,3,4] x) => (float[4,3,2] y) { y = Transpose (x) }")
    assert list(result.model.graph.node[0].attribute[0].ints) == [2, 1, 0]


def test_transpose_of_an_unknown_rank_is_refused(lower):
    graph = """g (float[2,3] x, int64[K] s) => (float y)
    { z = Reshape (x, s) t = Transpose (z) y = ReduceSum <keepdims = 0> (t) }"""
    assert "rank" in lower(graph, compare=False).refusal("transpose")


def test_clip_without_bounds_is_the_identity(lower):
    assert lower("g (float[4] x) => (float[4] y) { y = Clip (x) }").ops == ["Identity"]


def test_clip_with_one_bound_stays(lower):
    assert lower("g (float[4] x) => (float[4] y) <float low = {0.0}> { y = Clip (x, low) }").ops == ["Clip"]


def test_dropout_is_the_identity_and_its_mask_is_true(lower):
    result = lower("g (float[2,4] x) => (float[2,4] y, bool[2,4] m) { y, m = Dropout (x) }")
    assert result.count("dropout") == 1 and "Dropout" not in result.ops


def test_dropout_in_training_is_refused(lower):
    graph = "g (float[2,4] x, bool t) => (float[2,4] y) <float r = {0.5}> { y = Dropout (x, r, t) }"
    assert "eval mode" in lower(graph, compare=False).refusal("dropout")


@pytest.mark.parametrize(
    ("attrs", "size"), [("start = 1", 2), ("end = 2", 2), ("start = -2, end = -1", 1), ("start = 0, end = 9", 3)]
)
def test_shape_with_bounds_becomes_shape_and_slice(lower, attrs, size):
    result = lower(f"g (float[A,B,C] x) => (int64[{size}] y) {{ y = Shape <{attrs}> (x) }}")
    assert result.ops == ["Shape", "Slice"]


INT64_MAX, INT64_MIN = (1 << 63) - 1, -(1 << 63)


def slice_graph(start, end, step, length="B,10"):
    return f"""g (float[{length}] x) => (float[B,K] y)
    <int64[1] s = {{{start}}}, int64[1] e = {{{end}}}, int64[1] a = {{1}}, int64[1] t = {{{step}}}>
    {{ y = Slice (x, s, e, a, t) }}"""


@pytest.mark.parametrize("length", ["B,10", "B,N"])
@pytest.mark.parametrize(
    ("start", "end", "step"), [(2, INT64_MAX, 1), (-3, INT64_MAX, 1), (9, INT64_MIN + 1, -1), (INT64_MAX, 2, -2)]
)
def test_bounds_beyond_int32_select_the_same_elements(lower, start, end, step, length):
    x = np.arange(20, dtype=np.float32).reshape(2, 10)
    result = lower(slice_graph(start, end, step, length), feeds={"x": x})
    assert result.count("slice_bounds") == 1


def test_ordinary_bounds_stay(lower):
    assert lower(slice_graph(1, 5, 1)).count("slice_bounds") == 0


def test_computed_bounds_are_refused(lower):
    graph = "g (float[8] x, int64[1] s, int64[1] e) => (float[K] y) { y = Slice (x, s, e) }"
    assert "AICPU" in lower(graph).refusal("slice_bounds")


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_the_last_extreme_is_the_first_of_the_reversed_axis(lower, op, keepdims):
    shape = "B,1" if keepdims else "B"
    graph = f"""g (float[B,6] x) => (int64[{shape}] y)
    {{ y = {op} <axis = 1, keepdims = {keepdims}, select_last_index = 1> (x) }}"""
    x = np.float32([[1, 3, 3, 0, 0, 2], [5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5]])
    assert lower(graph, feeds={"x": x}).count("arg_extrema") == 1


def test_the_last_extreme_of_an_open_axis_is_refused(lower):
    graph = "g (float[B,N] x) => (int64[B,1] y) { y = ArgMax <axis = 1, select_last_index = 1> (x) }"
    assert "open" in lower(graph).refusal("arg_extrema")


@pytest.mark.parametrize("batch_dims", [1, 2])
def test_gather_nd_with_batch_axes(lower, batch_dims):
    rest = "2,4" if batch_dims == 1 else "2"
    graph = f"""g (float[2,3,4] x, int64[2,3,1] i) => (float[2,3{",4" if batch_dims == 1 else ""}] y)
    {{ y = GatherND <batch_dims = {batch_dims}> (x, i) }}"""
    assert rest
    assert lower(graph).count("gather_nd") == 1


def test_gather_nd_with_open_batch_axes_is_refused(lower):
    graph = "g (float[B,3] x, int64[B,1] i) => (float[B] y) { y = GatherND <batch_dims = 1> (x, i) }"
    assert "open" in lower(graph).refusal("gather_nd")


@pytest.mark.parametrize("op", ["Sum", "Mean"])
def test_sums_that_broadcast_become_adds(lower, op):
    graph = f"g (float[B,4] a, float[4] b, float[1] c) => (float[B,4] y) {{ y = {op} (a, b, c) }}"
    result = lower(graph)
    assert result.ops[:2] == ["Add", "Add"]


def test_sums_of_equal_shapes_stay(lower):
    assert lower("g (float[B,4] a, float[B,4] b) => (float[B,4] y) { y = Sum (a, b) }").ops == ["Sum"]


def test_cast_like_becomes_cast(lower):
    result = lower("g (float[4] x, int32[2] like) => (int32[4] y) { y = CastLike (x, like) }")
    assert result.ops == ["Cast"]


def test_cast_like_an_unknown_type_is_refused(lower):
    graph = "g (float[4] x) => (float[4] y) { z = odd.Thing (x) y = CastLike (x, z) }"
    assert "unknown" in lower(graph, domains='"odd": 1', compare=False).refusal("cast_like")


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [-2, 0, 1, 9])
@pytest.mark.parametrize("kind", ["float", "bool", "int64"])
def test_trilu_is_a_constant_mask(lower, upper, k, kind):
    graph = f"""g ({kind}[B,4,5] x) => ({kind}[B,4,5] y) <int64 k = {{{k}}}> {{ y = Trilu <upper = {upper}> (x, k) }}"""
    assert lower(graph, compare=kind != "bool").count("trilu") == 1


def test_trilu_keeps_no_infinity_where_it_cuts(lower):
    x = np.full((1, 4, 5), -np.inf, np.float32)
    lower("g (float[B,4,5] x) => (float[B,4,5] y) { y = Trilu (x) }", feeds={"x": x})


def test_trilu_of_open_axes_or_a_computed_k_is_refused(lower):
    open_axes = lower("g (float[T,T] x) => (float[T,T] y) { y = Trilu (x) }")
    assert "open" in open_axes.refusal("trilu")
    computed = lower("g (float[4,4] x, int64 k) => (float[4,4] y) { y = Trilu (x, k) }")
    assert "computed at run time" in computed.refusal("trilu")


EQUATIONS = [
    ("bhqd,bhkd->bhqk", "2,3,4,5", "2,3,6,5", "2,3,4,6"),
    ("bhqk,bhkd->bhqd", "2,3,4,6", "2,3,6,5", "2,3,4,5"),
    ("ij,jk->ik", "3,4", "4,5", "3,5"),
    ("ij,kj->ki", "3,4", "5,4", "5,3"),
    ("i,j->ij", "3", "4", "3,4"),
    ("bi,bj->bij", "2,3", "2,4", "2,3,4"),
    ("bi,bi->b", "2,3", "2,3", "2"),
    ("abc,cd->abd", "2,3,4", "4,5", "2,3,5"),
    ("abcd,cdef->abef", "2,3,4,5", "4,5,2,3", "2,3,2,3"),
    ("ij,ij->ij", "3,4", "3,4", "3,4"),
    ("ijk,k->i", "3,4,5", "5", "3"),
    ("ij,jk", "3,4", "4,5", "3,5"),
]


@pytest.mark.parametrize(("equation", "a", "b", "y"), EQUATIONS)
def test_einsum_of_two_operands(lower, equation, a, b, y):
    graph = f'g (float[{a}] a, float[{b}] b) => (float[{y}] y) {{ y = Einsum <equation = "{equation}"> (a, b) }}'
    result = lower(graph)
    assert result.count("einsum") == 1 and "Einsum" not in result.ops


@pytest.mark.parametrize(
    ("equation", "y"), [("ijk->kji", "4,3,2"), ("ijk->ik", "2,4"), ("ijk->ijk", "2,3,4"), ("ijk->", "")]
)
def test_einsum_of_one_operand(lower, equation, y):
    kind = f"float[{y}]" if y else "float"
    graph = f'g (float[2,3,4] x) => ({kind} y) {{ y = Einsum <equation = "{equation}"> (x) }}'
    assert lower(graph).count("einsum") == 1


@pytest.mark.parametrize(
    ("equation", "inputs", "reason"),
    [
        ("...ij,...jk->...ik", "float[2,3,4] a, float[2,4,5] b", "ellipsis"),
        ("ii->i", "float[3,3] a", "diagonal"),
        ("ij,jk,kl->il", "float[2,3] a, float[3,4] b, float[4,5] c", "more than two"),
        ("ij,jk->ik", "int32[2,3] a, int32[3,4] b", "integers"),
        ("abcd,cdef->abef", "float[A,B,4,5] a, float[4,5,E,F] b", "more than one is open"),
    ],
)
def test_einsum_says_what_it_does_not_write(lower, equation, inputs, reason):
    names = ", ".join(part.split()[-1] for part in inputs.split(", "))
    graph = f'g ({inputs}) => (float y) {{ y = Einsum <equation = "{equation}"> ({names}) }}'
    assert reason in lower(graph, compare=False).refusal("einsum")


def test_a_sum_over_no_axes_is_the_identity(lower):
    graph = "g (float[B,4] x) => (float[B,4] y) { y = ReduceSum <noop_with_empty_axes = 1> (x) }"
    assert lower(graph).ops == ["Identity"]


def test_a_sum_over_axes_keeps_them_whatever_the_attribute_says(lower):
    graph = """g (float[B,4] x) => (float[B,1] y) <int64[1] a = {1}>
    { y = ReduceSum <noop_with_empty_axes = 1> (x, a) }"""
    assert lower(graph).ops == ["ReduceSum"]


def test_a_sum_over_computed_axes_is_refused(lower):
    graph = "g (float[B,4] x, int64[N] a) => (float[B,1] y) { y = ReduceSum <noop_with_empty_axes = 1> (x, a) }"
    assert "run time only" in lower(graph, compare=False).refusal("reduce_noop")


def test_a_fill_value_in_typed_fields_becomes_raw_data(lower):
    graph = "g (int64[2] s) => (bool[A,B] y) { y = ConstantOfShape <value = bool[1] {1}> (s) }"
    result = lower(graph, feeds={"s": np.int64([2, 3])})
    assert result.count("constant_of_shape") == 1
    assert result.model.graph.node[0].attribute[0].t.HasField("raw_data")
