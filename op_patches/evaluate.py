"""Run the small models of a proof: the reference in a wider precision, ONNX Runtime, and float16 node by node."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from op_patches.graph_view import Array, subgraphs

_WIDER = {
    TensorProto.FLOAT16: TensorProto.FLOAT,
    TensorProto.BFLOAT16: TensorProto.FLOAT,
    TensorProto.FLOAT: TensorProto.DOUBLE,
}
_DTYPE_ATTRIBUTES = ("to", "dtype")
# What the two evaluators raise for a model they cannot run. ORT's own classes derive from Exception; see _ort_errors.
_REFERENCE_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError)


class EvaluationError(Exception):
    """Neither evaluator ran the model on these inputs."""


def run_original(model: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Run in the next wider precision through onnx.reference, else as it is through ONNX Runtime."""
    if all(node.domain in ("", "ai.onnx") for node in model.graph.node):
        try:
            return _reference(_widened(model), {n: _wide(v) for n, v in feeds.items()})
        except EvaluationError:
            pass  # the reference lacks this operator or form; ONNX Runtime decides
    return _onnxruntime(model, feeds)


def run_replacement(model: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Run through ONNX Runtime with optimizations off, else (a dtype it has no kernel for) through onnx.reference."""
    try:
        return _onnxruntime(model, feeds)
    except EvaluationError:
        return _reference(model, feeds)


def half_run(model: ModelProto, feeds: Mapping[str, Array], keep_float32: bool) -> tuple[list[Array], int, int]:
    """Run node by node with results stored in float16; return outputs, overflow count and NaN count.

    Each operator computes in float32, as the vector unit does, and rounds when it stores. With `keep_float32` a value
    that the graph declares float32 stays so: the island.
    """
    values: dict[str, Array] = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    values |= feeds
    if not keep_float32:
        values = {n: _half(v) for n, v in values.items()}
    overflows = nans = 0
    for node in model.graph.node:
        rounds = not keep_float32 or any(_is_half(values[n]) for n in node.input if n)
        for name, computed in zip(node.output, _one_node(model, node, values), strict=True):
            values[name] = computed
            if computed.dtype.kind == "f":
                if rounds and not _casts_to(node, TensorProto.FLOAT, keep_float32):
                    values[name] = _half(computed)
                overflows += int(np.isinf(values[name]).sum())
                nans += int(np.isnan(values[name]).sum())
    outputs = [values[o.name] for o in model.graph.output]
    return [_half(v) if v.dtype.kind == "f" else v for v in outputs], overflows, nans


def _one_node(model: ModelProto, node: NodeProto, values: Mapping[str, Array]) -> list[Array]:
    """One operator in float32 on its stored inputs."""
    wide = NodeProto()
    wide.CopyFrom(node)
    for attribute in wide.attribute:
        if attribute.name in _DTYPE_ATTRIBUTES and attribute.i in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            attribute.i = TensorProto.FLOAT
        if attribute.HasField("t") and attribute.t.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            attribute.t.CopyFrom(numpy_helper.from_array(_float32(numpy_helper.to_array(attribute.t))))
    names = dict.fromkeys(n for n in node.input if n)
    inputs = [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in names]
    outputs = [onnx.ValueInfoProto(name=n) for n in node.output]
    single = helper.make_model(
        helper.make_graph([wide], "node", inputs, outputs), opset_imports=list(model.opset_import)
    )
    return _reference(single, {n: _float32(values[n]) for n in names})


def _casts_to(node: NodeProto, elem: int, keep: bool) -> bool:
    return keep and node.op_type == "Cast" and any(a.name == "to" and a.i == elem for a in node.attribute)


def _is_half(value: Array) -> bool:
    return value.dtype.name in ("float16", "bfloat16")


def _half(value: Array) -> Array:
    if value.dtype.kind != "f" and value.dtype.name != "bfloat16":
        return value
    with np.errstate(all="ignore"):
        return value.astype(np.float32).astype(np.float16)


def in_float16(value: Array) -> Array:
    """The value as float16 holds it, in its own type."""
    return _half(value).astype(value.dtype) if value.dtype.kind == "f" else value


def _float32(value: Array) -> Array:
    return value.astype(np.float32) if _is_half(value) else value


def _wide(value: Array) -> Array:
    if _is_half(value):
        return value.astype(np.float32)
    return value.astype(np.float64) if value.dtype == np.float32 else value


def _widened(model: ModelProto) -> ModelProto:
    """The model with every float16 and bfloat16 turned into float32, and every float32 into float64."""
    wide = ModelProto()
    wide.CopyFrom(model)
    for index, tensor in enumerate(wide.graph.initializer):
        if tensor.data_type in _WIDER:
            value = numpy_helper.from_array(_wide(numpy_helper.to_array(tensor)), tensor.name)
            wide.graph.initializer[index].CopyFrom(value)
    for info in wide.graph.input:
        kind = info.type.tensor_type
        kind.elem_type = _WIDER.get(kind.elem_type, kind.elem_type)
    for node in wide.graph.node:
        if any(True for _ in subgraphs(node)):
            raise EvaluationError(f"{node.op_type} holds a subgraph")
        for attribute in node.attribute:
            if attribute.name in _DTYPE_ATTRIBUTES:
                attribute.i = _WIDER.get(attribute.i, attribute.i)
            if attribute.HasField("t") and attribute.t.data_type in _WIDER:
                attribute.t.CopyFrom(numpy_helper.from_array(_wide(numpy_helper.to_array(attribute.t))))
    return wide


class Erf(OpRun):
    """The reference's Erf calls math.erf per element; equal elements need one call."""

    def _run(self, x: Array) -> tuple[Array]:
        unique, where = np.unique(x, return_inverse=True)
        values = np.array([math.erf(v) for v in unique.ravel()], dtype=x.dtype)
        return (values[where].reshape(x.shape),)


def _reference(model: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = ReferenceEvaluator(model, new_ops=[Erf]).run(None, dict(feeds))
        except _REFERENCE_ERRORS as error:
            raise EvaluationError(f"onnx.reference: {type(error).__name__}: {_first_line(error)}") from error
    values = list(results.values() if isinstance(results, dict) else results)
    if not all(isinstance(v, np.ndarray | np.generic) for v in values):
        raise EvaluationError("onnx.reference: a result is no tensor")
    return [np.asarray(v) for v in values]


def _onnxruntime(model: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    used = {n: v for n, v in feeds.items() if any(n in node.input for node in model.graph.node)}
    try:
        typed = onnx.shape_inference.infer_shapes(model)
        session = onnxruntime.InferenceSession(typed.SerializeToString(), options, providers=["CPUExecutionProvider"])
        wanted = {i.name for i in session.get_inputs()}
        return [np.asarray(r) for r in session.run(None, {n: v for n, v in used.items() if n in wanted})]
    except _ort_errors() as error:
        raise EvaluationError(f"onnxruntime: {_first_line(error)}") from error


def _ort_errors() -> tuple[type[Exception], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = ("Fail", "InvalidArgument", "InvalidGraph", "NotImplemented", "RuntimeException")
    return (*(getattr(state, n) for n in names), RuntimeError, ValueError)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:160]
