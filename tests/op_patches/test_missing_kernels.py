"""Operators without an AICore kernel: scatter, TopK, int64 and bool data, IsNaN."""

from __future__ import annotations

import numpy as np
import pytest

V85 = "cann=8.5,soc=Ascend910B4,precision=origin"
V91 = "cann=9.1,soc=Ascend910B4,precision=origin"
P310 = "cann=9.1,soc=Ascend310P3,precision=fp16"


def scatter_nd(data, indices, updates, kind="float", reduction=""):
    attrs = f'<reduction = "{reduction}">' if reduction else ""
    return f"""g ({kind}[{data}] x, int64[{indices}] i, {kind}[{updates}] u) => ({kind}[{data}] y)
    {{ y = ScatterND {attrs} (x, i, u) }}"""


@pytest.mark.parametrize(
    ("data", "indices", "updates"),
    [
        ("7,3", "2,1", "2,3"),
        ("4,5,3", "6,2", "6,3"),
        ("4,5", "2,3,2", "2,3"),
        ("9", "4,1", "4"),
        ("1,2,6,4", "1,1", "1,2,6,4"),
    ],
)
@pytest.mark.parametrize("kind", ["float", "int64", "bool"])
def test_scatter_nd_is_comparison_gather_and_where(lower, data, indices, updates, kind):
    sizes = [int(n) for n in data.split(",")]
    depth = int(indices.split(",")[-1])
    rng = np.random.default_rng(2)
    count = int(np.prod([int(n) for n in indices.split(",")[:-1]]))
    places = rng.permutation(int(np.prod(sizes[:depth])))[:count]  # equal indices are undefined in ONNX
    index = np.stack(np.unravel_index(places, sizes[:depth]), -1).reshape([int(n) for n in indices.split(",")])
    index[..., 0] -= sizes[0] * (rng.random(index.shape[:-1]) < 0.5)  # some count from the end
    dtype = {"float": np.float32, "int64": np.int64, "bool": np.bool_}[kind]
    feeds = {
        "x": rng.integers(0, 2, sizes).astype(dtype),
        "i": index.astype(np.int64),
        "u": rng.integers(0, 2, [int(n) for n in updates.split(",")]).astype(dtype),
    }
    result = lower(scatter_nd(data, indices, updates, kind), feeds=feeds)
    assert result.count("scatter") == 1
    assert not {"ScatterND"} & set(result.ops)


@pytest.mark.parametrize("reduction", ["add", "mul"])
def test_scatter_nd_reductions(lower, reduction):
    feeds = {
        "x": np.float32([[1, 2], [3, 4], [5, 6]]),
        "i": np.int64([[2], [0], [2]]),
        "u": np.float32([[1, 1.5], [2, 2], [3, -1]]),
    }
    assert lower(scatter_nd("3,2", "3,1", "3,2", reduction=reduction), feeds=feeds).count("scatter") == 1


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter_elements_with_every_reduction(lower, reduction, axis):
    shape = "4,3,5"
    indices = ["2,3,5", "4,2,5", "4,3,2"][axis]
    graph = f"""g (float[{shape}] x, int64[{indices}] i, float[{indices}] u) => (float[{shape}] y)
    {{ y = ScatterElements <axis = {axis}, reduction = "{reduction}"> (x, i, u) }}"""
    rng = np.random.default_rng(4)
    dims = [int(n) for n in indices.split(",")]
    order = np.argsort(rng.random(dims), axis=axis)
    feeds = {
        "x": rng.standard_normal([4, 3, 5]).astype(np.float32),
        "i": order.astype(np.int64) - 2,  # distinct along the axis, some negative
        "u": rng.standard_normal(dims).astype(np.float32),
    }
    result = lower(graph, P310, opset=18, feeds=feeds)
    assert result.count("scatter") == 1


def test_scatter_elements_stays_where_it_has_a_kernel(lower):
    graph = """g (float[4,3] x, int64[2,3] i, float[2,3] u) => (float[4,3] y) { y = ScatterElements (x, i, u) }"""
    assert lower(graph, V91).count("scatter") == 0


@pytest.mark.parametrize(("target", "count"), [(V85, 1), (V91, 0)])
def test_a_reduction_that_8_5_drops_silently_is_lowered(lower, target, count):
    graph = """g (float[4,3] x, int64[2,3] i, float[2,3] u) => (float[4,3] y)
    { y = ScatterElements <reduction = "add"> (x, i, u) }"""
    assert lower(graph, target).count("scatter") == count


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (scatter_nd("N,3", "2,1", "2,3"), "open axes"),
        (scatter_nd("9000,3", "3000,1", "3000,3"), "too many comparisons"),
        (
            """g (float[4,3] x, int64[2,2] i, float[2,2] u) => (float[4,3] y)
            { y = ScatterElements <reduction = "add"> (x, i, u) }""",
            "shorter than the data",
        ),
    ],
)
def test_scatter_refusals(lower, graph, reason):
    assert reason in lower(graph, compare=False).refusal("scatter")


def top_k_graph(attrs="", kind="float", k=3, shape="B,9", out="B,3"):
    return f"""g ({kind}[{shape}] x) => ({kind}[{out}] v, int64[{out}] i) <int64[1] k = {{{k}}}>
    {{ v, i = TopK {attrs} (x, k) }}"""


@pytest.mark.parametrize("attrs", ["", "<largest = 0>", "<axis = 1>", "<axis = 1, largest = 0>"])
def test_ranks_by_counting_equal_top_k(lower, attrs):
    assert lower(top_k_graph(attrs), top_k="rank").count("top_k") == 1


def test_ties_go_to_the_lower_index(lower):
    x = np.float32([[1, 5, 5, 2, 5, 1, 1, 0, 5], [0] * 9])
    for largest in (0, 1):
        result = lower(top_k_graph(f"<largest = {largest}>"), top_k="rank", feeds={"x": x})
        assert "TopK" not in result.ops


def test_another_axis_is_moved_and_moved_back(lower):
    assert lower(top_k_graph("<axis = 0>", shape="9,4", out="3,4"), top_k="rank").count("top_k") == 1


def test_one_unused_output_costs_nothing(lower):
    graph = "g (float[B,9] x) => (int64[B,3] i) <int64[1] k = {3}> { v, i = TopK (x, k) }"
    assert lower(graph, top_k="rank").ops.count("Where") == 1


def test_top_k_on_floats_is_kept_and_on_integers_lowered(lower):
    assert lower(top_k_graph()).count("top_k") == 0
    assert lower(top_k_graph(kind="int64"), feeds={"x": np.arange(18).reshape(2, 9) % 7}).count("top_k") == 1


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ("g (float[B,9] x, int64[1] k) => (float[B,K] v, int64[B,K] i) { v, i = TopK (x, k) }", "computed at run time"),
        (top_k_graph(shape="B,N"), "must be a number"),
        (top_k_graph(shape="1,5000", out="1,3"), "up to 4096"),
    ],
)
def test_top_k_refusals(lower, graph, reason):
    assert reason in lower(graph, top_k="rank", compare=False).refusal("top_k")


def test_a_wrong_rank_is_caught_by_the_proof(lower, monkeypatch):
    monkeypatch.setattr("op_patches.top_k.np.tril", lambda m, k: np.triu(m, 1))  # ties to the higher index
    result = lower(top_k_graph(), top_k="rank", feeds={"x": np.float32([[1] * 9, [2] * 9])})
    assert "proof: differs" in result.refusal("top_k")


@pytest.mark.parametrize("power", [0, 1, 2, 3, 4])
def test_small_int64_powers_are_products(lower, power):
    graph = f"g (int64[B,3] x) => (int64[B,3] y) <int64 n = {{{power}}}> {{ y = Pow (x, n) }}"
    result = lower(graph, feeds={"x": np.int64([[-3, 0, 1 << 15], [7, 8, 9]])})
    assert result.count("int64_kernels") == 1 and "Pow" not in result.ops


def test_int64_expand_adds_zeros(lower):
    result = lower("g (int64[3,1] x) => (int64[2,3,4] y) <int64[3] s = {2, 3, 4}> { y = Expand (x, s) }")
    assert result.ops == ["Add"]


def test_int64_expand_to_a_computed_shape(lower):
    graph = "g (int64[1] x, float[B,3] like) => (int64[B,3] y) { s = Shape (like) y = Expand (x, s) }"
    assert lower(graph).ops == ["Shape", "ConstantOfShape", "Add"]


def test_float_pow_and_expand_stay(lower):
    graph = (
        "g (float[3,1] x) => (float[3,4] y) <int64[2] s = {3, 4}, float n = {2}> { z = Pow (x, n) y = Expand (z, s) }"
    )
    assert lower(graph).count("int64_kernels") == 0


NARROWED = {
    "CumSum": "g (bool[B,6] m) => (int64[B,6] y) <int64 a = {1}> { x = Cast <to = 7> (m) y = CumSum (x, a) }",
    "Div": "g (int32[4] m) => (int64[4] y) <int64 d = {3}> { x = Cast <to = 7> (m) y = Div (x, d) }",
    "Mod": "g (int32[4] m) => (int64[4] y) <int64 d = {3}> { x = Cast <to = 7> (m) y = Mod (x, d) }",
    "Pow": "g (bool[4] m) => (int64[4] y) <int64 d = {7}> { x = Cast <to = 7> (m) y = Pow (x, d) }",
    "Pad": """g (bool[4] m) => (int64[6] y) <int64[2] p = {1, 1}, int64 v = {-5}>
    { x = Cast <to = 7> (m) y = Pad (x, p, v) }""",
}


@pytest.mark.parametrize("op", NARROWED)
def test_int64_of_a_proven_range_is_narrowed(lower, op):
    graph = NARROWED[op].replace("B,", "2,")
    result = lower(graph)
    assert result.count("narrow_int64") == 1
    assert result.ops[-1] == "Cast"


UNPROVEN = {
    "CumSum": ("g (int64[4] x) => (int64[4] y) <int64 a = {0}> { y = CumSum (x, a) }", "no range of x"),
    "Div": ("g (int64[4] x) => (int64[4] y) <int64 d = {3}> { y = Div (x, d) }", "no range of x"),
    "CumSum of int32": (
        "g (int32[4] m) => (int64[4] y) <int64 a = {0}> { x = Cast <to = 7> (m) y = CumSum (x, a) }",
        "result may leave int32",
    ),
    "Pow": (
        "g (int32[4] m) => (int64[4] y) <int64 d = {5}> { x = Cast <to = 7> (m) y = Pow (x, d) }",
        "result may leave int32",
    ),
}


@pytest.mark.parametrize("op", UNPROVEN)
def test_int64_of_an_open_range_is_refused(lower, op):
    graph, reason = UNPROVEN[op]
    assert reason in lower(graph).refusal("narrow_int64")


@pytest.mark.parametrize("op", ["Where", "GatherElements", "Pad"])
def test_bool_data_without_a_kernel(lower, op):
    graph = {
        "Where": "g (bool[B,4] c, bool[4] a, bool[B,1] b) => (bool[B,4] y) { y = Where (c, a, b) }",
        "GatherElements": "g (bool[3,4] x, int64[2,4] i) => (bool[2,4] y) { y = GatherElements (x, i) }",
        "Pad": "g (bool[3] x) => (bool[5] y) <int64[2] p = {1, 1}, bool v = {1}> { y = Pad (x, p, v) }",
    }[op]
    result = lower(graph)
    assert result.count("where_bool" if op == "Where" else "bool_data") == 1


def test_where_on_floats_stays(lower):
    assert lower("g (bool[4] c, float[4] a, float[4] b) => (float[4] y) { y = Where (c, a, b) }").ops == ["Where"]


@pytest.mark.parametrize(("target", "ops"), [("910B4", ["IsNaN"]), ("310P3", ["Equal", "Not"])])
def test_is_nan_where_the_chip_has_no_kernel(lower, target, ops):
    x = np.float32([1, np.nan, np.inf, 0])
    assert lower("g (float[4] x) => (bool[4] y) { y = IsNaN (x) }", target, feeds={"x": x}).ops == ops
