"""Shape with start or end -> Shape and Slice. CANN's plugin ignores both attributes: a silent wrong result."""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Rewrite

_END = (1 << 31) - 1  # beyond every rank


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    attrs = attributes(node)
    start, end = attrs.get("start", 0), attrs.get("end")
    if not attrs:
        return None
    shape = new.op("Shape", node.input[0])
    bounds = (new.const([start], hint="start"), new.const([_END if end is None else end], hint="end"))
    new.op("Slice", shape, *bounds, new.const([0], hint="axes"), out=node.output[0])
    return Rewrite()


SHAPE_SLICE = Lowering("shape_slice", ("Shape",), lower)
