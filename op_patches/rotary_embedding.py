"""RotaryEmbedding-23 and com.microsoft RotaryEmbedding -> Slice, Mul, Sub, Add, Concat.

With x split into pairs (a, b), as halves or interleaved, and c, s the rows of the caches at the positions:

    (a, b) -> (a * c - b * s, a * s + b * c)

Sources: ONNX operator RotaryEmbedding-23; ONNX Runtime docs/ContribOperators.md. x is [B, H, S, D] or [B, S, H * D];
only the first `rotary_embedding_dim` of D are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes, input_name
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


@dataclass(frozen=True, slots=True)
class _Call:
    """The operands of either operator under one set of names."""

    x: str
    cos: str
    sin: str
    positions: str
    heads: int
    rotated: int  # 0: all of D
    interleaved: bool


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    call = _read(node)
    if attributes(node).get("scale", 1.0) != 1.0 or attributes(node).get("is_packed_batching"):
        return Refusal("scale or is_packed_batching, which no exporter was seen to write")
    shape, cache = graph.shape(call.x), graph.shape(call.cos)
    if shape is None or cache is None or graph.elem(call.x) is None:
        return Refusal(f"the shape of {call.x} or {call.cos} is unknown")
    half = cache[-1] if cache else None
    if not isinstance(half, int) or len(shape) not in (3, 4):
        return Refusal(f"{call.x} has {len(shape)} axes, the cache ends in {half}; expected 3 or 4 and a number")
    width = shape[-1] if len(shape) == 4 else _head_size(shape[-1], call.heads, half)
    if not isinstance(width, int):
        return Refusal(f"the head size of {call.x} is open")
    heads = call.heads or (int(shape[-1]) // width if isinstance(shape[-1], int) else 0)
    x = call.x
    if len(shape) == 3:  # [B, S, H * D] -> [B, H, S, D]
        x = new.op("Transpose", new.reshape(x, [0, 0, heads, width]), perm=[0, 2, 1, 3])
    cos_sin = _caches(call, graph, new, shape)
    if isinstance(cos_sin, Refusal):
        return cos_sin
    rotated = 2 * half
    whole = rotated == width and len(shape) == 4
    y = _rotate(new, x, cos_sin, half, width, call.interleaved, node.output[0] if whole else None)
    if rotated < width:
        y = new.op(
            "Concat", y, _slice(new, x, rotated, width), axis=-1, out=node.output[0] if len(shape) == 4 else None
        )
    if len(shape) == 3:
        new.reshape(new.op("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, heads * width], out=node.output[0])
    return Rewrite("interleaved" if call.interleaved else "halves", ranges=_position_range(call, graph, shape[-2]))


def _position_range(call: _Call, graph: GraphView, length: object) -> dict[str, tuple[int, int]]:
    """Positions are rows of the caches; an offset leaves room for the rows behind it."""
    cache = graph.static_shape(call.cos)
    if not call.positions or cache is None:
        return {}
    behind = length - 1 if graph.rank(call.positions) == 1 and isinstance(length, int) else 0
    return {call.positions: (0, cache[0] - 1 - behind)}


def _read(node: NodeProto) -> _Call:
    attrs = attributes(node)
    rest = (attrs.get("num_heads", 0), attrs.get("rotary_embedding_dim", 0), bool(attrs.get("interleaved", 0)))
    if node.domain == "com.microsoft":
        return _Call(node.input[0], node.input[2], node.input[3], node.input[1], *rest)
    return _Call(node.input[0], node.input[1], node.input[2], input_name(node, 3), *rest)


def _head_size(hidden: object, heads: int, half: int) -> int | None:
    if not isinstance(hidden, int):
        return None
    return hidden // heads if heads else 2 * half


def _caches(
    call: _Call, graph: GraphView, new: Builder, shape: tuple[int | str | None, ...]
) -> tuple[str, str] | Refusal:
    """cos and sin as [B, 1, S, D / 2]."""
    if not call.positions:  # the caches are [B, S, D / 2] already
        return new.unsqueeze(call.cos, [1]), new.unsqueeze(call.sin, [1])
    positions = call.positions
    rank, length = graph.rank(positions), shape[-2]
    if rank == 1:  # com.microsoft: one offset for every row
        if not isinstance(length, int):
            return Refusal(f"{positions} is an offset and the sequence length is open: bind the input shapes")
        count = new.const(np.arange(length, dtype=np.int64)[None, :], hint="count")
        positions = new.op("Add", new.unsqueeze(positions, [1]), count)
    elif rank != 2:
        return Refusal(f"the rank of {positions} is unknown")
    cos, sin = (new.unsqueeze(new.op("Gather", c, positions, axis=0), [1]) for c in (call.cos, call.sin))
    return cos, sin


def _rotate(
    new: Builder, x: str, cos_sin: tuple[str, str], half: int, width: int, interleaved: bool, out: str | None
) -> str:
    cos, sin = cos_sin
    if interleaved:
        first, second = _slice(new, x, 0, 2 * half, 2), _slice(new, x, 1, 2 * half, 2)
    else:
        first, second = _slice(new, x, 0, half), _slice(new, x, half, 2 * half)
    a = new.op("Sub", new.op("Mul", first, cos), new.op("Mul", second, sin))
    b = new.op("Add", new.op("Mul", first, sin), new.op("Mul", second, cos))
    if not interleaved:
        return new.op("Concat", a, b, axis=-1, out=out)
    pairs = new.op("Concat", new.unsqueeze(a, [-1]), new.unsqueeze(b, [-1]), axis=-1)
    return new.reshape(pairs, [0, 0, 0, 2 * half], out=out)


def _slice(new: Builder, x: str, start: int, end: int, step: int = 1) -> str:
    bounds = [new.const([value], hint=hint) for value, hint in ((start, "start"), (end, "end"), (-1, "axis"))]
    return new.op("Slice", x, *bounds, *([new.const([step], hint="step")] if step > 1 else []))


ROTARY_EMBEDDING = Lowering("rotary_embedding", ("RotaryEmbedding",), lower)
