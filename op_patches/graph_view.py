"""What a lowering may ask about a graph: types, constants, producers, uses, and the target.

A view is built for one pass and never changes. Names resolve outwards, as ONNX scopes do: a branch of If sees the
values of the graphs around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from op_patches.targets import Engine, Target
from runtime.errors import PatchError

Array = npt.NDArray[Any]
Dim = int | str | None
LARGE_BYTES = 1 << 20  # above this a tensor is weight, not structure: nothing reads its values
STANDARD_OPSET = 17  # what lowerings write into a model that has no standard operator yet
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape of one value; `shape` is None when not even the rank is known."""

    elem: int
    shape: tuple[Dim, ...] | None

    @property
    def dtype(self) -> str:
        """The NumPy name of the element type: "float32", "int64", "bool", "bfloat16" …"""
        return onnx.helper.tensor_dtype_to_np_dtype(self.elem).name

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The shape when every axis is a number."""
        if self.shape is None:
            return None
        numbers = tuple(d for d in self.shape if isinstance(d, int))
        return numbers if len(numbers) == len(self.shape) else None


@dataclass(slots=True)
class GraphView:
    """One graph (the model's own or a branch of If) with everything that is known about its values."""

    proto: GraphProto
    parent: GraphView | None
    target: Target
    opsets: Mapping[str, int]
    types: dict[str, TensorType]
    nodes: list[NodeProto] = field(init=False)
    _producers: dict[str, NodeProto] = field(init=False)
    _initializers: dict[str, TensorProto] = field(init=False)
    _inputs: set[str] = field(init=False)
    _uses: Counter[str] = field(init=False)
    _cache: dict[str, Array | None] = field(init=False)
    _consumers: dict[str, list[NodeProto]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.nodes = list(self.proto.node)
        self._producers = {name: node for node in self.nodes for name in node.output if name}
        self._initializers = {t.name: t for t in self.proto.initializer}
        self._inputs = {i.name for i in self.proto.input}
        self._uses = Counter(used_names(self.proto))
        self._cache = {}

    @property
    def opset(self) -> int:
        return self.opsets.get("", 1)

    def type_of(self, name: str) -> TensorType | None:
        """Type of a value here or in a graph around this one; None when inference does not know it."""
        if name in self.types:
            return self.types[name]
        return self.parent.type_of(name) if self.parent and name not in self._producers else None

    def elem(self, name: str) -> int | None:
        found = self.type_of(name)
        return found.elem if found else None

    def shape(self, name: str) -> tuple[Dim, ...] | None:
        found = self.type_of(name)
        return found.shape if found else None

    def static_shape(self, name: str) -> tuple[int, ...] | None:
        found = self.type_of(name)
        return found.static_shape if found else None

    def rank(self, name: str) -> int | None:
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def producer(self, name: str) -> NodeProto | None:
        """The node of THIS graph that makes the value."""
        return self._producers.get(name)

    def uses(self, name: str) -> int:
        """How often the value is read: by nodes, by nested graphs, and as a graph output."""
        return self._uses[name]

    def consumers(self, name: str) -> list[NodeProto]:
        if self._consumers is None:
            self._consumers = {}
            for node in self.nodes:
                for read in dict.fromkeys(node.input):
                    self._consumers.setdefault(read, []).append(node)
        return self._consumers.get(name, [])

    def is_output(self, name: str) -> bool:
        return any(o.name == name for o in self.proto.output)

    def constant(self, name: str) -> Array | None:
        """The value of a small constant; None for anything that is computed, fed, large or stored outside."""
        if not name:
            return None
        if name not in self._cache:
            self._cache[name] = self._read_constant(name)
        return self._cache[name]

    def _read_constant(self, name: str) -> Array | None:
        if name in self._inputs:  # an initializer that is also an input is only a default
            return None
        tensor = self._initializers.get(name)
        node = self._producers.get(name)
        if tensor is None and node is not None:
            if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
                return None
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        if tensor is None:
            return self.parent.constant(name) if self.parent and node is None else None
        if is_external(tensor) or tensor.ByteSize() > LARGE_BYTES:
            return None
        return numpy_helper.to_array(tensor)

    def add_constants(self, tensors: Mapping[str, TensorProto]) -> None:
        """Add initializers to the graph; one that takes over a node's output is known as constant from here on."""
        self.proto.initializer.extend(tensors.values())
        self._initializers |= tensors
        for name in tensors:
            self._producers.pop(name, None)
            self._cache.pop(name, None)

    def is_constant(self, name: str) -> bool:
        """Whether the value is fixed in the file, whatever its size."""
        if name in self._inputs:
            return False
        node = self._producers.get(name)
        if name in self._initializers or (node is not None and node.op_type == "Constant"):
            return True
        return bool(self.parent and node is None and self.parent.is_constant(name))

    def engine(self, ge_op: str, name: str) -> Engine:
        """The engine that runs a GE operator on data of the type of `name`."""
        found = self.type_of(name)
        return Engine.UNKNOWN if found is None else self.target.engine(ge_op, found.dtype)


def stores_float16(target: Target) -> bool:
    """Whether ATC may store float32 vectors in float16; cube_fp16in_fp32out touches matrix inputs only."""
    return target.precision in ("fp16", "mixed_float16")


def attributes(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node as Python values."""
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def input_name(node: NodeProto, index: int) -> str:
    """The name of an input, "" when it is left out."""
    return node.input[index] if index < len(node.input) else ""


def output_name(node: NodeProto, index: int) -> str:
    return node.output[index] if index < len(node.output) else ""


def is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes, to be changed in place."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every graph nested in it, outermost first."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


def used_names(graph: GraphProto) -> Iterator[str]:
    """Every read of a value in the graph: node inputs, graph outputs, and reads from nested graphs."""
    for node in graph.node:
        yield from (name for name in node.input if name)
        for inner in subgraphs(node):
            yield from used_names(inner)
    yield from (o.name for o in graph.output)


def model_opsets(model: ModelProto) -> dict[str, int]:
    """Domain -> version, "ai.onnx" written as ""."""
    return {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}


def views(model: ModelProto, target: Target) -> list[GraphView]:
    """A view of every graph of the model, outermost first, with freshly inferred types."""
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton(model), data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise PatchError(f"ONNX cannot infer the types of the graph: {' '.join(str(error).split())}") from error
    found: list[GraphView] = []
    opsets = {"": STANDARD_OPSET} | model_opsets(model)

    def visit(graph: GraphProto, typed: GraphProto, parent: GraphView | None) -> None:
        view = GraphView(graph, parent, target, opsets, _types(typed))
        found.append(view)
        for node, typed_node in zip(view.nodes, typed.node, strict=True):
            for inner, typed_inner in zip(subgraphs(node), subgraphs(typed_node), strict=True):
                visit(inner, typed_inner, view)

    visit(model.graph, inferred.graph, None)
    return found


def skeleton(model: ModelProto) -> ModelProto:
    """The model without the data of its large tensors: the same nodes and types, small enough to pass around."""
    light = ModelProto()
    for name, value in model.ListFields():
        if name.name == "graph":
            continue
        if name.is_repeated:
            getattr(light, name.name).extend(value)
        else:
            setattr(light, name.name, value)
    for name, value in model.graph.ListFields():
        if name.name == "initializer":
            light.graph.initializer.extend(_light_tensor(t) for t in value)
        elif name.is_repeated:
            getattr(light.graph, name.name).extend(value)
        else:
            setattr(light.graph, name.name, value)
    return light


def _light_tensor(tensor: TensorProto) -> TensorProto:
    if is_external(tensor) or len(tensor.raw_data) + 4 * len(tensor.float_data) <= LARGE_BYTES:
        return tensor
    light = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
    light.data_location = TensorProto.EXTERNAL
    light.external_data.add(key="location", value="not-loaded")
    return light


def _types(graph: GraphProto) -> dict[str, TensorType]:
    types = {t.name: TensorType(t.data_type, tuple(t.dims)) for t in graph.initializer}
    for info in (*graph.value_info, *graph.output, *graph.input):
        if info.type.HasField("tensor_type") and info.type.tensor_type.elem_type:
            types[info.name] = _tensor_type(info.type.tensor_type)
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] not in types:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    types[node.output[0]] = TensorType(attribute.t.data_type, tuple(attribute.t.dims))
    return types


def _tensor_type(proto: onnx.TypeProto.Tensor) -> TensorType:
    if not proto.HasField("shape"):
        return TensorType(proto.elem_type, None)
    dims: list[Dim] = []
    for dim in proto.shape.dim:
        kind = dim.WhichOneof("value")
        dims.append(dim.dim_value if kind == "dim_value" else (dim.dim_param or None))
    return TensorType(proto.elem_type, tuple(dims))


def bind_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Bind the axes of graph inputs, in place; a named axis takes its number everywhere in the interface.

    -1 leaves an axis open, as in ATC's --input_shape.
    """
    inputs = {i.name: i for i in model.graph.input}
    axes: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise PatchError(f"input shape for {name}: the graph has no such input; it has {', '.join(inputs)}")
        dims = inputs[name].type.tensor_type.shape.dim
        if len(dims) != len(shape):
            raise PatchError(f"input shape for {name}: expected {len(dims)} numbers, got {list(shape)}")
        for dim, size in zip(dims, shape, strict=True):
            if size == -1:
                continue
            known = dim.dim_value if dim.HasField("dim_value") else axes.get(dim.dim_param)
            if size < 1 or (known is not None and known != size):
                raise PatchError(f"input shape for {name}: {list(shape)} contradicts axis {dim.dim_param or known}")
            if dim.dim_param:
                axes[dim.dim_param] = size
            dim.dim_value = size
    for info in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in axes:
                dim.dim_value = axes[dim.dim_param]


def as_scalar(value: Array | None) -> float | None:
    """The single number in a constant, None when it holds several or none."""
    return None if value is None or value.size != 1 or value.dtype.kind not in "fiub" else float(np.ravel(value)[0])
