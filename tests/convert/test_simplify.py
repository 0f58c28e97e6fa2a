"""onnxsim is trusted only as far as interface and numbers agree."""

from __future__ import annotations

import onnx
import pytest
from click.testing import CliRunner

from convert import simplify as simplify_module
from convert.cli import cli
from convert.simplify import simplify_file
from runtime.errors import ExportError

GRAPH = """
<ir_version: 8, opset_import: ["" : 17]>
graph (float[B, T, 8] x) => (float[B, T, 2, 4] y)
<int64[2] tail = {2, 4}, int64[1] zero = {0}, int64[1] two = {2}> {
    s = Shape(x)
    lead = Slice(s, zero, two)
    shape = Concat<axis = 0>(lead, tail)
    y = Reshape(x, shape)
}
"""


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "graph.onnx"
    onnx.save(onnx.parser.parse_model(GRAPH), path)
    return path


def test_shape_arithmetic_folds_when_the_axes_are_bound(graph, tmp_path):
    result = simplify_file(graph, tmp_path / "out.onnx", {"x": [1, 5, 8]})
    assert (result.nodes_before, result.nodes_after) == (4, 1)
    assert [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node] == ["Reshape"]


@pytest.mark.parametrize(("shapes", "message"), [({}, "not all bound"), ({"z": [1]}, "no input z; inputs: x")])
def test_what_cannot_be_checked_is_not_written(graph, tmp_path, shapes, message):
    with pytest.raises(ExportError, match=message):
        simplify_file(graph, tmp_path / "out.onnx", shapes)
    assert not (tmp_path / "out.onnx").exists()


def broken(edit):
    def simplify(model, **_):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        edit(changed.graph)
        for dim, size in zip(changed.graph.input[0].type.tensor_type.shape.dim, (1, 5, 8), strict=True):
            dim.dim_value = size
        return changed, True

    return simplify


def negate(graph):
    graph.node[-1].output[0] = "positive"
    graph.node.append(onnx.helper.make_node("Neg", ["positive"], ["y"]))


def rename_output(graph):
    graph.node[-1].output[0] = graph.output[0].name = "z"


@pytest.mark.parametrize(
    ("edit", "message"), [(negate, "computes something else: y"), (rename_output, "the interface")]
)
def test_a_simplifier_that_changes_the_graph_is_caught(graph, tmp_path, monkeypatch, edit, message):
    monkeypatch.setattr(simplify_module.onnxsim, "simplify", broken(edit))
    with pytest.raises(ExportError, match=message):
        simplify_file(graph, tmp_path / "out.onnx", {"x": [1, 5, 8]})
    assert not (tmp_path / "out.onnx").exists()


def test_the_command(graph, tmp_path):
    result = CliRunner().invoke(cli, ["simplify", str(graph), str(tmp_path / "o.onnx"), "--input-shape", "x:1,5,8"])
    assert result.exit_code == 0 and "4 -> 1 nodes" in result.stdout
    result = CliRunner().invoke(cli, ["simplify", str(tmp_path), str(tmp_path / "p.onnx")])
    assert result.exit_code in (1, 2) and "Traceback" not in result.output
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    result = CliRunner().invoke(cli, ["simplify", str(tmp_path / "bad.onnx"), str(tmp_path / "p.onnx")])
    assert result.exit_code == 1 and result.stderr.startswith("error: ")
