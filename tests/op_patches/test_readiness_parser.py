"""Parser rules one by one: the order of findings, the names that are made, and the opset a node is looked up at."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from op_patches import readiness
from op_patches.pipeline import steps_for
from op_patches.readiness import Severity, check_model, first_refusal, fixes, parser
from op_patches.targets import Certainty, Engine, Target

TARGET = Target.parse("910B4")


def _model(text: str, opsets: str = '"" : 17') -> onnx.ModelProto:
    return onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{opsets}]>\n{text}")


def _codes(model: onnx.ModelProto, target: Target = TARGET) -> list[str]:
    return [f.code for f in check_model(model, target).of(Severity.REFUSED)]


def test_findings_come_in_the_phases_of_the_parser() -> None:
    """Pre-check first (E13010, wherever the node is), then plugins (EZ9999), then element types (E19999)."""
    model = _model("g (int4[2] q, float[2,3] x) => (float[3,2] y) { t = Transpose (x)  y = NoSuchOp (t) }")
    assert _codes(model) == ["E13010", "EZ9999", "E19999"]
    assert first_refusal(model, TARGET) == (
        "E13010",
        "No operator plugin is registered for Op: NoSuchOp_1, optype: ai.onnx::17::NoSuchOp.",
    )


def test_no_input_comes_before_and_no_output_after_everything_else() -> None:
    model = _model("g () => () { y = NoSuchOp () }")
    assert _codes(model) == ["E16001", "E13010", "E16001"]


def test_an_unnamed_node_is_numbered_among_the_unnamed() -> None:
    model = _model("g (float[2] x) => (float[2] y) { [first] a = Neg (x)  b = Abs (a)  y = NoSuchOp (b) }")
    refusal = first_refusal(model, TARGET)
    assert refusal is not None
    assert "Op: NoSuchOp_1," in refusal[1]


@pytest.mark.parametrize(
    ("node_name", "conflict"),
    [("x", True), ("w_Initializer_0", True), ("w", False), ("Abs_0", True), ("Neg_0", False)],
)
def test_names_that_the_parser_makes_are_taken(node_name: str, conflict: bool) -> None:
    """An input node is called as the input, an initializer NAME_Initializer_N, an unnamed node TYPE_N."""
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["a"], name=node_name), helper.make_node("Abs", ["a"], ["b"]),
         helper.make_node("Add", ["b", "w"], ["y"], name="sum")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert _codes(model) == (["E13009"] if conflict else [])


def test_a_node_without_domain_takes_the_only_opset_whatever_its_domain() -> None:
    model = _model("g (float[2] x) => (float[2] y) { y = Neg (x) }", '"com.microsoft" : 1')
    refusal = first_refusal(model, TARGET)
    assert refusal is not None
    assert "optype: com.microsoft::1::Neg" in refusal[1]


def test_a_second_domain_is_refused_even_when_unused_but_not_with_explicit_domains() -> None:
    assert _codes(_model("g (float[2] x) => (float[2] y) { y = Neg (x) }", '"" : 17, "ai.onnx.ml" : 3')) == ["E16005"]
    # The rules after it look the nodes up in the default domain, wherever opset_import lists it.
    assert _codes(_model("g (float[2] x) => (float[2] y) { y = Neg (x) }", '"ai.onnx.ml" : 3, "" : 17')) == ["E16005"]
    explicit = _model("g (float[2] x) => (float[2] y) { y = ai.onnx.Neg (x) }", '"ai.onnx" : 17, "npu" : 1')
    assert _codes(explicit) == []


def test_a_domain_that_opset_import_does_not_list_is_refused() -> None:
    model = _model("g (float[2] x) => (float[2] y) { y = npu.NPUFastGelu (x) }")
    assert _codes(model) == ["E19999"]


@pytest.mark.parametrize(("opset", "codes"), [(7, ["E13010"]), (8, []), (18, []), (19, ["E13010"]), (23, ["E13010"])])
def test_the_opset_of_the_model_counts_and_there_is_no_fallback(opset: int, codes: list[str]) -> None:
    assert _codes(_model("g (float[2] x) => (float[2] y) { y = Neg (x) }", f'"" : {opset}')) == codes


def test_constant_is_built_in_at_every_opset() -> None:
    text = "g (float[1] x) => (float[1] y) { k = Constant <value: tensor = float[1] {1}> ()  y = Add (x, k) }"
    assert _codes(_model(text, '"" : 18')) == []
    refused = check_model(_model(text, '"" : 20'), TARGET)
    assert [f.op_type for f in refused.of(Severity.REFUSED)] == ["Add"]


def test_branches_of_if_are_parsed_and_bodies_of_other_operators_are_not() -> None:
    branch = _model(
        """g (bool c, float[2] x) => (float[2] y) {
           y = If (c) <then_branch = t () => (float[2] a) { a = NoSuchOp (x) },
                       else_branch = e () => (float[2] b) { b = Neg (x) }> }"""
    )
    assert [f.op_type for f in check_model(branch, TARGET).of(Severity.REFUSED)] == ["NoSuchOp"]
    loop = _model(
        """g (int64 n, bool c, float[2] x) => (float[2] y) {
           y = Loop (n, c, x) <body = b (int64 i, bool k, float[2] s) => (bool ko, float[2] so)
                               { ko = Identity (k)  so = NoSuchOp (s) }> }"""
    )
    assert [f.op_type for f in check_model(loop, TARGET).of(Severity.REFUSED)] == ["Loop"]


def test_a_local_function_is_not_expanded() -> None:
    model = _model(
        """g (float[2] x) => (float[2] y) { y = local.Twice (x) }
           <domain: "local", opset_import: ["" : 17]> Twice (a) => (b) { b = Add (a, a) }""",
        '"" : 17, "local" : 1',
    )
    assert "E13010" in _codes(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g (float[4,6] x) => (float[2,6] y, float[2,6] z) { y, z = Split <axis = 0, num_outputs = 2> (x) }", None),
        ("g (float[4,5] x) => (float[4,3] y, float[4,2] z) { y, z = Split <axis = 1, num_outputs = 2> (x) }",
         "dim_size[5] can not be evenly divided by split_size[2]."),
        ("g (float[N,6] x) => (float[M,6] y, float[M,6] z) { y, z = Split <axis = 0, num_outputs = 2> (x) }",
         "dim_size[-1] can not be evenly divided by split_size[0]."),
        ("g (float[4] x) => (float[2] y, float[2] z) { h = Neg (x)  y, z = Split <axis = 0, num_outputs = 2> (h) }",
         "the parser crashes (signal 11): it has no shape for an inner tensor"),
    ],
)  # fmt: skip
def test_split_by_count_works_on_a_static_graph_input_alone(text: str, message: str | None) -> None:
    refusal = first_refusal(_model(text, '"" : 18'), TARGET)
    assert (refusal[1] if refusal else None) == message


@pytest.mark.parametrize(
    ("text", "opset", "refused"),
    [
        ("g (float[2] x) => (float[2] y) { y = Clip (x) }", 17, True),
        ("g (float[2] x) => (float[2] y) { y = Clip (x) }", 10, False),
        ('g (float[2] x, float m) => (float[2] y) { y = Clip (x, "", m) }', 17, False),
        ("g (float[2,3] x) => (float[3,2] y) { y = Transpose (x) }", 13, True),
        ("g (float[2] x) => (bool[2] y) { y = IsInf <detect_negative = 0> (x) }", 17, True),
        ("g (float[2] x) => (bool[2] y) { y = IsInf (x) }", 17, False),
        ("g (float[2] x) => (float[2] y) { y = Selu <alpha = 2.0> (x) }", 17, True),
        ("g (float[2] x) => (float[2] y) { y = Selu (x) }", 17, False),
        ("g (float[1,1,4,4] x, float[1,1,3,3] w) => (float[1,1,2,2] y) { y = Conv (x, w) }", 17, True),
        ("g (float[1,1,4] x, float[1,1,3] w) => (float[1,1,2] y) { y = Conv <pads = [0, 0]> (x, w) }", 17, False),
        ("g (float[1,1,4] x, float[1,1,3] w) => (float[1,1,6] y) { y = ConvTranspose <group = 1> (x, w) }", 17, True),
        ("g (float[1,1,4,4] x) => (float[1,1,3,3] y, int64[1,1,3,3] i) { y, i = MaxPool <kernel_shape = [2,2]> (x) }",
         17, True),
        ("g (float[2,3] x) => (int64[2,1] y) { y = ArgMax <axis = 1, select_last_index = 1> (x) }", 17, True),
        ("g (float[2,3] x) => (float[2,3] y) { y = Concat <axis = 0> (x) }", 17, False),
        ("g (float[2,3] x) => (float[4,3] y) { y = Concat (x, x) }", 17, True),
        ("g (float[4] x) => (float[3] y, float[1] z) { y, z = Split <axis = 0, split = [3, 1]> (x) }", 11, False),
        ("g (float[4] x) => (float[3] y, float[1] z) { y, z = Split <axis = 0, split = [3, 1, 0]> (x) }", 11, True),
    ],
)  # fmt: skip
def test_plugins_refuse_what_they_cannot_express(text: str, opset: int, refused: bool) -> None:
    assert bool(_codes(_model(text, f'"" : {opset}'))) == refused


def test_int4_parses_from_9_2_beta_2_on() -> None:
    model = _model("g (int4[2] x) => (float[2] y) { y = Cast <to = 1> (x) }")
    assert _codes(model) == ["E19999"]
    assert _codes(model, Target("9.2")) == []


def test_the_axes_input_of_reduce_mean_18_is_read_from_9_2_beta_2_on() -> None:
    text = "g (float[2,4] x) => (float[2,1] y) <int64[1] a = {1}> { y = ReduceMean (x, a) }"
    rules = {f.rule for f in check_model(_model(text, '"" : 18'), TARGET).blocking}
    assert rules == {"silent.reduce-axes-input"}
    assert check_model(_model(text, '"" : 18'), Target("9.2")).blocking == ()


def test_a_refusal_names_the_lowering_that_repairs_it() -> None:
    model = _model("g (float[2,3] x) => (float[3,2] y) { y = Transpose (x) }")
    (finding,) = check_model(model, TARGET).blocking
    assert finding.lowering == "transpose"
    assert finding.fix


def test_checking_a_model_in_memory_leaves_it_unchanged() -> None:
    model = _model("g (float[N,3] x) => (float[3,N] y) { y = Transpose <perm = [1, 0]> (x) }")
    before = model.SerializeToString(deterministic=True)
    check_model(model, TARGET, {"x": [2, 3]})
    assert model.SerializeToString(deterministic=True) == before


def test_every_lowering_that_a_finding_names_exists() -> None:
    """All string constants in the readiness sources that stand where a lowering is named."""
    named: set[str] = set()
    for source in Path(readiness.__file__).parent.glob("*.py"):
        tree = ast.parse(source.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "lowering":
                named |= {c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant) and c.value}
    for table in (parser._INSTEAD, fixes._AICPU, fixes._NO_KERNEL):
        named |= {lowering for _, lowering in table.values() if lowering}
    rules = {rule.name for step in steps_for(TARGET) for rule in step.rules}
    assert len(named) > 20
    assert named <= rules


@pytest.mark.parametrize(
    ("cann", "certainty"),
    [
        ("8.5", Certainty.PARSER),
        ("8.5.1", Certainty.PARSER),
        ("9.1", Certainty.SOURCE),
        ("8.1.RC1", Certainty.INFERRED),
    ],
)
def test_only_8_5_was_asked_itself_and_the_report_says_so(cann: str, certainty: Certainty) -> None:
    model = _model("g (float[2,3] x) => (float[3,2] y) { y = Transpose (x) }")
    (finding,) = check_model(model, Target(cann)).blocking
    assert finding.certainty is certainty


def test_a_deep_graph_is_checked_in_seconds() -> None:
    """20,000 nodes in a chain, written backwards: nothing may be quadratic in the number of nodes."""
    nodes = [helper.make_node("Neg", [f"t{i}"], [f"t{i + 1}"]) for i in range(20_000)]
    graph = helper.make_graph(
        nodes[::-1],
        "deep",
        [helper.make_tensor_value_info("t0", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("t20000", TensorProto.FLOAT, [2])],
    )
    start = time.perf_counter()
    report = check_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), TARGET)
    assert report.engines == {Engine.AICORE: 20_000}
    assert time.perf_counter() - start < 20  # 2 s on an idle core
