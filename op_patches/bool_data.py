"""Data movement on bool that no AICore kernel does -> the same on int32 between two Casts.

    y = Cast(op(Cast(x, int32)), bool)        bool -> {0, 1} -> bool loses nothing

GatherElements on bool runs on AICPU, PadV3 on bool too (ATC_ONNX_ACCEPTANCE.md, section 5).
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView, attributes, input_name
from op_patches.rewriter import Builder, Lowering, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    x = node.input[0]
    if graph.elem(x) != TensorProto.BOOL:
        return None
    inputs = [new.cast(x, TensorProto.INT32), *node.input[1:]]
    value = input_name(node, 2)
    if node.op_type == "Pad" and value:
        inputs[2] = new.cast(value, TensorProto.INT32)
    moved = new.op(node.op_type, *inputs, **attributes(node))
    new.cast(moved, TensorProto.BOOL, out=node.output[0])
    shape = graph.static_shape(x)
    ranges = {}
    if node.op_type == "GatherElements":
        size = shape[attributes(node).get("axis", 0)] if shape else 1
        ranges = {node.input[1]: (-size, size - 1)}
    return Rewrite(ranges=ranges)


BOOL_DATA = Lowering("bool_data", ("GatherElements", "Pad"), lower)
