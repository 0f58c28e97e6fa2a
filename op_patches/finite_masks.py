"""Mask constants that float16 cannot hold -> -10,000, where only Softmax sees them.

    Softmax(Where(c, s, -inf))   Softmax(s + Where(c, 0, finfo.min))   Softmax(s + (1 - c) * finfo.min)

In float16 -3.4e38 becomes -inf; two of them added stay -inf, times zero they are NaN, and a row of -inf is NaN after
Softmax. exp(-10,000 - max) is 0 in float32 for every max above -9,896, so the result is the same number for scores
within ±5,000 as long as a row keeps one unmasked score. A row that masks everything was NaN or uniform and now weighs
the bare scores: the proof measures rows with an unmasked score, and the report states the assumption.
Used where ATC may store float16, and for float16 graphs on any target.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from op_patches.graph_view import Array, GraphView, attributes, stores_float16
from op_patches.ranges import value_range
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

MASKED = -1e4
_FLOAT16_LOWEST = -65504.0
_MAX_STEPS = 8
# Between the mask and Softmax: the mask stays the smallest value by far.
_MOVES = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Identity", "Slice", "Tile")
_KEEPS_MASK = ("Add", "Where", "Cast", *_MOVES)


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match the node that reads the constant: Where, Add or Mul."""
    places = [i for i, name in enumerate(node.input) if _is_mask(graph.constant(name))]
    elem = graph.elem(node.output[0])
    if not places or elem not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return None
    if elem == TensorProto.FLOAT and not stores_float16(graph.target):
        return None
    blocker = _leaves_softmax(node, graph, 0)
    if blocker:
        return Refusal(f"the mask reaches {blocker}, which sees more of it than that it is small")
    chain = _switch(node, places, graph)
    if isinstance(chain, Refusal):
        return chain
    rank = graph.rank(node.output[0])
    if not rank:
        return Refusal(f"the rank of {node.output[0]} is unknown")
    copied: dict[str, str] = {}
    for member in chain:
        given = new.ops(member.op_type, [copied.get(n, n) for n in member.input], (None,), **attributes(member))
        copied[member.output[0]] = given[0]
    inputs = [copied.get(name, name) for name in node.input]
    for place in places:
        value = graph.constant(inputs[place])
        assert value is not None
        finite = np.where(value <= _FLOAT16_LOWEST, np.asarray(MASKED, dtype=value.dtype), value)
        inputs[place] = new.const(finite, hint="masked")
    new.op(node.op_type, *inputs, out=node.output[0])
    detail = f"{MASKED:g}; for scores within ±5,000 and rows with an unmasked score"
    return Rewrite(detail, tuple(chain), observer=_softmax_with_one_unmasked(node.output[0], rank))


def _switch(node: NodeProto, places: list[int], graph: GraphView) -> list[NodeProto] | Refusal:
    """For a product, the nodes that make the other factor out of a value that is proven to be 0 or 1."""
    if node.op_type != "Mul":
        return []
    chain: list[NodeProto] = []
    name = node.input[1 - places[0]]
    for _ in range(_MAX_STEPS):
        known = value_range(graph, name)
        if known is not None and known.low >= 0 and known.high <= 1:
            return chain[::-1]
        producer = graph.producer(name)
        if producer is None or producer.op_type not in ("Cast", "Sub", *_MOVES):
            break
        chain.append(producer)
        operands = [n for n in producer.input if graph.constant(n) is None]
        if len(operands) != 1:
            break
        name = operands[0]
    return Refusal(f"{name} times the mask constant: that it is 0 or 1 is not proven (feed the mask as bool)")


def _softmax_with_one_unmasked(name: str, rank: int) -> tuple[NodeProto, ...]:
    """Softmax over the row and one more score, 0, that nothing masks."""
    pads = numpy_helper.from_array(np.asarray([0] * (2 * rank - 1) + [1], dtype=np.int64))
    return (
        helper.make_node("Constant", [], ["observer/pads"], value=pads),
        helper.make_node("Pad", [name, "observer/pads"], ["observer/row"]),
        helper.make_node("Softmax", ["observer/row"], ["observer/weights"], axis=-1),
    )


def _is_mask(value: Array | None) -> bool:
    """Floats with at least one value at or below what float16 holds, and nothing that would overflow upwards."""
    if value is None or value.dtype.kind != "f" or not value.size or np.isnan(value).any():
        return False
    return bool((value <= _FLOAT16_LOWEST).any() and (value < -_FLOAT16_LOWEST).all())


def _leaves_softmax(node: NodeProto, graph: GraphView, depth: int) -> str | None:
    """The first operator on the way that is not Softmax and could show the mask's value; None when there is none."""
    if any(graph.is_output(o) for o in node.output):
        return "a graph output"
    for consumer in graph.consumers(node.output[0]):
        if consumer.op_type == "Softmax":
            continue
        if consumer.op_type not in _KEEPS_MASK or depth > _MAX_STEPS:
            return f"{consumer.op_type} ({consumer.name})"
        blocker = _leaves_softmax(consumer, graph, depth + 1)
        if blocker:
            return blocker
    return None


FINITE_MASKS = Lowering("finite_masks", ("Where", "Add", "Mul"), lower)
