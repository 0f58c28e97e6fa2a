"""Where on bool branches -> logic; SelectV2 takes every type but bool.

Where(c, a, b) = (c and a) or (not c and b)
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView
from op_patches.rewriter import Builder, Lowering, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    condition, a, b = node.input
    if graph.elem(a) != TensorProto.BOOL and graph.elem(b) != TensorProto.BOOL:
        return None
    otherwise = new.op("And", new.op("Not", condition), b)
    new.op("Or", new.op("And", condition, a), otherwise, out=node.output[0])
    return Rewrite()


WHERE_BOOL = Lowering("where_bool", ("Where",), lower)
