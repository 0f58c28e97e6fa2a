"""IsNaN(x) -> not (x == x), where the chip has no kernel for IsNan (310P)."""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import GraphView
from op_patches.rewriter import Builder, Lowering, Rewrite
from op_patches.targets import Engine


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    x = node.input[0]
    if graph.engine("IsNan", x) == Engine.AICORE or graph.engine("Equal", x) != Engine.AICORE:
        return None
    new.op("Not", new.op("Equal", x, x), out=node.output[0])
    return Rewrite()


IS_NAN = Lowering("is_nan", ("IsNaN",), lower)
