"""TopK -> ranks by counting, where TopK would fall to AICPU, or on request.

    rank[i] = #{j: x[j] > x[i]} + #{j < i: x[j] == x[i]}         (< for the smallest)
    pick[p, i] = (rank[i] == p),  p = 0 … k - 1
    values[p] = sum over i of pick * x,  indices[p] = sum over i of pick * i

Ties go to the lower index, as ONNX defines. n * n comparisons: for 1,024 codes a million, one vector instruction stream
and no sort. GE's TopK has only an AICPU kernel, its AICore form TopKV2 depends on a rewrite inside GE and takes floats
(ARCHITECTURE.md, section 5), so floats are kept by default and integers are lowered.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView, as_scalar, attributes, output_name
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite
from op_patches.targets import Engine

_MAX_LENGTH = 4096


def top_k(always: bool) -> Lowering:
    """The rule; `always` lowers TopK on floats too."""
    return Lowering("top_k", ("TopK",), _lower_always if always else _lower_where_needed)


def _lower_where_needed(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    if graph.engine("TopKV2", node.input[0]) == Engine.AICORE:
        return None
    return _lower_always(node, graph, new)


def _lower_always(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    x, attrs = node.input[0], attributes(node)
    shape = graph.shape(x)
    k = as_scalar(graph.constant(node.input[1]))
    if k is None or shape is None or graph.elem(x) is None:
        return Refusal("k is computed at run time, or the shape of the input is unknown")
    axis = attrs.get("axis", -1) % len(shape)
    size = shape[axis]
    if not isinstance(size, int) or size > _MAX_LENGTH:
        return Refusal(
            f"axis {axis} is {size}; counting compares every pair, so it must be a number up to {_MAX_LENGTH}"
        )
    # [..., i, j]: the axis comes last, then once more
    perm = [i for i in range(len(shape)) if i != axis] + [axis]
    moved = perm != sorted(perm)
    row = new.op("Transpose", x, perm=perm) if moved else x
    mine, other = new.unsqueeze(row, [-1]), new.unsqueeze(row, [-2])
    beats = new.op("Greater" if attrs.get("largest", 1) else "Less", other, mine)
    before = new.const(np.tril(np.ones((size, size), dtype=bool), -1), hint="before")
    wins = new.op("Or", beats, new.op("And", new.op("Equal", other, mine), before))
    rank = new.reduce("ReduceSum", new.cast(wins, TensorProto.FLOAT), [-1], keepdims=0)  # counts: exact in float32
    places = new.const(np.arange(int(k), dtype=np.float32)[:, None], hint="places")
    pick = new.op("Equal", new.unsqueeze(rank, [-2]), places)  # [..., p, i]
    back = [perm.index(i) for i in range(len(perm))] if moved else None
    _outputs(node, graph, new, row, pick, size, back)
    return Rewrite(f"{int(k)} of {size}")


def _outputs(
    node: NodeProto, graph: GraphView, new: Builder, row: str, pick: str, size: int, back: list[int] | None
) -> None:
    values, indices = output_name(node, 0), output_name(node, 1)
    if values and graph.uses(values):
        x = node.input[0]
        chosen = new.op("Where", pick, new.unsqueeze(row, [-2]), new.const(0, x, "zero"))
        _back(new, chosen, back, values)
    if indices and graph.uses(indices):
        numbers = new.const(np.arange(size, dtype=np.int64), hint="numbers")
        chosen = new.op("Where", pick, numbers, new.const(np.int64(0), hint="none"))
        _back(new, chosen, back, indices)


def _back(new: Builder, chosen: str, back: list[int] | None, out: str) -> None:
    total = new.reduce("ReduceSum", chosen, [-1], keepdims=0, out=None if back else out)
    if back:
        new.op("Transpose", total, out=out, perm=back)
