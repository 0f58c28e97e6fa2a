"""The hazard of a growing KV cache that is compiled at a fixed capacity.

A decode graph in the published form concatenates the past [B, P, H, D] with the new row and masks the P + 1 keys by
length: position < past_length + 1. With P equal to the length that is right. Bound to a capacity P, the new key sits at
index P and is masked out, while the unused row at index past_length is attended: it compiles and sounds wrong.

Looked for here, in the graph as it was exported:
  1. Concat joins a graph input (through Transpose, Cast, Identity …) with new rows on an axis of the input;
  2. its result reaches a MatMul whose scores reach a Softmax (attention);
  3. a comparison of positions with a number from an integer graph input reaches that Softmax, and the positions count
     the joined keys. A mask that treats the new key apart (a Concat of masks, or an Or / And with an Equal) is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from op_patches.graph_view import Array, GraphView, attributes
from op_patches.readiness.parser import node_names
from op_patches.readiness.report import Finding, Severity
from op_patches.readiness.views import is_standard
from op_patches.targets import Certainty

_VIEWS = {"Identity", "Cast", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Tile"}
_COMPARISONS = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
_MASK_STEPS = _VIEWS | {"And", "Or", "Not", "Where", "Mul", "Add", "Sub", "Neg", "Div", "Slice"}
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def padded_past_findings(root: GraphView, bound: frozenset[str]) -> Iterator[Finding]:
    """`bound` names the graph inputs that have an axis which was open in the file and is a number now."""
    graph = _Graph(root)
    for node, name in zip(root.nodes, node_names(root.proto), strict=True):
        past = graph.past_input(node)
        if past is None:
            continue
        softmaxes = graph.attention_softmaxes(node)
        comparison = graph.length_mask(node, softmaxes) if softmaxes else None
        if comparison is None:
            continue
        axis = "bound" if past in bound else "open"
        yield Finding(
            Severity.WRONG,
            "hazard.padded-past",
            name,
            node.op_type,
            f"{past} is joined with the new row on its {axis} axis, which ATC compiles at a fixed capacity, and the"
            f" keys are masked by length ({comparison.name or comparison.op_type}): with a past longer than the valid"
            " length, the new key is masked out and an unused row is attended",
            "mask with (position < length) OR (position == capacity), or attend to the cache and the new row apart and"
            " return only the new row (as the graphs of this project do)",
            "upstream export_moss_tts_browser_onnx.py @42b4645; reproduced on ONNX Runtime in tests",
            Certainty.SOURCE,
        )


class _Graph:
    """Producers and consumers of the root graph, for walking in both directions."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.inputs = {info.name for info in view.proto.input}
        self.consumers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in view.nodes:
            for value in node.input:
                self.consumers[value].append(node)

    def past_input(self, node: NodeProto) -> str | None:
        """The graph input that a Concat extends by rows that are computed; None when it is no such Concat."""
        if node.op_type != "Concat" or not is_standard(node) or len(node.input) != 2:
            return None
        axis = int(attributes(node).get("axis", 0))
        past = [value for value in node.input if self._is_past(value, axis)]
        return self._root(past[0]) if len(past) == 1 else None

    def _is_past(self, value: str, axis: int) -> bool:
        """Whether a joined operand is a graph input of keys or values: a float tensor with more than one row."""
        root, shape = self._root(value), self.view.shape(value)
        if root not in self.inputs or self.view.elem(root) in _INTEGERS:
            return False
        return shape is None or (len(shape) >= 3 and axis % len(shape) > 0 and shape[axis] != 1)

    def _root(self, value: str) -> str:
        """Follow a value back through operators that only rearrange it."""
        seen = {value}
        while True:
            node = self.view.producer(value)
            if node is None or node.op_type not in _VIEWS or not node.input or node.input[0] in seen:
                return value
            value = node.input[0]
            seen.add(value)

    def attention_softmaxes(self, join: NodeProto) -> list[NodeProto]:
        """Softmax nodes that the joined keys reach through a MatMul of their own."""
        products = [n for n in self._forward(join, _VIEWS) if n.op_type in ("MatMul", "Einsum")]
        found: dict[int, NodeProto] = {}
        for product in products:
            for node in self._forward(product, _MASK_STEPS):
                if node.op_type == "Softmax":
                    found[id(node)] = node
        return list(found.values())

    def length_mask(self, join: NodeProto, softmaxes: list[NodeProto]) -> NodeProto | None:
        """A comparison of the joined keys' positions with a length, on the way to one of the Softmax nodes."""
        wanted = {id(node) for node in softmaxes}
        for node in self.view.nodes:
            if node.op_type not in _COMPARISONS or not self._compares_length(node, join):
                continue
            if any(id(reached) in wanted for reached in self._forward(node, _MASK_STEPS, mask=True)):
                return node
        return None

    def _compares_length(self, node: NodeProto, join: NodeProto) -> bool:
        sides = [self._origins(value) for value in node.input]
        for position, length in (sides, sides[::-1]):
            from_input = any(n in self.inputs and self.view.elem(n) in _INTEGERS for n in length.values)
            if from_input and position.counts and self._covers(node, join):
                return True
        return False

    def _covers(self, comparison: NodeProto, join: NodeProto) -> bool:
        """Whether the compared positions count the joined keys (unknown sizes count as yes)."""
        compared = self.view.shape(comparison.output[0])
        joined = self.view.shape(join.output[0])
        if not compared or not joined or not isinstance(compared[-1], int):
            return True
        size = joined[int(attributes(join).get("axis", 0)) % len(joined)]
        return not isinstance(size, int) or compared[-1] == size

    def _origins(self, value: str) -> _Origins:
        """Where a number comes from, and whether positions are counted (Range, or a constant 0, 1, 2 …) on the way."""
        values: set[str] = set()
        counts = False
        stack = [value]
        while stack:
            name = stack.pop()
            if name in values:
                continue
            values.add(name)
            constant = self.view.constant(name)
            counts |= constant is not None and constant.size > 1 and _is_arange(constant)
            node = self.view.producer(name)
            if node is None:
                continue
            if node.op_type in ("Range", "CumSum"):
                counts = True
            elif node.op_type != "Shape":
                stack.extend(n for n in node.input if n)
        return _Origins(frozenset(values), counts)

    def _forward(self, start: NodeProto, through: set[str], mask: bool = False) -> list[NodeProto]:
        """Nodes reached from `start`; the walk goes on behind operators in `through` only."""
        reached: dict[int, NodeProto] = {}
        stack = [start]
        while stack:
            node = stack.pop()
            for output in node.output:
                for consumer in self.consumers[output]:
                    if id(consumer) in reached:
                        continue
                    if mask and consumer.op_type in ("Or", "And", "Where") and self._joins_equal(consumer, output):
                        continue  # the new key is treated apart
                    reached[id(consumer)] = consumer
                    if consumer.op_type in through:
                        stack.append(consumer)
        return list(reached.values())

    def _joins_equal(self, node: NodeProto, entry: str) -> bool:
        for value in node.input:
            producer = self.view.producer(self._root(value)) if value != entry else None
            if producer is not None and producer.op_type == "Not" and producer.input:
                producer = self.view.producer(self._root(producer.input[0]))
            if producer is not None and producer.op_type == "Equal":
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Origins:
    """The values a number is computed from, and whether positions are counted among them."""

    values: frozenset[str]
    counts: bool


def _is_arange(constant: Array) -> bool:
    flat = constant.reshape(-1)
    return bool(flat.dtype.kind in "iu" and np.array_equal(flat, np.arange(flat.size)))
