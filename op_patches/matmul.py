"""MatMul that ATC's MatMul does not take -> MatMul that it does.

vector operand    [K] @ B -> Squeeze(Unsqueeze([K]) @ B), the same on the right: the plugin reshapes nothing and GE's
                  BatchMatMulV2 wants two axes or more (atc_onnx_ops.json, MatMul)
integers          Cast to float32, multiply, Cast back, when |A| * |B| * K < 2^24 is proven: then every partial sum
                  is an integer that float32 holds exactly
double            refused: no engine on the chip computes it, and float32 would change the numbers
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView
from op_patches.ranges import value_range
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

_EXACT = 1 << 24  # integers up to here are float32 numbers
_INTEGERS = (
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT32,
    TensorProto.UINT32,
    TensorProto.INT64,
    TensorProto.UINT64,
)


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match MatMul with a vector operand or with a type that no matrix kernel has."""
    a, b = node.input
    elem = graph.elem(a)
    if elem is None:
        return None
    if elem == TensorProto.DOUBLE:
        return Refusal("float64 MatMul has no AICore kernel; float32 would change the numbers: export in float32")
    if elem in _INTEGERS:
        return _in_float32(node, graph, new, elem)
    ranks = graph.rank(a), graph.rank(b)
    if 1 not in ranks or None in ranks:
        return None
    left = new.unsqueeze(a, [0]) if ranks[0] == 1 else a
    right = new.unsqueeze(b, [1]) if ranks[1] == 1 else b
    product = new.op("MatMul", left, right)
    axes = [axis for axis, rank in zip((-2, -1), ranks, strict=True) if rank == 1]
    new.squeeze(product, axes, out=node.output[0])
    return Rewrite("vector operand")


def _in_float32(node: NodeProto, graph: GraphView, new: Builder, elem: int) -> Rewrite | Refusal:
    a, b = node.input
    shape = graph.shape(a)
    depth = shape[-1] if shape else None
    bounds = [value_range(graph, name) for name in (a, b)]
    if not isinstance(depth, int) or bounds[0] is None or bounds[1] is None:
        return Refusal("integer MatMul has no AICore kernel, and no range of the operands is proven for float32")
    largest = depth * bounds[0].largest * bounds[1].largest
    if largest >= _EXACT:
        return Refusal(f"integer MatMul: sums up to {largest} exceed 2^24, which float32 does not hold exactly")
    product = new.op("MatMul", new.cast(a, TensorProto.FLOAT), new.cast(b, TensorProto.FLOAT))
    new.cast(product, elem, out=node.output[0])
    ranges = {name: (r.low, r.high) for name, r in zip((a, b), bounds, strict=True) if r is not None}
    return Rewrite(f"in float32: sums stay below {largest + 1}", ranges=ranges)


MATMUL = Lowering("matmul", ("MatMul",), lower)
