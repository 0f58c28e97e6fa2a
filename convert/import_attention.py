"""Attention read off a graph: which part of a linear is q, k and v, and how many keys a query may look at.

q and k meet in the product before the Softmax, v stands in the product behind it. A window shows as a comparison with
a constant in what masks the scores.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
from onnx import NodeProto

from convert.import_view import MOVES, Floats, GraphView, Linear
from runtime.errors import CheckpointError

_COMPARISONS = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual"}


def joined_qkv(view: GraphView, linears: list[Linear], softmax: NodeProto) -> Linear:
    """One linear with q, k and v in this order, from one linear or three, in any order."""
    query, key = score_operands(view, softmax)
    sources = [query, key, _values(view, softmax)]
    if len(linears) == 3:
        return _joined([_part(view, source, linears, softmax) for source in sources])
    if len(linears) != 1 or linears[0].weight.shape[1] % 3:
        raise CheckpointError(
            f"{view.name}: {softmax.name}: {len(linears)} linear layers in one attention; expected 1 or 3"
        )
    joined = linears[0]
    order = [_third(view, source, joined) for source in sources]
    if sorted(order) != [0, 1, 2]:
        raise CheckpointError(f"{view.name}: {softmax.name}: cannot tell q, k and v apart (parts {order})")
    if order == [0, 1, 2]:
        return joined
    bias = None if joined.bias is None else _thirds(joined.bias, order)
    return Linear(_thirds(joined.weight, order), bias, joined.source, joined.output)


def score_operands(view: GraphView, softmax: NodeProto) -> tuple[str, str]:
    """q and k, as they enter the product before a Softmax."""
    for node in _before(view, softmax):
        if node.op_type == "MatMul":
            return node.input[0], node.input[1]
    raise CheckpointError(f"{view.name}: {softmax.name}: no product of queries and keys before this Softmax")


def window(view: GraphView, softmax: NodeProto) -> int | None:
    """Keys that a query sees, itself included; None when the mask compares with no constant, or with several."""
    sizes = set()
    for node in _before(view, softmax):
        if node.op_type == "MatMul":
            continue
        for operand in node.input:
            if not view.weighted(operand):
                sizes |= {s for n in view.ancestors(operand, unweighted=True) for s in _compared_with(view, n)}
    return sizes.pop() if len(sizes) == 1 else None


def _before(view: GraphView, softmax: NodeProto) -> list[NodeProto]:
    """The nodes between a Softmax and the product of queries and keys, the product included; nearest first."""
    found, queue = [], deque([softmax.input[0]])
    while queue:
        value = queue.popleft()
        node = view.producer(value)
        if node is None or not view.weighted(value):
            continue
        found.append(node)
        if node.op_type != "MatMul":
            queue.extend(node.input)
    return found


def _compared_with(view: GraphView, node: NodeProto) -> set[int]:
    """A window from age < size, age <= size - 1, or the opposite of it."""
    if node.op_type not in _COMPARISONS:
        return set()
    for at in (0, 1):
        limit = view.constant(node.input[at])
        if limit is None or limit.size != 1:
            continue
        # the constant stands right of < or >=, or left of > or <=: the size itself; else one less
        strict = (node.op_type in ("Less", "GreaterOrEqual")) == (at == 1)
        size = int(limit.reshape(-1)[0]) + (0 if strict else 1)
        return {size} if size > 0 else set()
    return set()


def _values(view: GraphView, softmax: NodeProto) -> str:
    """v, as it enters the product behind a Softmax; between them there may be a mask."""
    queue = deque([softmax.output[0]])
    while queue:
        value = queue.popleft()
        for node in view.consumers(value):
            if node.op_type == "MatMul" and node.input[0] == value:
                return str(node.input[1])
            if node.op_type in MOVES or node.op_type in ("Where", "Mul"):
                queue.extend(node.output)
    raise CheckpointError(f"{view.name}: {softmax.name}: no product with values behind this Softmax")


def _part(view: GraphView, source: str, linears: list[Linear], softmax: NodeProto) -> Linear:
    near = {linear.output for linear in view.nearest(source).linears}
    parts = [linear for linear in linears if linear.output in near]
    if len(parts) != 1:
        raise CheckpointError(f"{view.name}: {softmax.name}: cannot tell q, k and v apart ({len(parts)} candidates)")
    return parts[0]


def _joined(parts: list[Linear]) -> Linear:
    weight = np.concatenate([part.weight for part in parts], axis=1)
    biases = [np.zeros(p.weight.shape[1], np.float32) if p.bias is None else p.bias for p in parts]
    bias = None if all(part.bias is None for part in parts) else np.concatenate(biases)
    return Linear(weight, bias, parts[0].source, parts[0].output)


def _thirds(array: Floats, order: list[int]) -> Floats:
    parts: list[npt.NDArray[np.float32]] = np.split(array, 3, axis=-1)
    return np.concatenate([parts[i] for i in order], axis=-1)


def _third(view: GraphView, value: str, joined: Linear) -> int:
    """Which third of the joined linear a value comes from; -1 when it is not one."""
    size = joined.weight.shape[1] // 3
    found = set()
    for node in view.nearest(value).nodes:
        if view.skip_moves(node.input[0]) != joined.output:
            continue
        if node.op_type == "Split":
            found |= {i for i, output in enumerate(node.output) if view.reads(value, output)}
        elif node.op_type in ("Gather", "Slice"):
            start = view.constant(node.input[1])
            first = -1 if start is None or start.size != 1 else int(start.reshape(-1)[0])
            found.add(first // size if node.op_type == "Slice" and first >= 3 else first)
    return found.pop() if len(found) == 1 else -1
