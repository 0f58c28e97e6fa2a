"""ReduceSum with noop_with_empty_axes and no axes -> Identity.

The plugin ignores the attribute with a warning and reduces everything: a silent wrong result (atc_onnx_ops.json,
ReduceSum). The relatives of ReduceSum have the attribute from opset 18 on, where op_patches.opset takes care of it.
"""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes, input_name
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    if not attributes(node).get("noop_with_empty_axes"):
        return None
    name = input_name(node, 1)
    axes = graph.constant(name)
    if name and axes is None and graph.shape(name) != (0,):
        return Refusal(f"whether the axes {name} are empty is known at run time only")
    if axes is not None and axes.size:
        return None
    new.op("Identity", node.input[0], out=node.output[0])
    return Rewrite()


REDUCE_NOOP = Lowering("reduce_noop", ("ReduceSum",), lower)
