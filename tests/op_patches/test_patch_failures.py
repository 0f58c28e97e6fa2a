"""Whatever file it is given, `patch` ends with a result or with one line that says what is wrong."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import helper

from convert.cli import cli
from op_patches import trilu
from op_patches.pipeline import apply_lowerings
from op_patches.rewriter import Lowering
from op_patches.targets import Target
from runtime.errors import PatchError
from tests.op_patches.conftest import parse

CASES = sorted((Path(__file__).parents[1] / "data" / "readiness" / "cases").glob("*.onnx"))
NOT_PATCHED = {"concat_noaxis", "external_missing_file", "no_opset"}


def run(tmp_path, source, target="910B4"):
    out = tmp_path / "out.onnx"
    result = CliRunner().invoke(cli, ["patch", str(source), str(out), "--target", target])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in (0, 1)
    assert out.is_file() == (result.exit_code == 0)
    if result.exit_code:
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
    return result


@pytest.mark.parametrize("target", ["910B4", "310P3,precision=origin"])
def test_every_hand_made_graph_is_patched_or_refused_in_one_line(tmp_path, target):
    assert len(CASES) == 81
    refused = set()
    for case in CASES:
        if run(tmp_path, case, target).exit_code:
            refused.add(case.stem)
        (tmp_path / "out.onnx").unlink(missing_ok=True)
    assert refused == NOT_PATCHED


def test_a_model_of_foreign_operators_alone_gets_the_standard_opset(tmp_path):
    result = run(tmp_path, next(c for c in CASES if c.stem == "dom_msft_gelu"))
    assert result.exit_code == 0
    patched = onnx.load(tmp_path / "out.onnx")
    assert [(o.domain, o.version) for o in patched.opset_import] == [("", 17)]


def test_a_model_without_an_opset_is_told_what_to_add(tmp_path):
    result = run(tmp_path, next(c for c in CASES if c.stem == "no_opset"))
    assert 'uses Neg; opset_import needs an entry such as {domain: "", version: 17}' in result.stderr


def good():
    return parse("g (float[2,4] x, float[4,3] w) => (float[2,3] y) <int64[1] k = {1}> { y = MatMul (x, w) }")


def change(model, kind):
    node, tensor = model.graph.node[0], model.graph.initializer[0]
    if kind == "input":
        node.input.pop()
    elif kind == "output":
        node.output[:] = []
    elif kind == "kind":
        node.op_type = "Softmax"
        node.input.pop()
        node.attribute.append(helper.make_attribute("axis", [1, 2]))
    elif kind == "attribute":
        node.op_type = "Einsum"
    elif kind == "data":
        tensor.ClearField("int64_data")
        tensor.raw_data = b"abc"
    elif kind == "type":
        tensor.data_type = 99
    elif kind == "dims":
        tensor.dims[0] = -1
    elif kind == "interface":
        model.graph.input[0].type.tensor_type.elem_type = 99
    elif kind == "opset":
        model.opset_import[0].version = 99
    elif kind == "foreign":
        node.op_type, node.domain = "BiasGelu", "com.microsoft"
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        node.input.pop()
    else:
        raise KeyError(kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("input", r"\(MatMul\) has 1 inputs, expected 2 to 2"),
        ("output", r"\(MatMul\) has no output"),
        ("kind", "has attribute axis of the wrong kind, expected INT"),
        ("attribute", "has no attribute equation"),
        ("data", r"constant k: its data do not fit \[1\]"),
        ("type", "constant k: element type 99 does not exist"),
        ("dims", r"constant k: negative size in \[-1\]"),
        ("interface", "x has element type 99, which does not exist"),
        ("opset", "opset 99 of the standard domain"),
        ("foreign", r"\(BiasGelu\) has 1 inputs, expected 2 or more"),
    ],
)
def test_what_is_not_onnx_is_named(kind, message):
    model = good()
    change(model, kind)
    with pytest.raises(PatchError, match=message):
        apply_lowerings(model, Target.parse("910B4"))


def test_a_name_that_is_no_text_is_refused(tmp_path):
    data = good().SerializeToString().replace(b"MatMul", b"Ma\xff\xfeul")
    (tmp_path / "in.onnx").write_bytes(data)
    assert "is not UTF-8 text" in run(tmp_path, tmp_path / "in.onnx").stderr


def test_types_that_do_not_fit_are_the_graphs_fault(tmp_path):
    model = parse("g (bool[3,3] x, float i, float[2] u) => (float y) { y = ScatterND (x, i, u) }")
    onnx.save(model, tmp_path / "in.onnx")
    assert "the graph is not valid ONNX" in run(tmp_path, tmp_path / "in.onnx").stderr


def test_an_error_in_a_rule_is_not_blamed_on_a_valid_graph(monkeypatch):
    def broken(node, graph, new):
        raise KeyError("a bug")

    monkeypatch.setattr("op_patches.pipeline.TRILU", Lowering("trilu", trilu.TRILU.op_types, broken))
    model = parse("g (float[2,2] x) => (float[2,2] y) { y = Trilu (x) }")
    with pytest.raises(KeyError, match="a bug"):
        apply_lowerings(model, Target.parse("910B4"))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_never_end_in_a_traceback(tmp_path, seed):
    rng = random.Random(seed)
    for _ in range(40):
        data = bytearray(rng.choice(CASES).read_bytes())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "in.onnx").write_bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data)
        (tmp_path / "out.onnx").unlink(missing_ok=True)
        run(tmp_path, tmp_path / "in.onnx")
