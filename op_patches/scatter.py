"""ScatterND and ScatterElements -> comparison, Gather and Where. ScatterND runs on AICPU on every chip, ScatterElements
on 310P, and before CANN 9.1 both plugins drop `reduction` without a word.

Along the scattered axis of length D with N updates, hit[n, d] says that update n writes place d:

    hit[n, d] = (index[n] == d)        (a negative index counts from the end)
    none      last[d] = max over n of (n + 1) * hit[n, d]
              y[d]    = updates[last[d] - 1] where last[d] > 0, else data[d]        the last of equal indices wins
    add       y = data + sum over n of hit * updates      mul, max, min likewise over Where(hit, updates, neutral)

The cost is N * D comparisons, so the rule stops at 2^24 of them. ScatterND with coordinates of several axes is first
flattened: place = i0 * stride0 + i1 * stride1 + …
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite
from op_patches.targets import Engine, Release

_MAX_COMPARISONS = 1 << 24
_REDUCES = {"add": "ReduceSum", "mul": "ReduceProd", "max": "ReduceMax", "min": "ReduceMin"}
_JOINS = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    data = node.input[0]
    reduction = attributes(node).get("reduction", b"none").decode()
    if node.op_type == "ScatterElements" and _kept(graph, data, reduction):
        return None
    if graph.elem(data) in (None, TensorProto.STRING, TensorProto.BOOL) and reduction != "none":
        return Refusal(f"reduction {reduction} on data of this type")
    shapes = [graph.static_shape(name) for name in node.input]
    if any(s is None for s in shapes):
        return Refusal("data, indices or updates have open axes: bind the input shapes")
    data_shape, index_shape, _ = (s for s in shapes if s is not None)
    if node.op_type == "ScatterND":
        return _scatter_nd(node, graph, new, data_shape, index_shape, reduction)
    return _scatter_elements(node, graph, new, data_shape, index_shape, reduction)


def _kept(graph: GraphView, data: str, reduction: str) -> bool:
    silent = reduction != "none" and graph.target.release < Release.parse("9.1")
    return graph.engine("ScatterElements", data) == Engine.AICORE and not silent


def _scatter_nd(
    node: NodeProto,
    graph: GraphView,
    new: Builder,
    data_shape: tuple[int, ...],
    index_shape: tuple[int, ...],
    reduction: str,
) -> Rewrite | Refusal:
    data, indices, updates = node.input
    depth = index_shape[-1]
    places = int(np.prod(data_shape[:depth]))
    count = int(np.prod(index_shape[:-1]))
    rest = int(np.prod(data_shape[depth:]))
    if count * places * (rest if reduction != "none" else 1) > _MAX_COMPARISONS:
        return Refusal(f"{count} updates over {places} places are too many comparisons")
    index = new.cast(new.reshape(indices, [count, depth]), TensorProto.INT32)
    sizes = np.asarray(data_shape[:depth], dtype=np.int32)
    strides = np.asarray([int(np.prod(data_shape[i + 1 : depth])) for i in range(depth)], dtype=np.int32)
    index = _from_start(new, index, sizes)
    place = new.reduce("ReduceSum", new.op("Mul", index, new.const(strides, hint="strides")), [1], keepdims=1)
    hit = new.op("Equal", place, new.const(np.arange(places, dtype=np.int32)[None, :], hint="places"))  # [N, D]
    flat = new.reshape(data, [places, rest])
    rows = new.reshape(updates, [count, rest])
    if reduction == "none":
        last = _last(new, hit, count, axis=0, rank=2)
        where = new.op("Greater", last, new.const(np.int32(0), hint="zero"))
        row = new.op(
            "Max", new.op("Sub", last, new.const(np.int32(1), hint="one")), new.const(np.int32(0), hint="first")
        )
        written = new.op("Gather", rows, new.squeeze(row, [0]), axis=0)
        y = new.op("Where", new.reshape(where, [places, 1]), written, flat)
    else:
        spread = new.op(
            "Where", new.unsqueeze(hit, [2]), new.unsqueeze(rows, [1]), _neutral(new, graph, data, reduction)
        )
        y = new.op(_JOINS[reduction], flat, new.reduce(_REDUCES[reduction], spread, [0], keepdims=0))
    new.reshape(y, data_shape, out=node.output[0])
    low, high = -min(data_shape[:depth]), min(data_shape[:depth]) - 1
    return Rewrite(f"{count} updates, {reduction}", ranges={indices: (low, high)})


def _scatter_elements(
    node: NodeProto,
    graph: GraphView,
    new: Builder,
    data_shape: tuple[int, ...],
    index_shape: tuple[int, ...],
    reduction: str,
) -> Rewrite | Refusal:
    data, indices, updates = node.input
    rank = len(data_shape)
    axis = attributes(node).get("axis", 0) % rank
    if any(n != m for i, (n, m) in enumerate(zip(data_shape, index_shape, strict=True)) if i != axis):
        return Refusal("the indices are shorter than the data on another axis than the scattered one")
    count, places = index_shape[axis], data_shape[axis]
    if count * int(np.prod(data_shape)) > _MAX_COMPARISONS:
        return Refusal(f"{count} updates over {data_shape} are too many comparisons")
    # n runs over axis, d over a new axis after it: [..., N, D, ...]
    index = _from_start(new, new.cast(indices, TensorProto.INT32), np.asarray(places, dtype=np.int32))
    place_shape = [1] * (rank + 1)
    place_shape[axis + 1] = places
    place = new.const(np.arange(places, dtype=np.int32).reshape(place_shape), hint="places")
    hit = new.op("Equal", new.unsqueeze(index, [axis + 1]), place)
    if reduction == "none":
        last = new.squeeze(_last(new, hit, count, axis=axis, rank=rank + 1), [axis])
        where = new.op("Greater", last, new.const(np.int32(0), hint="zero"))
        row = new.op(
            "Max", new.op("Sub", last, new.const(np.int32(1), hint="one")), new.const(np.int32(0), hint="first")
        )
        new.op("Where", where, new.op("GatherElements", updates, row, axis=axis), data, out=node.output[0])
    else:
        neutral = _neutral(new, graph, data, reduction)
        spread = new.op("Where", hit, new.unsqueeze(updates, [axis + 1]), neutral)
        reduced = new.reduce(_REDUCES[reduction], spread, [axis], keepdims=0)
        new.op(_JOINS[reduction], data, reduced, out=node.output[0])
    return Rewrite(f"{count} updates, {reduction}", ranges={indices: (-places, places - 1)})


def _from_start(new: Builder, index: str, sizes: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> str:
    negative = new.op("Less", index, new.const(np.int32(0), hint="zero"))
    return new.op("Where", negative, new.op("Add", index, new.const(sizes, hint="sizes")), index)


def _last(new: Builder, hit: str, count: int, axis: int, rank: int) -> str:
    """The number, from 1, of the last update that writes each place; 0 where none does."""
    shape = [1] * rank
    shape[axis] = count
    numbers = new.const(np.arange(1, count + 1, dtype=np.int32).reshape(shape), hint="numbers")
    return new.reduce("ReduceMax", new.op("Mul", new.cast(hit, TensorProto.INT32), numbers), [axis], keepdims=1)


def _neutral(new: Builder, graph: GraphView, data: str, reduction: str) -> str:
    kind = graph.type_of(data)
    assert kind is not None
    if reduction in ("add", "mul"):
        return new.const(0 if reduction == "add" else 1, data, "neutral")
    limits = np.iinfo(kind.dtype) if "int" in kind.dtype else np.finfo(kind.dtype)
    return new.const(np.asarray(limits.min if reduction == "max" else limits.max), data, "neutral")


SCATTER = Lowering("scatter", ("ScatterND", "ScatterElements"), lower)
