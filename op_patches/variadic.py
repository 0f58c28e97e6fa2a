"""Sum and Mean of operands with different shapes -> Add (and Mul). AccumulateNV2 adds equal shapes and broadcasts none.

Sum(a, b, c)  = (a + b) + c           Mean(a, b, c) = ((a + b) + c) / 3
"""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import FLOATS, GraphView
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    shapes = {graph.shape(name) for name in node.input}
    if len(shapes) == 1 and None not in shapes:
        return None
    if graph.elem(node.input[0]) not in FLOATS:
        return Refusal("the element type of the operands is unknown")
    total, *rest = node.input
    out = node.output[0]
    mean = node.op_type == "Mean"
    for index, name in enumerate(rest):
        last = index == len(rest) - 1 and not mean
        total = new.op("Add", total, name, out=out if last else None)
    if mean:
        new.op("Mul", total, new.const(1.0 / len(node.input), node.input[0], "share"), out=out)
    elif not rest:
        new.op("Identity", total, out=out)
    return Rewrite()


VARIADIC = Lowering("variadic", ("Sum", "Mean"), lower)
