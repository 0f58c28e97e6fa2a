from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.checker
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from convert.cli import cli
from op_patches.evaluate import run_replacement
from op_patches.patch_file import patch_file
from op_patches.targets import Target
from runtime.errors import PatchError


def external(name, array, offset, location="weights.bin"):
    tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(array.nbytes))):
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.fixture
def model_dir(tmp_path):
    """x -> Reshape by an external shape -> LayerNormalization -> MatMul with an external weight."""
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    scale = np.ones(64, np.float32)
    shape = np.int64([-1, 64])
    (tmp_path / "weights.bin").write_bytes(weight.tobytes() + scale.tobytes() + shape.tobytes())
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("LayerNormalization", ["r", "scale"], ["n"]),
        helper.make_node("MatMul", ["n", "w"], ["y"]),
    ]
    tensors = [
        external("w", weight, 0),
        external("scale", scale, weight.nbytes),
        external("shape", shape, weight.nbytes + scale.nbytes),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["B", 2, 32])],
        [helper.make_tensor_value_info("y", 1, ["B", 32])],
        tensors,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "in.onnx")
    return tmp_path


def run(path, x):
    return run_replacement(onnx.load(path), {"x": x})[0]  # with its data, as the shape lies outside the file


@pytest.mark.parametrize("out", ["out.onnx", "other/out.onnx"])
def test_weights_outside_the_file_stay_there_and_are_found(model_dir, out):
    report = patch_file(model_dir / "in.onnx", model_dir / out, Target.parse("910B4"))
    assert report.counts["layer_norm"] == 1
    onnx.checker.check_model(str(model_dir / out), full_check=True)
    x = np.random.default_rng(1).standard_normal((3, 2, 32)).astype(np.float32)
    np.testing.assert_allclose(run(model_dir / out, x), run(model_dir / "in.onnx", x), rtol=1e-4, atol=1e-4)
    assert (model_dir / out).stat().st_size < 6000
    patched = onnx.load(model_dir / out, load_external_data=False)
    assert {t.name for t in patched.graph.initializer if t.data_location == TensorProto.EXTERNAL} == {"w"}


def test_another_data_file_is_never_overwritten(model_dir):
    (model_dir / "other").mkdir()
    (model_dir / "other" / "weights.bin").write_bytes(b"something else")
    with pytest.raises(PatchError, match="exists and differs"):
        patch_file(model_dir / "in.onnx", model_dir / "other" / "out.onnx", Target.parse("910B4"))
    assert not (model_dir / "other" / "out.onnx").exists()


def test_missing_and_short_data_files_are_named(model_dir):
    data = (model_dir / "weights.bin").read_bytes()
    (model_dir / "weights.bin").write_bytes(data[:-4])
    with pytest.raises(PatchError, match="cut off"):
        patch_file(model_dir / "in.onnx", model_dir / "out.onnx", Target.parse("910B4"))
    (model_dir / "weights.bin").unlink()
    with pytest.raises(PatchError, match="missing"):
        patch_file(model_dir / "in.onnx", model_dir / "out.onnx", Target.parse("910B4"))


def test_weights_of_three_gigabytes_are_never_read(tmp_path):
    """A sparse file stands for the weights; reading it would need more memory than the limit leaves."""
    import resource

    columns = 800_000_000
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(4 * columns)
    tensor = TensorProto(name="w", dims=[1, columns], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(4 * columns))):
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], ["k"], value_float=2.0),
            helper.make_node("Mul", ["x", "k"], ["z"]),
            helper.make_node("MatMul", ["z", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, ["B", 1])],
        [helper.make_tensor_value_info("y", 1, ["B", columns])],
        [tensor],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "in.onnx")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = patch_file(tmp_path / "in.onnx", tmp_path / "out.onnx", Target.parse("910B4"))
    assert report.counts["constant"] == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_the_command_patches_prints_and_writes_the_report(model_dir):
    result = CliRunner().invoke(
        cli, ["patch", str(model_dir / "in.onnx"), str(model_dir / "out.onnx"), "--report", str(model_dir / "r.json")]
    )
    assert result.exit_code == 0, result.output
    assert "layer_norm" in result.output
    assert json.loads((model_dir / "r.json").read_text())["rules"]


def test_the_command_speaks_json_and_binds_shapes(model_dir):
    arguments = [
        "patch",
        str(model_dir / "in.onnx"),
        str(model_dir / "out.onnx"),
        "--json",
        "--input-shape",
        "x:4,2,32",
    ]
    result = CliRunner().invoke(cli, [*arguments, "--matmul", "conv1x1", "--target", "310P3"])
    assert result.exit_code == 0, result.output
    rules = {r["rule"]: r["count"] for r in json.loads(result.stdout)["rules"]}
    assert rules["matmul_conv1x1"] == 1
    patched = onnx.load(model_dir / "out.onnx", load_external_data=False)
    assert patched.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"no onnx at all", "not an ONNX file"), (b"", "no node")]
)
def test_bad_files_give_one_line_and_exit_code_1(tmp_path, content, message):
    if content is not None:
        (tmp_path / "in.onnx").write_bytes(content)
    result = CliRunner().invoke(cli, ["patch", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")])
    assert result.exit_code == 1
    assert message in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out.onnx").exists()


def test_an_unknown_target_is_refused(model_dir):
    arguments = ["patch", str(model_dir / "in.onnx"), str(model_dir / "out.onnx"), "--target", "Ascend910B"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1 and "error:" in result.output
