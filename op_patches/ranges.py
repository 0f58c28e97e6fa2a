"""Proven bounds of integer values: what narrowing to int32 or computing integers in float32 stands on.

Interval arithmetic from constants, shapes and booleans outwards. A graph input has the range of its type, so an int64
input proves nothing and an int32 input proves 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView, attributes

INT32_MAX = (1 << 31) - 1
_MAX_DEPTH = 64
_NARROW: dict[int | None, tuple[int, int]] = {
    TensorProto.BOOL: (0, 1),
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-(1 << 15), (1 << 15) - 1),
    TensorProto.UINT16: (0, (1 << 16) - 1),
    TensorProto.INT32: (-(1 << 31), INT32_MAX),
}
# These hand on elements of their first input, in another place.
_MOVES = (
    "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Expand", "Tile", "Gather", "GatherElements",
    "GatherND", "Flatten", "ReduceMax", "ReduceMin", "Split",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Range:
    """low <= value <= high."""

    low: int
    high: int

    @property
    def largest(self) -> int:
        """The largest |value|."""
        return max(abs(self.low), abs(self.high))

    @property
    def fits_int32(self) -> bool:
        return self.low >= -(1 << 31) and self.high <= INT32_MAX


def value_range(graph: GraphView, name: str, depth: int = 0) -> Range | None:
    """The bounds of an integer or boolean value; None when nothing is proven."""
    constant = graph.constant(name)
    if constant is not None:
        if constant.dtype.kind not in "iub" or not constant.size:
            return None
        return Range(int(constant.min()), int(constant.max()))
    node = graph.producer(name)
    computed = _of_node(graph, node, depth) if node is not None and depth < _MAX_DEPTH else None
    limits = _NARROW.get(graph.elem(name))
    if limits is None:
        return computed
    typed = Range(*limits)
    inside = computed is not None and typed.low <= computed.low and computed.high <= typed.high
    return computed if inside else typed  # an overflow wraps, so only the type's own range is sure


def node_range(graph: GraphView, node: NodeProto) -> Range | None:
    """The bounds of what a node computes, in unlimited integers: whether a narrower type would hold it."""
    return _of_node(graph, node, 0)


def _of_node(graph: GraphView, node: NodeProto, depth: int) -> Range | None:
    op = node.op_type
    if op in ("Shape", "Size"):
        return _of_shape(graph, node)
    if op in ("ArgMax", "ArgMin"):
        shape = graph.shape(node.input[0])
        size = shape[attributes(node).get("axis", 0)] if shape else None
        return Range(0, size - 1) if isinstance(size, int) else Range(0, INT32_MAX)
    if op == "ConstantOfShape":
        value = attributes(node).get("value")
        fill = int(np.ravel(_array(value))[0]) if value is not None else 0
        return Range(fill, fill)
    if op == "Pad":
        operands = [value_range(graph, i, depth + 1) for i in (node.input[0], *node.input[2:3]) if i]
        return _union([*operands, *([] if len(operands) > 1 else [Range(0, 0)])])
    operands = [value_range(graph, i, depth + 1) for i in node.input if i]
    if op == "Where":
        return _union(operands[1:])
    if op in ("Concat", "Max", "Min"):
        return _union(operands)
    if op == "Cast":
        source = graph.elem(node.input[0])
        return operands[0] if source in (*_NARROW, TensorProto.INT64) else None
    if op in _MOVES:
        return operands[0]
    if not operands or any(o is None for o in operands):
        return None
    known = [o for o in operands if o is not None]
    return _of_arithmetic(graph, node, known)


def _of_arithmetic(graph: GraphView, node: NodeProto, operands: list[Range]) -> Range | None:
    a, b = operands[0], operands[-1]
    if node.op_type == "Add":
        return _fitting(a.low + b.low, a.high + b.high)
    if node.op_type == "Sub":
        return _fitting(a.low - b.high, a.high - b.low)
    if node.op_type == "Mul":
        corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return _fitting(min(corners), max(corners))
    if node.op_type == "Div" and b.low > 0:
        return _fitting(-a.largest, a.largest)
    if node.op_type == "Pow" and b.low >= 0 and b.high <= 64:
        return _fitting(-(a.largest**b.high) if a.low < 0 else 0, max(1, a.largest**b.high))
    if node.op_type == "Mod" and b.low > 0:
        return Range(min(0, 1 - b.high), b.high - 1)
    if node.op_type == "Neg":
        return _fitting(-a.high, -a.low)
    if node.op_type == "Abs":
        return _fitting(0, a.largest)
    if node.op_type == "Range":
        return _fitting(min(a.low, b.low, operands[1].low), max(a.high, operands[1].high))
    if node.op_type in ("CumSum", "ReduceSum"):
        data = operands[0]
        shape = graph.static_shape(node.input[0])
        if shape is None:
            return None
        count = max(1, int(np.prod(shape)) if node.op_type == "ReduceSum" else max(shape, default=1))
        return _fitting(min(0, data.low) * count, max(0, data.high) * count)
    return None


def _of_shape(graph: GraphView, node: NodeProto) -> Range:
    shape = graph.static_shape(node.input[0])
    if shape is None:
        return Range(0, INT32_MAX)  # an axis of 2^31 elements fits no device
    sizes = [int(np.prod(shape, dtype=np.int64))] if node.op_type == "Size" else list(shape) or [0]
    return Range(min(sizes), max(sizes))


def _union(ranges: list[Range | None]) -> Range | None:
    known = [r for r in ranges if r is not None]
    if len(known) < len(ranges) or not known:
        return None
    return Range(min(r.low for r in known), max(r.high for r in known))


def _fitting(low: int, high: int) -> Range | None:
    """The range, unless int64 itself may have wrapped."""
    return Range(low, high) if low >= -(1 << 63) and high < (1 << 63) else None


def _array(tensor: TensorProto) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    from onnx import numpy_helper

    return numpy_helper.to_array(tensor)
