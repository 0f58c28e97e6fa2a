"""Device memory of a compiled graph, estimated from the ONNX graph at its bound shapes.

An estimate, not a measurement: only `acl.mdl.query_size` on a device knows. ASSUMPTIONS says what it rests on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from runtime.spec import GraphSpec, TensorSpec

ASSUMPTIONS = (
    "weights: every constant of the graph, once per .om (each .om carries its own copy); "
    "float32 constants count half in an fp16 build, whole under mixed precision",
    "cache: the past_* inputs, which stay on the device between launches (step and step_frame share one)",
    "workspace: the largest sum of intermediate tensors alive at one time when nodes run in file order, each rounded "
    "up to 512 bytes; views share memory; no fusion and no padded formats, so ATC's figure can lie on either side",
)
_ALIGNMENT = 512
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the device while one graph runs; see ASSUMPTIONS."""

    weight_bytes: int
    cache_bytes: int
    io_bytes: int  # the other inputs and the outputs
    workspace_bytes: int
    num_unknown: int  # tensors whose shape inference did not find: not counted in the workspace

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.io_bytes + self.workspace_bytes


def estimate_memory(model: onnx.ModelProto, spec: GraphSpec, precision: str) -> MemoryEstimate:
    """Estimate the device memory of `model` with the bound interface `spec`; external data need not be loaded."""
    half = precision == "fp16"
    cache = sum(t.num_bytes for t in spec.inputs if is_cache(t))
    io = sum(t.num_bytes for t in (*spec.inputs, *spec.outputs)) - cache
    workspace, unknown = _peak(bind_shapes(model, {t.name: t.bound_shape for t in spec.inputs}), half)
    return MemoryEstimate(weight_bytes(model, half), cache, io, workspace, unknown)


def is_cache(tensor: TensorSpec) -> bool:
    """True for the inputs that runtime.graphs names past_*: state that outlives a launch."""
    return tensor.name.startswith("past_")


def weight_bytes(model: onnx.ModelProto, half: bool) -> int:
    """Bytes of all constants, external ones included."""
    constants = [*model.graph.initializer]
    constants += [a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"]
    return sum(_num_bytes(t.data_type, tuple(t.dims), half) for t in constants)


def bind_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Infer every shape of `model` with its inputs bound to `shapes`; the model itself is left alone."""
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    for value in bound.graph.input:
        if value.name in shapes:
            elem_type = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, elem_type, shapes[value.name]))
    del bound.graph.value_info[:]
    for value in bound.graph.output:  # a symbolic axis would win over the inferred number
        value.type.tensor_type.ClearField("shape")
    try:
        return onnx.shape_inference.infer_shapes(bound, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return bound  # a broken graph: every tensor counts as unknown, and the readiness check says what is wrong


def _peak(model: onnx.ModelProto, half: bool) -> tuple[int, int]:
    """Largest number of bytes alive at once, and the number of tensors left out because their shape is unknown."""
    graph = model.graph
    outside = {value.name for value in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    sizes: dict[str, int] = {}
    for value in graph.value_info:
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
            dims = tuple(d.dim_value for d in tensor.shape.dim)
            sizes[value.name] = -(-_num_bytes(tensor.elem_type, dims, half) // _ALIGNMENT) * _ALIGNMENT
    owner: dict[str, str] = {}  # view -> the tensor whose memory it shows
    last_use: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in node.input:
            last_use[owner.get(name, name)] = index
        if node.op_type in _VIEWS:
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
    alive = peak = unknown = 0
    dying: dict[int, int] = {}
    for index, node in enumerate(graph.node):
        for name in node.output if node.op_type not in _VIEWS and node.op_type != "Constant" else ():
            if not name or name in outside:
                continue
            unknown += name not in sizes
            alive += sizes.get(name, 0)
            end = last_use.get(name, index)
            dying[end] = dying.get(end, 0) + sizes.get(name, 0)
        peak = max(peak, alive)
        alive -= dying.pop(index, 0)
    return peak, unknown


def _num_bytes(elem_type: int, dims: tuple[int, ...], half: bool) -> int:
    size = onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize
    if half and elem_type == onnx.TensorProto.FLOAT:
        size = 2
    return int(np.prod(dims, dtype=np.int64)) * size
