"""Engines: which node runs where, for which dtype, chip and precision mode, and what the findings advise."""

from __future__ import annotations

import onnx
import pytest

from op_patches.readiness import ReadinessReport, Severity, check_model, summary_line
from op_patches.targets import Engine, Target

A2 = Target.parse("910B4")
P3 = Target.parse("310P3")
P3_ORIGIN = Target.parse("310P3,precision=origin")


def _check(text: str, target: Target = A2, opset: int = 17, **shapes: list[int]) -> ReadinessReport:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')
    return check_model(model, target, shapes)


def _engine(text: str, target: Target = A2, opset: int = 17) -> Engine:
    """The engine of the only node in the text that is no constant."""
    report = _check(text, target, opset)
    assert report.num_nodes == 1, report.engines
    return next(engine for engine, count in report.engines.items() if count)


@pytest.mark.parametrize(
    ("text", "on_a2", "on_310p"),
    [
        ("g (float[2,4] x) => (float[2,4] y) { y = Neg (x) }", Engine.AICORE, Engine.AICORE),
        ("g (bfloat16[2,4] x) => (bfloat16[2,4] y) { y = Tanh (x) }", Engine.AICORE, Engine.NONE),
        ("g (bool[2] c, bool[2] x) => (bool[2] y) { y = Where (c, x, x) }", Engine.NONE, Engine.NONE),
        ("g (bool[2] c, int64[2] x) => (int64[2] y) { y = Where (c, x, x) }", Engine.AICORE, Engine.AICORE),
        ("g (int64[2] x) => (int64[2] y) { y = Div (x, x) }", Engine.AICPU, Engine.AICPU),
        ("g (int64[2,4] x) => (int64[2,4] y) <int64 a = {1}> { y = CumSum (x, a) }", Engine.AICPU, Engine.AICPU),
        ("g (int64[1,4] x) => (int64[3,4] y) <int64[2] s = {3, 4}> { y = Expand (x, s) }", Engine.AICPU, Engine.AICPU),
        ("g (int32[2,4] x) => (int32[2,1] y) <int64[1] a = {1}> { y = ReduceSum (x, a) }", Engine.AICORE, Engine.AICPU),
        ("g (float[4] x, int64[1] i, float[1] u) => (float[4] y) { y = ScatterElements (x, i, u) }",
         Engine.AICORE, Engine.AICPU),
        ("g (float[4,2] x, int64[1,1] i, float[1,2] u) => (float[4,2] y) { y = ScatterND (x, i, u) }",
         Engine.AICPU, Engine.AICPU),
        ("g (double[2] x) => (double[2] y) { y = Sqrt (x) }", Engine.AICPU, Engine.AICPU),
        ("g (float[2,3] x, float[3,4] w) => (float[2,4] y) <> { y = Einsum <equation = \"ij,jk->ik\"> (x, w) }",
         Engine.NONE, Engine.NONE),
        ("g (float[3,3] x) => (float[3,3] y) { y = Trilu (x) }", Engine.NONE, Engine.NONE),
        ("g (int64[2,3] x, int64[3,4] w) => (int64[2,4] y) { y = MatMul (x, w) }", Engine.AICPU, Engine.AICPU),
        ("g (float[2,3] x) => (int64[2] y) { y = Shape (x) }", Engine.LOCAL, Engine.LOCAL),
        ("g (float[2,6] x) => (float[3,4] y) <int64[2] s = {3, 4}> { y = Reshape (x, s) }", Engine.LOCAL, Engine.LOCAL),
        ("g (float[2,6] x) => (double[2,6] y) { y = Cast <to = 11> (x) }", Engine.AICPU, Engine.AICPU),
        ("g (bool[2,6] x, bool[2,6] z) => (bool[2,6] y) { y = And (x, z) }", Engine.AICORE, Engine.AICORE),
        ("g (float[2,6] x) => (float[2,6] y) { y = Concat <axis = 0> (x) }", Engine.LOCAL, Engine.LOCAL),
        ("g (float[2,6] x) => (float[2,6] y) { y = Elu (x) }", Engine.UNKNOWN, Engine.UNKNOWN),
        ("g (float[2,6] x) => (float[2,6] y) { y = Gelu (x) }", Engine.NONE, Engine.NONE),
    ],
)  # fmt: skip
def test_a_node_runs_where_the_tables_say(text: str, on_a2: Engine, on_310p: Engine) -> None:
    opset = 20 if "Gelu" in text else 17
    assert _engine(text.replace("<> ", ""), A2, opset) is on_a2
    assert _engine(text.replace("<> ", ""), P3, opset) is on_310p


def test_slice_and_top_k_leave_aicpu_when_their_parameters_are_constant() -> None:
    constant = "g (float[8] x) => (float[2] y) <int64[1] s = {0}, int64[1] e = {2}> { y = Slice (x, s, e) }"
    computed = "g (float[8] x, int64[1] s, int64[1] e) => (float[M] y) { y = Slice (x, s, e) }"
    assert _engine(constant) is Engine.AICORE
    assert _engine(computed) is Engine.AICPU
    top = "g ({}[8] x) => ({}[2] y, int64[2] i) <int64[1] k = {{2}}> {{ y, i = TopK (x, k) }}"
    assert _engine(top.format("float", "float")) is Engine.AICORE
    assert _engine(top.format("int32", "int32")) is Engine.AICPU


@pytest.mark.parametrize(
    ("a", "b", "origin"),
    [
        ("1,4,8", "8,8", Engine.AICPU),  # unequal ranks
        ("2,4,8", "2,8,8", Engine.AICORE),  # the static vector form
        ("2,4,8", "1,8,8", Engine.AICPU),  # batches that broadcast
        ("2,4,1", "2,1,8", Engine.AICPU),  # last axis 1
        ("4,8", "8,8", Engine.AICPU),  # rank 2
        ("N,4,8", "N,8,8", Engine.AICPU),  # not static
    ],
)
def test_float32_matmul_on_310p_needs_equal_static_batches_unless_fp16_is_allowed(
    a: str, b: str, origin: Engine
) -> None:
    text = f"g (float[{a}] x, float[{b}] w) => (float[R, S, T] y) {{ y = MatMul (x, w) }}"
    assert _engine(text, P3_ORIGIN) is origin
    assert _engine(text, P3) is Engine.AICORE
    assert _engine(text, A2) is Engine.AICORE


def test_mixed_precision_reaches_the_matrix_unit_only() -> None:
    matmul = "g (float[4,8] x, float[8,8] w) => (float[4,8] y) { y = MatMul (x, w) }"
    assert _engine(matmul, Target.parse("310P3,precision=mixed_float16")) is Engine.AICORE
    assert _engine(matmul, Target.parse("310P3,precision=cube_fp16in_fp32out")) is Engine.AICORE


def test_the_type_of_an_inner_tensor_decides() -> None:
    report = _check("g (float[2] x) => (bool[2] y) { c = Greater (x, x)  d = Not (c)  y = Where (c, d, c) }")
    (finding,) = report.of(Severity.NO_KERNEL)
    assert (finding.op_type, finding.code, finding.lowering) == ("Where", "EZ3002", "where_bool")
    assert "SelectV2" in finding.message
    assert "bool" in finding.message
    assert report.engines == {Engine.AICORE: 2, Engine.NONE: 1}


def test_types_travel_behind_an_operator_that_onnx_does_not_know() -> None:
    report = _check("g (int64[2] x) => (int64[2] y) { h = Mystery (x)  y = Div (h, h) }")
    assert [f.op_type for f in report.of(Severity.AICPU)] == ["Div"]


def test_binding_an_axis_folds_the_shape_arithmetic() -> None:
    text = """g (float[B, N] x) => (float[B, N] y) <int64 one = {1}, int64 two = {2}> {
              s = Shape (x)  n = Gather (s, one)  h = Div (n, two)  hh = Mul (h, two)  u = Unsqueeze (hh, a)
              y = Neg (x)  a = Constant <value: tensor = int64[1] {0}> () }"""
    assert [f.op_type for f in _check(text).of(Severity.AICPU)] == ["Div"]
    bound = _check(text, x=[1, 8])
    assert bound.of(Severity.AICPU) == ()
    assert bound.engines == {Engine.LOCAL: 5, Engine.AICORE: 1}


def test_a_constant_subgraph_that_ge_cannot_fold_is_slow() -> None:
    report = _check("g (float[2] x) => (float[2] y) <float[2] k = {1, 2}> { s = Sin (k)  y = Add (x, s) }")
    (finding,) = report.of(Severity.SLOW)
    assert (finding.rule, finding.op_type) == ("slow.unfolded-constant", "Sin")
    folded = _check("g (float[2] x) => (float[2] y) <float[2] k = {1, 2}> { s = Neg (k)  y = Add (x, s) }")
    assert folded.of(Severity.SLOW) == ()


def test_a_matmul_with_a_vector_and_a_sum_that_broadcasts_fail_after_the_parser() -> None:
    vector = _check("g (float[3] x, float[3,4] w) => (float[4] y) { y = MatMul (x, w) }")
    assert [f.rule for f in vector.of(Severity.FAILS)] == ["kernel.operand-shape"]
    unequal = _check("g (float[3] x, float[2,3] w) => (float[2,3] y) { y = Sum (x, w) }")
    assert [f.rule for f in unequal.of(Severity.FAILS)] == ["kernel.operand-shape"]
    assert _check("g (float[2,3] x) => (float[2,3] y) { y = Sum (x, x) }").of(Severity.FAILS) == ()


def test_sequences_run_on_the_host_and_block() -> None:
    report = _check(
        "g (float[2] x) => (float[2] y) <int64 k = {0}> { s = SequenceConstruct (x)  y = SequenceAt (s, k) }"
    )
    assert report.engines == {Engine.HOST: 2}
    assert {f.rule for f in report.blocking} == {"kernel.host-only"}


def test_a_half_precision_layer_norm_without_bias_mixes_types() -> None:
    half = "g (float16[2,4] x, float16[4] s) => (float16[2,4] y) { y = LayerNormalization (x, s) }"
    assert [f.op_type for f in _check(half).of(Severity.NO_KERNEL)] == ["LayerNormalization"]
    assert _check(half.replace("float16", "float")).blocking == ()


@pytest.mark.parametrize(
    ("constant", "target", "rule"),
    [
        ("-3.4028234e38", "910B4,precision=fp16", "precision.beyond-float16"),
        ("-3.4028234e38", "910B4", None),
        ("-10000.0", "910B4,precision=fp16", None),
    ],
)
def test_mask_constants_beyond_float16_are_a_precision_risk(constant: str, target: str, rule: str | None) -> None:
    text = f"""g (bool[2] c, float[2] x) => (float[2] y) {{
               m = Constant <value: tensor = float[1] {{{constant}}}> ()  y = Where (c, x, m) }}"""
    rules = {f.rule for f in _check(text, Target.parse(target)).of(Severity.PRECISION)}
    assert rules == ({rule} if rule else set())


def test_infinite_constants_and_sums_of_squares_are_precision_risks() -> None:
    graph = onnx.parser.parse_graph("g (float[2,4] x) => (float[2,4] y) { y = Add (x, m) }")
    graph.initializer.append(onnx.helper.make_tensor("m", onnx.TensorProto.FLOAT, [1], [float("-inf")]))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    assert [f.rule for f in check_model(model, A2).of(Severity.PRECISION)] == ["precision.infinite-constant"]
    square = "g (float[2,4] x) => (float[2,1] y) { s = Mul (x, x)  y = ReduceMean <axes = [1]> (s) }"
    assert _check(square).of(Severity.PRECISION) == ()
    fp16 = _check(square, Target.parse("910B4,precision=fp16"))
    assert [f.rule for f in fp16.of(Severity.PRECISION)] == ["precision.sum-of-squares"]


@pytest.mark.parametrize(
    ("shapes", "code"),
    [
        ({"x": [1, 8]}, None),
        ({"z": [1, 8]}, "E10016"),
        ({"x": [1, 8, 1]}, "E10049"),
        ({"x": [0, 8]}, "E10011"),
        ({"x": [1, 9]}, "E14001"),
        ({"x": [-1, 8]}, None),
    ],
)
def test_input_shapes_are_compared_with_the_graph(shapes: dict[str, list[int]], code: str | None) -> None:
    report = _check("g (float[B, 8] x) => (float[B, 8] y) { y = Neg (x) }", **shapes)
    assert [f.code for f in report.of(Severity.FAILS)] == ([code] if code else [])
    open_axes = [f for f in report.findings if f.rule == "shape.open-axis"]
    assert bool(open_axes) == (shapes.get("x", [-1])[0] < 1)


def test_a_name_that_input_shape_cannot_carry_fails() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Neg (x) }'
    )
    model.graph.input[0].name = model.graph.node[0].input[0] = "a;b"
    (finding,) = check_model(model, A2).blocking
    assert (finding.code, finding.lowering) == ("E10016", "names")


def test_the_summary_says_verdict_engines_and_what_falls_back() -> None:
    report = _check("g (int64[2] x) => (int64[2] y) { h = Div (x, x)  y = Neg (h) }")
    assert summary_line(report) == (
        "g: ready for cann=8.5,soc=Ascend910B4,precision=origin; 2 nodes: 1 on AICore, 1 on AICPU;"
        " 1 falls back to AICPU, 1 precision risk"
    )
    refused = _check("g (float[2,3] x) => (float[3,2] y) { y = Transpose (x) }")
    assert "NOT ready (1 blocking)" in summary_line(refused)
