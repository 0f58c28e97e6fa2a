"""ConstantOfShape whose value lies in typed fields -> the same value as raw data.

The plugin reads typed fields for int32, int64, float and double only and refuses the other types there; raw data it
takes for all of them (atc_onnx_ops.json, ConstantOfShape).
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto, numpy_helper

from op_patches.graph_view import GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Rewrite

_READ = (TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE)


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    value = attributes(node).get("value")
    if value is None or value.HasField("raw_data") or value.data_type in _READ:
        return None
    raw = numpy_helper.from_array(numpy_helper.to_array(value))
    new.op("ConstantOfShape", node.input[0], out=node.output[0], value=raw)
    return Rewrite(ranges={node.input[0]: (1, 5)})  # sizes


CONSTANT_OF_SHAPE = Lowering("constant_of_shape", ("ConstantOfShape",), lower)
