"""Proven bounds of integer values: what narrowing to int32 or computing integers in float32 stands on.

Interval arithmetic from constants, shapes and booleans outwards. A graph input has the range of its type, so an int64
input proves nothing and an int32 input proves 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

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
        return Range(0, size - 1 if isinstance(size, int) else INT32_MAX)
    if op == "ConstantOfShape":
        value = attributes(node).get("value")
        fill = int(np.ravel(numpy_helper.to_array(value))[0]) if value is not None else 0
        return Range(fill, fill)
    if op == "Cast" and graph.elem(node.input[0]) not in (*_NARROW, TensorProto.INT64):
        return None
    operands = [value_range(graph, i, depth + 1) for i in _sources(node)]
    if op == "Pad" and len(operands) == 1:
        operands.append(Range(0, 0))
    if op in (*_MOVES, "Cast", "Where", "Concat", "Max", "Min", "Pad"):
        return _union(operands)
    known = [o for o in operands if o is not None]
    return _of_arithmetic(graph, node, known) if known and len(known) == len(operands) else None


def _sources(node: NodeProto) -> list[str]:
    """The inputs whose elements the result is made of."""
    if node.op_type in (*_MOVES, "CumSum", "ReduceSum"):
        return [node.input[0]]
    if node.op_type == "Where":
        return list(node.input[1:])
    if node.op_type == "Pad":
        return [n for n in (node.input[0], *node.input[2:3]) if n]
    return [n for n in node.input if n]


def _of_arithmetic(graph: GraphView, node: NodeProto, operands: list[Range]) -> Range | None:
    rule = _ARITHMETIC.get(node.op_type)
    if rule is not None:
        bounds = rule(operands[0], operands[-1])
    elif node.op_type == "Range":  # start, limit, delta
        start, limit = operands[:2]
        bounds = min(start.low, limit.low), max(start.high, limit.high)
    elif node.op_type in ("CumSum", "ReduceSum"):
        shape = graph.static_shape(node.input[0])
        if shape is None:
            return None
        count = max(1, int(np.prod(shape)) if node.op_type == "ReduceSum" else max(shape, default=1))
        bounds = min(0, operands[0].low) * count, max(0, operands[0].high) * count
    else:
        return None
    if bounds is None or bounds[0] < -(1 << 63) or bounds[1] >= 1 << 63:
        return None  # int64 itself may have wrapped
    return Range(*bounds)


def _product(a: Range, b: Range) -> tuple[int, int]:
    corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return min(corners), max(corners)


def _power(a: Range, b: Range) -> tuple[int, int] | None:
    if b.low < 0 or b.high > 64:
        return None
    largest = max(1, a.largest**b.high)
    return (-largest if a.low < 0 else 0), largest


_ARITHMETIC: dict[str, Callable[[Range, Range], tuple[int, int] | None]] = {
    "Add": lambda a, b: (a.low + b.low, a.high + b.high),
    "Sub": lambda a, b: (a.low - b.high, a.high - b.low),
    "Mul": _product,
    "Div": lambda a, b: (min(0, a.low), max(0, a.high)) if b.low > 0 else None,
    "Mod": lambda a, b: (min(0, 1 - b.high), b.high - 1) if b.low > 0 else None,
    "Pow": _power,
    "Neg": lambda a, _: (-a.high, -a.low),
    "Abs": lambda a, _: (0, a.largest),
}


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
