"""Nodes whose inputs are all known -> a constant; Shape of a known shape, and Gather or Slice of its known part, too.

ATC folds much, but not Sin, Cos, Pow, Exp, Tile, Less, LogicalAnd, LogicalNot, Trilu, Cumsum, ScatterNd, Range on open
shapes (ATC_ONNX_ACCEPTANCE.md, section 4), and what it does not fold runs on the device at every launch. A value that
is a graph output stays computed: the parser loses outputs that are bare constants (hand case const_chain_to_output).
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, helper

from op_patches.evaluate import EvaluationError, run_replacement
from op_patches.graph_view import LARGE_BYTES, Array, Dim, GraphView, attributes, input_name, subgraphs
from op_patches.rewriter import Builder, Lowering, Rewrite

_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")
# Sizes are checked before the work is done: these make much out of little.
_GROWING = ("ConstantOfShape", "Expand", "Tile", "Range", "Pad", "Resize", "OneHot", "EyeLike")


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    """Match every node that computes a small tensor from constants."""
    if node.op_type in ("Constant", *_RANDOM) or node.domain not in ("", "ai.onnx"):
        return None
    if len(node.output) != 1 or graph.is_output(node.output[0]) or any(True for _ in subgraphs(node)):
        return None
    known = _from_shape(node, graph)
    if known is not None:
        value, group = known
        new.fixed(node.output[0], value)
        return Rewrite(f"{node.op_type} of a known shape", group)
    names = [n for n in node.input if n]
    if not names or any(graph.constant(n) is None for n in names) or not _small(node, graph):
        return None
    computed = _evaluate(node, graph)
    if computed is None or computed.nbytes > LARGE_BYTES or computed.size == 0:
        return None
    new.fixed(node.output[0], computed)
    return Rewrite(f"{node.op_type} of constants")


def _from_shape(node: NodeProto, graph: GraphView) -> tuple[Array, tuple[NodeProto, ...]] | None:
    """The value of Shape, or of Gather or Slice on it, when every number asked for is known."""
    if node.op_type in ("Shape", "Size"):
        dims = _dims(node, graph)
        if dims is None or not dims or not all(isinstance(d, int) and d > 0 for d in dims):
            return None
        numbers = np.asarray(dims, dtype=np.int64)
        return (np.asarray(np.prod(numbers), dtype=np.int64) if node.op_type == "Size" else numbers), ()
    shape = graph.producer(node.input[0]) if node.op_type in ("Gather", "Slice") else None
    if shape is None or shape.op_type != "Shape":
        return None
    dims = _dims(shape, graph)
    if dims is None:
        return None
    picked = _pick(node, graph, np.arange(len(dims)))
    if picked is None or not picked.size or not all(isinstance(dims[int(i)], int) for i in picked.ravel()):
        return None
    values = [dims[int(i)] for i in picked.ravel()]
    return np.asarray(values, dtype=np.int64).reshape(picked.shape), (shape,)


def _dims(node: NodeProto, graph: GraphView) -> tuple[Dim, ...] | None:
    shape = graph.shape(node.input[0])
    attrs = attributes(node)
    return None if shape is None else shape[slice(attrs.get("start", 0), attrs.get("end"))]


def _pick(node: NodeProto, graph: GraphView, places: Array) -> Array | None:
    """Which places of a vector the node takes."""
    operands = [graph.constant(n) for n in node.input[1:]]
    if any(o is None for o in operands) or attributes(node).get("axis", 0) not in (0, -1):
        return None
    known = [o for o in operands if o is not None]
    if node.op_type == "Gather":
        indices = known[0]
        return places[indices] if ((-len(places) <= indices) & (indices < len(places))).all() else None
    start, end = (int(np.ravel(k)[0]) for k in known[:2])
    step = int(np.ravel(known[3])[0]) if len(known) > 3 else 1
    return places[start:end:step] if step > 0 else None


def _small(node: NodeProto, graph: GraphView) -> bool:
    if node.op_type not in _GROWING:
        return True
    kind = graph.type_of(node.output[0])
    shape = kind.static_shape if kind else None
    if kind is None or shape is None:
        return node.op_type == "Range" and _range_length(node, graph) * 8 <= LARGE_BYTES
    return (
        int(np.prod(shape, dtype=np.int64)) * np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem)).itemsize
        <= LARGE_BYTES
    )


def _range_length(node: NodeProto, graph: GraphView) -> float:
    start, limit, delta = (graph.constant(input_name(node, i)) for i in range(3))
    if start is None or limit is None or delta is None or not np.any(delta):
        return float("inf")
    return float(max(0.0, np.ceil((float(limit) - float(start)) / float(delta))))


def _evaluate(node: NodeProto, graph: GraphView) -> Array | None:
    names = dict.fromkeys(n for n in node.input if n)
    values = {n: graph.constant(n) for n in names}
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in values.items()
        if v is not None
    ]
    outputs = [onnx.ValueInfoProto(name=node.output[0])]
    imports = [helper.make_opsetid(d, v) for d, v in graph.opsets.items()]
    model = helper.make_model(helper.make_graph([node], "fold", inputs, outputs), opset_imports=imports, ir_version=10)
    try:
        return run_replacement(model, {n: v for n, v in values.items() if v is not None})[0]
    except EvaluationError:
        return None


FOLD_CONSTANTS = Lowering("fold_constants", (), lower)
