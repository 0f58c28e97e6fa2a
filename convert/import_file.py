"""Open one ONNX file of a package with its data: whole, and made of operators whose numbers can be read."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import NodeProto, TensorProto

from runtime.errors import CheckpointError

# What dynamic and static quantisation leave: products of 8-bit weights with activations rounded to 8 bit.
_QUANTIZED = {"MatMulInteger", "QLinearMatMul", "QLinearConv", "ConvInteger", "DynamicQuantizeLinear", "QuantizeLinear"}
_DOWNLOAD_AGAIN = "download the package again"


def load_graph(path: Path) -> onnx.ModelProto:
    """The model with all weights in it; CheckpointError when something is missing, cut short or not readable."""
    try:
        model = onnx.load(path)
        context = type(onnx.checker.DEFAULT_CONTEXT)()
        context.ir_version = model.ir_version
        context.opset_imports = {opset.domain: opset.version for opset in model.opset_import}
        for node in model.graph.node:
            _refuse_operator(path, node)
            onnx.checker.check_node(node, context)
    except (OSError, ValueError, DecodeError, onnx.checker.ValidationError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: cannot read the graph and its data ({reason}); {_DOWNLOAD_AGAIN}") from error
    for tensor in model.graph.initializer:
        expected = _num_bytes(tensor)
        if tensor.HasField("raw_data") and expected is not None and len(tensor.raw_data) != expected:
            raise CheckpointError(
                f"{path}: initializer {tensor.name} {list(tensor.dims)}: expected {expected} bytes of data, got "
                f"{len(tensor.raw_data)}: the .data file is cut short; {_DOWNLOAD_AGAIN}"
            )
    return model


def sorted_nodes(model: onnx.ModelProto, path: Path) -> list[NodeProto]:
    """The nodes in an order of computation; some converters append theirs at the end."""
    maker = {output: number for number, node in enumerate(model.graph.node) for output in node.output if output}
    before = {i: {maker[v] for v in node.input if v in maker} for i, node in enumerate(model.graph.node)}
    try:
        return [model.graph.node[i] for i in TopologicalSorter(before).static_order()]
    except CycleError as error:
        name = model.graph.node[error.args[1][0]].name
        raise CheckpointError(f"{path}: node {name} reads what is computed from it; {_DOWNLOAD_AGAIN}") from error


def _refuse_operator(path: Path, node: NodeProto) -> None:
    if node.op_type in _QUANTIZED:
        raise CheckpointError(
            f"{path.name}: {node.op_type} rounds activations to 8 bit, so the graph cannot prove the weights; "
            "import the float package (weights kept as DequantizeLinear are read)"
        )
    if node.domain not in ("", "ai.onnx"):
        raise CheckpointError(
            f"{path.name}: {node.domain}.{node.op_type} is an operator of a runtime's own optimizer; "
            "import the package as published, or as optimised at basic level"
        )


def _num_bytes(tensor: TensorProto) -> int | None:
    """Of raw data; None for packed types."""
    try:
        item = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError):
        return None
    count = 1
    for size in tensor.dims:
        count *= size
    return count * item if tensor.data_type not in (TensorProto.INT4, TensorProto.UINT4) else None
