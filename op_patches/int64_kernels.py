"""int64 operators without an int64 kernel -> others that have one, with no assumption about the range.

Pow(x, n), n = 0 … 4     -> products: int64 Mul has a kernel, Pow has none
Expand(x, shape)         -> Add(x, zeros(shape)): int64 Add broadcasts on AICore, Expand runs on AICPU
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from op_patches.graph_view import GraphView, as_scalar
from op_patches.rewriter import Builder, Lowering, Rewrite
from op_patches.targets import Engine

_MAX_POWER = 4


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    x = node.input[0]
    if graph.elem(x) != TensorProto.INT64 or graph.engine(node.op_type, x) == Engine.AICORE:
        return None
    return _power(node, graph, new) if node.op_type == "Pow" else _expand(node, graph, new)


def _power(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    x, out = node.input[0], node.output[0]
    power = as_scalar(graph.constant(node.input[1]))
    exponent = graph.shape(node.input[1])
    if power is None or power not in range(_MAX_POWER + 1) or (exponent and len(exponent) > (graph.rank(x) or 0)):
        return None  # narrow_int64 may still prove a range
    if power == 0:
        new.op("Add", new.op("Sub", x, x), new.const(1, hint="one"), out=out)
        return Rewrite("x^0")
    if power == 1:
        new.op("Identity", x, out=out)
        return Rewrite("x^1")
    y = x
    for step in range(2, int(power) + 1):
        y = new.op("Mul", y, x, out=out if step == power else None)
    return Rewrite(f"{int(power) - 1} products")


def _expand(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite:
    x, shape_name = node.input
    shape = graph.constant(shape_name)
    if shape is not None and np.prod(shape) <= 1 << 16:
        zeros = new.const(np.zeros(tuple(shape), dtype=np.int64), hint="zeros")
    else:
        zero = numpy_helper.from_array(np.zeros(1, dtype=np.int64))
        zeros = new.op("ConstantOfShape", shape_name, value=zero)
    new.op("Add", x, zeros, out=node.output[0])
    return Rewrite("sum with zeros", ranges={} if shape is not None else {shape_name: (1, 5)})  # sizes


INT64_KERNELS = Lowering("int64_kernels", ("Pow", "Expand"), lower)
