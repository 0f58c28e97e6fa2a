"""CastLike(x, y) -> Cast(x) to the element type of y. GE has no kernel for CastLike on these chips."""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import GraphView
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    elem = graph.elem(node.input[1])
    if elem is None:
        return Refusal(f"the element type of {node.input[1]} is unknown")
    new.cast(node.input[0], elem, out=node.output[0])
    return Rewrite()


CAST_LIKE = Lowering("cast_like", ("CastLike",), lower)
