"""Files of every size and kind: weights are never loaded, external data is checked by its size, junk is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from op_patches.readiness import Severity, check_model
from op_patches.readiness.loader import LIMIT, load_structure
from op_patches.targets import Target
from runtime.errors import ReadinessError

TARGET = Target.parse("910B4")


def _matmul(*initializers: TensorProto, extra: list[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    size = initializers[0].dims[0]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mm"), *(extra or [])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, initializers[0].dims[1]])],
        list(initializers),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def _header(name: str, dims: list[int], **external: object) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims)
    if external:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in external.items():
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def _sparse_file(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _peak_kb_of_check(path: Path) -> int:
    """The peak memory of a fresh process that checks `path` and finds it ready."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from op_patches.readiness import check_model\n"
        "from op_patches.targets import Target\n"
        "assert check_model(sys.argv[1], Target.parse('910B4')).ready\n"
        "status = Path('/proc/self/status').read_text()\n"  # ru_maxrss would count the parent's memory too
        "print(status.split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_three_gigabytes_of_external_data_cost_no_memory(tmp_path: Path) -> None:
    rows, columns = 24576, 32768  # 3 GiB of float32
    _sparse_file(tmp_path / "w.bin", rows * columns * 4)
    model = _matmul(_header("w", [rows, columns], location="w.bin", offset=0, length=rows * columns * 4))
    (tmp_path / "big.onnx").write_bytes(model.SerializeToString())
    assert _peak_kb_of_check(tmp_path / "big.onnx") < 200_000


def test_a_gigabyte_inside_the_file_costs_less_than_half_as_much_memory(tmp_path: Path) -> None:
    """A sparse .onnx file: the raw_data field of its last tensor is a hole of 1 GiB."""
    rows, columns = 16384, 16384
    size = rows * columns * 4
    model = _matmul(_header("w", [rows, columns]))
    del model.graph.initializer[:]
    header = _header("w", [rows, columns]).SerializeToString() + _key(9, size)
    tensor = _key(5, len(header) + size) + header
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    start = model.SerializeToString() + _key(7, len(graph) + len(tensor) + size) + graph + tensor
    path = tmp_path / "inline.onnx"
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + size)
    assert _peak_kb_of_check(path) < size / 1024 / 2


def test_scanning_a_large_mask_keeps_a_piece_of_it_in_memory(tmp_path: Path) -> None:
    """256 MiB of mask beside the file, read in pieces; the file is sparse."""
    _sparse_file(tmp_path / "mask.bin", 8192 * 8192 * 4)
    graph = onnx.parser.parse_graph("g (float[8192,8192] x) => (float[8192,8192] y) { y = Add (x, mask) }")
    graph.initializer.append(_header("mask", [8192, 8192], location="mask.bin"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert _peak_kb_of_check(tmp_path / "m.onnx") < 128 * 1024


def _key(number: int, length: int) -> bytes:
    """Tag and length of a length-delimited protobuf field."""
    out = bytearray([number << 3 | 2])
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)


def test_the_structure_is_that_of_the_file_without_large_tensors(tmp_path: Path) -> None:
    small = numpy_helper.from_array(np.arange(6, dtype=np.int64), "small")
    large = numpy_helper.from_array(np.ones((128, 256), np.float32), "w")
    constant = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.ones((LIMIT,), np.float32)))
    model = _matmul(large, small, extra=[constant])
    onnx.save(model, tmp_path / "m.onnx")
    loaded = load_structure(tmp_path / "m.onnx")
    assert loaded.ByteSize() < LIMIT
    assert loaded.graph.initializer[1] == small
    assert list(loaded.graph.initializer[0].dims) == [128, 256]
    assert [node.op_type for node in loaded.graph.node] == ["MatMul", "Constant"]
    assert list(loaded.graph.node[1].attribute[0].t.dims) == [LIMIT]
    report = check_model(tmp_path / "m.onnx", TARGET)
    assert report.findings == check_model(model, TARGET).findings


def test_small_external_tensors_are_read_because_shapes_may_lie_there(tmp_path: Path) -> None:
    (tmp_path / "s.bin").write_bytes(np.array([0, 2], np.int64).tobytes())
    text = "g (float[4] x) => (float[2] y) { y = Slice (x, s, e) }"
    model = helper.make_model(onnx.parser.parse_graph(text), opset_imports=[helper.make_opsetid("", 17)])
    for index, name in enumerate("se"):
        tensor = _header(name, [1], location="s.bin", offset=8 * index, length=8)
        tensor.data_type = TensorProto.INT64
        model.graph.initializer.append(tensor)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    loaded = load_structure(tmp_path / "m.onnx")
    assert numpy_helper.to_array(loaded.graph.initializer[1]).tolist() == [2]
    assert check_model(tmp_path / "m.onnx", TARGET).findings == ()


def test_a_missing_or_short_data_file_fails_after_the_parser(tmp_path: Path) -> None:
    model = _matmul(_header("w", [64, 64], location="w.bin", offset=4096))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    (missing,) = check_model(path, TARGET).of(Severity.FAILS)
    assert (missing.code, missing.rule) == ("E10041", "external.missing")
    assert "does not exist" in missing.message
    _sparse_file(tmp_path / "w.bin", 4096 + 64 * 64 * 4 - 1)
    (short,) = check_model(path, TARGET).of(Severity.FAILS)
    assert "w needs 20480" in short.message
    _sparse_file(tmp_path / "w.bin", 4096 + 64 * 64 * 4)
    assert check_model(path, TARGET).blocking == ()


def test_a_large_mask_in_the_file_or_beside_it_is_scanned_for_numbers_beyond_float16(tmp_path: Path) -> None:
    mask = np.zeros((256, 256), np.float32)
    mask[7, 9] = np.finfo(np.float32).min
    graph = onnx.parser.parse_graph("g (float[256,256] x) => (float[256,256] y) { y = Add (x, mask) }")
    graph.initializer.append(numpy_helper.from_array(mask, "mask"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    fp16 = Target.parse("910B4,precision=fp16")
    onnx.save(model, tmp_path / "inside.onnx")
    onnx.save(model, tmp_path / "outside.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    for name in ("inside", "outside"):
        rules = [f.rule for f in check_model(tmp_path / f"{name}.onnx", fp16).of(Severity.PRECISION)]
        assert rules == ["precision.beyond-float16"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot read|not an ONNX"),
        (b"not an onnx file at all, but some text", "not an ONNX file"),
        (b"\x00" * 64, "not an ONNX file"),
        (b"\x3a\xff\xff\xff\x7f" + b"\x00" * 16, "cut off"),
    ],
)
def test_junk_is_refused_with_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "junk.onnx"
    path.write_bytes(content)
    with pytest.raises(ReadinessError, match=reason):
        check_model(path, TARGET)


def test_a_file_cut_off_anywhere_is_refused_and_never_crashes(tmp_path: Path) -> None:
    content = _matmul(numpy_helper.from_array(np.ones((200, 200), np.float32), "w")).SerializeToString()
    path = tmp_path / "cut.onnx"
    refused = 0
    for length in range(1, len(content), len(content) // 60):
        path.write_bytes(content[:length])
        try:
            check_model(path, TARGET)
        except ReadinessError:
            refused += 1
    assert refused >= 58  # a cut between two fields of the model may leave a whole, empty message
    with pytest.raises(ReadinessError, match="cannot read"):
        check_model(tmp_path / "absent.onnx", TARGET)


def test_checking_needs_neither_torch_nor_onnxruntime_nor_acl() -> None:
    code = (
        "import sys, op_patches.readiness.text; print([m for m in ('torch', 'onnxruntime', 'acl') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_report_is_json_all_the_way(tmp_path: Path) -> None:
    onnx.save(_matmul(_header("w", [4, 4], location="gone.bin")), tmp_path / "m.onnx")
    data = json.loads(json.dumps(check_model(tmp_path / "m.onnx", TARGET).to_dict()))
    assert data["ready"] is False
    assert data["engines"] == {"aicore": 1, "aicpu": 0, "host": 0, "local": 0, "none": 0, "unknown": 0}
    assert data["findings"][0]["code"] == "E10041"
    assert data["findings"][0]["certainty"]
