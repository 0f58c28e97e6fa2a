"""The proof itself: what counts as equal, and what happens when nothing can be measured."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from op_patches.evaluate import half_run
from op_patches.graph_view import views
from op_patches.proof import ProofFailed, Prover, Site, difference
from op_patches.ranges import Range, value_range
from op_patches.targets import Target

NAN, INF = np.nan, np.inf


def f32(*values):
    return np.asarray(values, np.float32)


@pytest.mark.parametrize(
    ("reference", "got", "want"),
    [
        (f32(1, 2), f32(1, 2.5), 0.5),
        (f32(1, 2), f32(1, NAN), INF),
        (f32(1, NAN), f32(1, 2), INF),
        (f32(1, NAN), f32(1, NAN), 0.0),
        (f32(1, INF), f32(1, INF), 0.0),
        (f32(1, INF), f32(1, -INF), INF),
        (f32(1, 2), f32(1, INF), INF),
        (f32(1, 2), f32(1, 2).reshape(2, 1), INF),
        (np.int64([1, 2]), np.int64([1, 3]), INF),
        (np.int64([1, 2]), f32(1, 2), INF),
        (np.array([True]), np.array([True]), 0.0),
        (np.array(["a"], dtype=object), np.array([b"a"]), 0.0),
        (np.array(["a"], dtype=object), np.array([b"b"]), INF),
    ],
)
def test_nan_infinity_shape_and_kind_must_agree(reference, got, want):
    assert difference(reference, got) == want


def test_comparing_nothing_fails():
    with pytest.raises(ProofFailed, match="empty"):
        difference(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))


def site(before: str, after: str, shape: str = "B,4") -> Site:
    """The graph `before` against the nodes of `after`, both from x to y."""

    def parse(body: str) -> onnx.ModelProto:
        text = f'<ir_version: 9, opset_import: ["": 17]> g (float[{shape}] x) => (float[{shape}] y) {{ {body} }}'
        return onnx.parser.parse_model(text)

    (view,) = views(parse(before), Target.parse("310P3"))
    return Site(view, view.nodes, list(parse(after).graph.node), {}, {"": 17})


def test_equal_sites_pass_with_numbers():
    proof = Prover().prove(site("y = Mul (x, x)", "y = Mul (x, x)"))
    assert proof.cases == 7 and proof.random < 1e-6 and proof.half is not None


def test_float16_overflows_of_the_replacement_are_counted():
    proof = Prover().prove(site("y = Abs (x)", "a = Mul (x, x) y = Sqrt (a)"))
    assert proof.half is not None and proof.half.overflows > 0


def test_a_nan_in_float16_is_counted():
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { a = Mul (x, x) y = Sub (a, a) }'
    )
    _, overflows, nans = half_run(model, {"x": f32(300, 1)}, keep_float32=False)
    assert (overflows, nans) == (1, 1)
    assert half_run(model, {"x": f32(300, 1)}, keep_float32=True)[1:] == (0, 0)


@pytest.mark.parametrize("wrong", ["y = Neg (x)", "a = Add (x, x) y = Identity (a)", "y = Sqrt (x)", "y = Relu (x)"])
def test_another_function_fails(wrong):
    with pytest.raises(ProofFailed, match="differs"):
        Prover().prove(site("y = Identity (x)", wrong))


def test_a_replacement_that_differs_on_extremes_only_fails():
    with pytest.raises(ProofFailed, match="mean 1000"):
        # exp(-|x| / 10^6) is 1 to five digits until |x| reaches the thousands
        text = "a = Abs (x) k = Constant <value_float = -1e-6> () b = Mul (a, k) c = Exp (b) y = Mul (x, c)"
        Prover().prove(site("y = Identity (x)", text))


def test_an_unknown_shape_is_not_measured_and_so_fails():
    with pytest.raises(ProofFailed, match="not measured"):
        text = """<ir_version: 9, opset_import: ["": 17]> g (float[2] a, int64[K] s) => (float[2] y)
        { x = Reshape (a, s) y = Neg (x) }"""
        (view,) = views(onnx.parser.parse_model(text), Target.parse("910B4"))
        Prover().prove(Site(view, view.nodes[1:], view.nodes[1:], {}, {"": 17}))


def test_inputs_without_elements_are_not_measured():
    with pytest.raises(ProofFailed, match="no elements"):
        Prover().prove(site("y = Neg (x)", "y = Neg (x)", shape="0,4"))


RANGES = [
    ("b = Cast <to = 7> (m)", Range(0, 1)),
    ("a = Cast <to = 7> (m) k = Constant <value_int = 5> () b = Mul (a, k)", Range(0, 5)),
    ("a = Cast <to = 7> (m) k = Constant <value_int = 5> () b = Sub (k, a)", Range(4, 5)),
    ("a = Cast <to = 7> (m) b = Add (a, a)", Range(0, 2)),
    ("a = Cast <to = 7> (m) b = Neg (a)", Range(-1, 0)),
    ("b = ArgMax <axis = 1> (f)", Range(0, 7)),
    ("b = Shape (f)", Range(4, 8)),
    ("a = Cast <to = 7> (m) k = Constant <value_int = 0> () b = CumSum (a, k)", Range(0, 4)),
    ("a = Cast <to = 7> (m) b = ReduceSum (a)", Range(0, 4)),
    ("a = Cast <to = 7> (m) b = Concat <axis = 0> (a, w)", None),
    ("b = Identity (w)", None),
    ("b = Cast <to = 7> (f)", None),
    ("b = Cast <to = 6> (w)", Range(-(1 << 31), (1 << 31) - 1)),
    (
        "a = Cast <to = 6> (m) k = Constant <value = int32 {2147483647}> () b = Add (a, k)",
        Range(-(1 << 31), (1 << 31) - 1),
    ),
]


@pytest.mark.parametrize(("body", "want"), RANGES)
def test_ranges_follow_from_types_shapes_and_constants(body, want):
    kind = "int32" if "to = 6" in body else "int64"
    text = f"""<ir_version: 9, opset_import: ["": 17]> g (bool[4] m, float[4,8] f, int64[4] w) => ({kind}[K] b)
    {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    from op_patches.constant import CONSTANT
    from op_patches.rewriter import Run

    CONSTANT.run(Run(model, Target.parse("910B4")))
    (view,) = views(model, Target.parse("910B4"))
    assert value_range(view, "b") == want
