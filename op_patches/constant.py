"""Constant forms that CANN's parser does not read -> the one it does, attribute `value`.

    value_float(s), value_int(s), value_string(s), sparse_value    an EMPTY constant in CANN, without an error
    sparse_initializer                                             ignored by CANN -> an ordinary initializer

Source: ATC_ONNX_ACCEPTANCE.md, section 4, and the hand cases const_value_* of CANN's own parser.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from op_patches.graph_view import Array, GraphView, all_graphs, attributes
from op_patches.report import LoweredNode, RuleReport
from op_patches.rewriter import Builder, Lowering, Rewrite, Run

_DTYPES = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | None:
    """Match every Constant without `value`."""
    if node.domain not in ("", "ai.onnx") or not node.attribute:
        return None
    form, value = next(iter(attributes(node).items()))
    if form == "value":
        return None
    if form == "sparse_value":
        tensor = numpy_helper.from_array(dense(value))
    elif form in _DTYPES:
        tensor = numpy_helper.from_array(np.asarray(value, dtype=_DTYPES[form]))
    elif form not in ("value_string", "value_strings"):
        return None  # no form that ONNX knows
    else:
        strings = [value] if form == "value_string" else list(value)
        dims = () if form == "value_string" else (len(strings),)
        tensor = onnx.helper.make_tensor("", TensorProto.STRING, dims, strings)
    new.op("Constant", out=node.output[0], value=tensor)
    # ONNX Runtime makes a sparse constant dense only when something reads it.
    reader = onnx.helper.make_node("Neg", [node.output[0]], ["observer/negative"])
    return Rewrite(form, observer=(reader,) if form == "sparse_value" else ())


def dense(sparse: onnx.SparseTensorProto) -> Array:
    """A sparse tensor with its zeros; indices are linear [N] or coordinates [N, rank]."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    full = np.zeros(tuple(sparse.dims), dtype=values.dtype)
    if indices.ndim == 1:
        full.reshape(-1)[indices] = values
    else:
        full[tuple(indices.T)] = values
    return full


class _SparseInitializers:
    """Model rule: sparse initializers are listed beside the others and carry the name on their values."""

    name = "sparse_initializer"

    def run(self, run: Run) -> RuleReport:
        lowered: list[LoweredNode] = []
        for graph in all_graphs(run.model.graph):
            for sparse in graph.sparse_initializer:
                graph.initializer.append(numpy_helper.from_array(dense(sparse), sparse.values.name))
                lowered.append(LoweredNode(sparse.values.name, "sparse_initializer", "", None))
            del graph.sparse_initializer[:]
        if lowered:
            run.model_changed()
        return RuleReport(self.name, tuple(lowered), ())


CONSTANT = Lowering("constant", ("Constant",), lower)
SPARSE_INITIALIZER = _SparseInitializers()
