"""Slice bounds beyond int32 -> bounds inside it; axes and steps spelled out.

Exporters write INT64_MAX for "to the end" and INT64_MIN for "from the end, backwards". An axis holds fewer than 2^31
elements, so the nearest int32 number selects the same elements; where the axis is known its length is written.
Bounds that are computed stay: StridedSliceV2 leaves AICore unless they are constants (atc_onnx_ops.json, Slice).
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from op_patches.graph_view import Array, GraphView, input_name
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

_LIMIT = (1 << 31) - 1


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    names = [input_name(node, i) for i in range(1, 5)]
    values = [graph.constant(n) for n in names]
    computed = [n for n, v in zip(names, values, strict=True) if n and v is None]
    if computed:
        return Refusal(
            f"{', '.join(computed)} is computed at run time, which sends Slice to AICPU; bind the input shapes so that"
            " it folds, or gather with indices instead"
        )
    starts, ends = values[0], values[1]
    if starts is None or ends is None or (_inside(starts) and _inside(ends)):
        return None
    axes = values[2] if values[2] is not None else np.arange(len(starts))
    shape = graph.shape(node.input[0])
    sizes = [shape[int(a)] if shape else None for a in axes]
    bounds = [new.const(_clamped(v, sizes), hint=h) for v, h in ((starts, "starts"), (ends, "ends"))]
    rest = [new.const(axes.astype(np.int64), hint="axes")] + ([names[3]] if names[3] else [])
    new.op("Slice", node.input[0], *bounds, *rest, out=node.output[0])
    return Rewrite()


def _inside(bounds: Array) -> bool:
    return bool((np.abs(bounds.astype(np.float64)) <= _LIMIT).all())


def _clamped(bounds: Array, sizes: list[int | str | None]) -> Array:
    """Bounds within [-size - 1, size], or within int32 where the size is open."""
    limits = [size + 1 if isinstance(size, int) else _LIMIT for size in sizes]
    pairs = zip(bounds.tolist(), limits, strict=True)
    return np.asarray([max(-limit, min(bound, limit)) for bound, limit in pairs], dtype=np.int64)


SLICE_BOUNDS = Lowering("slice_bounds", ("Slice",), lower)
