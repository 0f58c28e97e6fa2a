"""Open one ONNX file of a package with its data: whole, and made of operators whose numbers can be read."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from runtime.errors import CheckpointError

# What dynamic and static quantisation leave: products of 8-bit weights with activations rounded to 8 bit.
_QUANTIZED = {"MatMulInteger", "QLinearMatMul", "QLinearConv", "ConvInteger", "DynamicQuantizeLinear", "QuantizeLinear"}
_DOWNLOAD_AGAIN = "download the package again"


def load_graph(path: Path) -> onnx.ModelProto:
    """The model with all weights in it; CheckpointError when something is missing, cut short or not readable."""
    try:
        model = onnx.load(path)
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
    for node in model.graph.node:
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
    return model


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
