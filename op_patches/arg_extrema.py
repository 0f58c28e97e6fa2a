"""ArgMax and ArgMin with select_last_index -> the first extreme of the reversed axis.

    ArgMax(x, last) = (n - 1) - ArgMax(reverse(x), first)

The plugins refuse select_last_index=1 (atc_onnx_ops.json, ArgMax).
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    attrs = attributes(node)
    if not attrs.get("select_last_index"):
        return None
    axis, x = attrs.get("axis", 0), node.input[0]
    shape = graph.shape(x)
    size = shape[axis] if shape else None
    if not isinstance(size, int):
        return Refusal(f"axis {axis} of {x} is open, and reversing it needs its length: bind the input shapes")
    backwards = new.const(np.arange(size - 1, -1, -1, dtype=np.int64), hint="backwards")
    reversed_x = new.op("Gather", x, backwards, axis=axis)
    first = new.op(node.op_type, reversed_x, axis=axis, keepdims=attrs.get("keepdims", 1))
    new.op("Sub", new.const(np.asarray(size - 1, dtype=np.int64), hint="last"), first, out=node.output[0])
    return Rewrite()


ARG_EXTREMA = Lowering("arg_extrema", ("ArgMax", "ArgMin"), lower)
