"""A small artifacts directory whose graphs have the axes of the real ones: enough for ATC, in milliseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from runtime.config import CodecConfig, ModelConfig, read_config_json
from runtime.manifest import GraphFile, Manifest, sha256_of
from runtime.spec import GraphSpec, TensorSpec

OPSET = 17
_NANO = Path(__file__).resolve().parents[1] / "data" / "nano"
CODEC = CodecConfig.from_dict(read_config_json(_NANO / "tiny_codec"))
MODEL = ModelConfig.from_dict(read_config_json(_NANO / "tiny_llm_a"))


def _floats(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


SPECS = (
    GraphSpec("prefill", (_floats("rows", "B", "T", 8),), (_floats("hidden", "B", "T", 8),)),
    GraphSpec(
        "step", (_floats("row", "B", 1, 8), _floats("past_key_0", "B", "C", 8)), (_floats("hidden", "B", "C", 8),)
    ),
    GraphSpec("codec_stream", (_floats("codes", "B", "F", 8),), (_floats("wave", "B", "F", 8),)),
)


def make_artifacts(directory: Path, op_type: str = "MatMul") -> Manifest:
    """Write three graphs that share weights.bin, and their manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = np.eye(8, dtype=np.float32)
    (directory / "weights.bin").write_bytes(weights.tobytes())
    graphs = {}
    for spec in SPECS:
        file = directory / f"{spec.name}.onnx"
        onnx.save(make_model(spec, op_type), str(file))
        graphs[spec.name] = GraphFile(spec, file.name, sha256_of(file), 3)
    manifest = Manifest(
        directory=directory,
        name="small",
        made_up=True,
        source={},
        model=MODEL,
        codec=CODEC,
        limits={"max_positions": 64, "top_k_max": 4},
        graphs=graphs,
        data_files={"weights.bin": sha256_of(directory / "weights.bin")},
        weights={},
        versions={},
    )
    manifest.save()
    return manifest


def make_model(spec: GraphSpec, op_type: str = "MatMul") -> onnx.ModelProto:
    """All inputs added, times the weights; node names follow a module tree."""
    nodes, last = [], spec.inputs[0].name
    for index, tensor in enumerate(spec.inputs[1:]):
        nodes.append(
            helper.make_node("Add", [last, tensor.name], [f"sum_{index}"], name=f"{spec.name}/input/add_{index}")
        )
        last = f"sum_{index}"
    nodes += [
        helper.make_node(op_type, [last, "weight"], ["scores"], name=f"{spec.name}/layer_00/attention/scores"),
        helper.make_node("Tanh", ["scores"], ["bent"], name=f"{spec.name}/layer_00/mlp/tanh"),
        helper.make_node("Mul", ["bent", "two"], [spec.outputs[0].name], name=f"{spec.name}/layer_00/mlp/double"),
    ]
    weight = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[8, 8])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", "256")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value

    def value(tensor: TensorSpec) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, list(tensor.shape))

    graph = helper.make_graph(
        nodes,
        spec.name,
        [value(t) for t in spec.inputs],
        [value(t) for t in spec.outputs],
        [weight, helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
