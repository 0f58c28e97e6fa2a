"""Clip without bounds -> Identity. The parser refuses a Clip that has neither min nor max (hand case clip_none)."""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes, input_name
from op_patches.rewriter import Builder, Lowering, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    if input_name(node, 1) or input_name(node, 2) or attributes(node):
        return None
    new.op("Identity", node.input[0], out=node.output[0])
    return Rewrite()


CLIP = Lowering("clip", ("Clip",), lower)
