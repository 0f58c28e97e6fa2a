"""Graphs that are wrong in any way get a report or one clear error, never a traceback or a crash of the process."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from onnx import AttributeProto, ModelProto, TensorProto

from op_patches.readiness import Severity, check_model
from op_patches.targets import Target
from runtime.errors import ReadinessError

CASES = sorted((Path(__file__).parents[1] / "data" / "readiness" / "cases").glob("*.onnx"))
TARGETS = [Target.parse(text) for text in ("910B4", "310P3", "910B4,cann=9.1,precision=fp16", "310P3,precision=origin")]
OPERATORS = "Slice Split Concat Where Constant If Cast TopK Clip MatMul Reshape Pad ReduceSum Einsum Softmax Gemm Loop"
ATTRIBUTES = "axis to perm value split num_outputs axes start end reduction kernel_shape batch_dims alpha equation mode"


def _model(text: str, opsets: str = '"" : 17') -> ModelProto:
    return onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{opsets}]>\n{text}")


def _damage(model: ModelProto, rng: random.Random) -> None:
    """One random change of a kind that a broken exporter or a bad surgery script makes."""
    graph = model.graph
    node = rng.choice(list(graph.node))
    kind = rng.randrange(11)
    if kind == 0:
        node.op_type = rng.choice(OPERATORS.split())
    elif kind == 1 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(["", "ghost", *node.output])
    elif kind == 2 and node.input:
        del node.input[-1:]
    elif kind == 3:
        del node.output[-1:]
    elif kind == 4:
        attribute = node.attribute.add(name=rng.choice(ATTRIBUTES.split()), i=rng.choice([-9, 0, 2**62]), s=b"\xff")
        attribute.type = rng.choice(AttributeProto.AttributeType.values())
    elif kind == 5:
        model.opset_import.add(domain=rng.choice(["", "x", "ai.onnx"]), version=rng.choice([-1, 0, 7, 18, 99]))
    elif kind == 6 and graph.input:
        graph.input[0].type.tensor_type.shape.dim.add(dim_value=rng.choice([-5, 0, 3]))
    elif kind == 7 and graph.initializer:
        graph.initializer[0].data_type = rng.choice([0, 1, 7, 8, 22, 99])
    elif kind == 8 and graph.initializer:
        graph.initializer[0].raw_data = b"abc"
    elif kind == 9 and graph.initializer:
        graph.initializer[0].data_location = TensorProto.EXTERNAL
        key, value = rng.choice(["location", "offset", "length"]), rng.choice(["a", "12", "-1", "../..", ""])
        graph.initializer[0].external_data.add(key=key, value=value)
    else:
        node.domain = rng.choice(["npu", "com.microsoft", "zz"])


@pytest.mark.parametrize("seed", range(6))
def test_damaged_graphs_never_end_in_a_traceback(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    reports = 0
    for _ in range(150):
        model = onnx.load(rng.choice(CASES), load_external_data=False)
        for _ in range(rng.randint(1, 4)):
            _damage(model, rng)
        content = bytearray(model.SerializeToString())
        if rng.random() < 0.3:
            content[rng.randrange(len(content))] = rng.randrange(256)
        path = tmp_path / "damaged.onnx"
        path.write_bytes(content)
        try:
            report = check_model(path, rng.choice(TARGETS))
        except ReadinessError as error:
            assert str(error)
        else:
            reports += 1
            assert report.to_dict()["findings"] is not None
    assert reports > 100


def test_an_attribute_of_the_wrong_kind_is_ignored_and_mentioned() -> None:
    model = _model("g (float[2,3] x) => (float[3,2] y) { [t] y = Transpose <perm = [1, 0]> (x) }")
    model.graph.node[0].attribute[0].type = AttributeProto.INT
    report = check_model(model, TARGETS[0])
    assert "node t: ignored perm, of the wrong kind" in report.remarks
    assert [f.rule for f in report.of(Severity.REFUSED)] == ["plugin.transpose-perm"]


def test_a_tensor_with_too_little_data_is_mentioned() -> None:
    model = _model("g (float[6] x) => (float[2,3] y) <int64[2] s = {2, 3}> { y = Reshape (x, s) }")
    model.graph.initializer[0].ClearField("int64_data")
    model.graph.initializer[0].raw_data = b"abc"
    (remark,) = check_model(model, TARGETS[0]).remarks
    assert remark.startswith("tensor s: its data were not read")


def test_a_cycle_fails_after_the_parser() -> None:
    graph = _model("g (float[2] x) => (float[2] y) { a = Neg (x)  b = Neg (a)  y = Add (b, x) }")
    graph.graph.node[0].input[0] = "b"
    assert "graph.cycle" in [f.rule for f in check_model(graph, TARGETS[0]).of(Severity.FAILS)]
    unsorted = _model("g (float[2] x) => (float[2] y) { y = Neg (a)  a = Neg (x) }")
    assert check_model(unsorted, TARGETS[0]).blocking == ()


def test_operators_whose_inference_ends_the_process_are_not_inferred() -> None:
    """EyeLike with an input that nothing produces is a segmentation fault inside onnx 1.23."""
    report = check_model(_model("g (float[2] x) => (double[3,4] y) { y = EyeLike <dtype = 11> (ghost) }"), TARGETS[0])
    assert "silent.unconnected-input" in {f.rule for f in report.blocking}


def test_an_external_offset_that_is_no_number_is_refused(tmp_path: Path) -> None:
    model = _model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add (x, w) }")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="w.bin")
    model.graph.initializer[0].external_data.add(key="offset", value="4k")
    (tmp_path / "w.bin").write_bytes(b"\0" * 16)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ReadinessError, match="offset '4k' is not a number"):
        check_model(tmp_path / "m.onnx", TARGETS[0])
