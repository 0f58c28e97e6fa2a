"""Transpose without perm -> Transpose with the reversed axes spelled out; the parser refuses the default."""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    if "perm" in attributes(node):
        return None
    rank = graph.rank(node.input[0])
    if rank is None:
        return Refusal(f"the rank of {node.input[0]} is unknown, and perm lists every axis")
    if rank < 2:
        new.op("Identity", node.input[0], out=node.output[0])
    else:
        new.op("Transpose", node.input[0], out=node.output[0], perm=list(range(rank - 1, -1, -1)))
    return Rewrite()


TRANSPOSE = Lowering("transpose", ("Transpose",), lower)
