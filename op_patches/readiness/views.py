"""The graph and the branches of its If nodes with element types and shapes, as far as they can be known.

The checker looks at graphs that may be wrong in any way, so nothing here insists on a valid model: where ONNX shape
inference gives up, the declared types remain, and an own forward pass fills in element types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from op_patches.graph_view import GraphView, TensorType, model_opsets, subgraphs
from op_patches.readiness.inference import infer_types
from op_patches.targets import Target

# ONNX element type -> NumPy name, as in the kernel tables.
DTYPE_NAMES: dict[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8_e4m3fn", 19: "float8_e5m2",
}  # fmt: skip


@dataclass(slots=True)
class TypedGraph:
    """The views of a model, outermost first, and what could not be inferred."""

    views: list[GraphView]
    remarks: list[str]
    branch_of: dict[int, NodeProto]  # id(view of a branch) -> the If node that holds it

    @property
    def root(self) -> GraphView:
        return self.views[0]


def dtype_of(view: GraphView, name: str) -> str | None:
    """The NumPy name of a value's element type, None when it is unknown."""
    found = view.type_of(name) if name else None
    return DTYPE_NAMES.get(found.elem) if found else None


def typed_graph(model: ModelProto, target: Target) -> TypedGraph:
    """Infer types and build the views. `model` must be light (no large tensors) and may be changed."""
    inferred, failure = infer_types(model)
    remarks = (
        [f"shape inference failed ({failure}): rules on types and shapes use the declared ones only"] if failure else []
    )
    opsets = model_opsets(model)
    views: list[GraphView] = []
    branch_of: dict[int, NodeProto] = {}

    def visit(graph: GraphProto, typed: GraphProto, parent: GraphView | None, holder: NodeProto | None) -> None:
        view = GraphView(graph, parent, target, opsets, _types(typed))
        _fill_types(view)
        views.append(view)
        if holder is not None:
            branch_of[id(view)] = holder
        for node, typed_node in zip(graph.node, typed.node, strict=True):
            if node.op_type == "If":  # the only operator whose subgraphs the parser reads
                for inner, typed_inner in zip(subgraphs(node), subgraphs(typed_node), strict=True):
                    visit(inner, typed_inner, view, node)

    visit(model.graph, inferred.graph, None, None)
    return TypedGraph(views, remarks, branch_of)


def bind_axes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write input shapes into the graph inputs, in place; -1 stays open. Ranks were checked by the caller."""
    axes: dict[str, int] = {}
    for info in model.graph.input:
        dims = info.type.tensor_type.shape.dim
        for dim, size in zip(dims, shapes.get(info.name, ()), strict=False):
            if size > 0:
                if dim.dim_param:
                    axes.setdefault(dim.dim_param, size)
                dim.dim_value = size
    for info in (*model.graph.output, *model.graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in axes:
                dim.dim_value = axes[dim.dim_param]


def is_standard(node: NodeProto) -> bool:
    """Whether a node's operator is ONNX's own; names in other domains mean something else."""
    return node.domain in ("", "ai.onnx")


def topological(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Sort nodes so that producers come first; the parser accepts any order. Nodes on a cycle keep their place."""
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    order: list[NodeProto] = []
    done: set[int] = set()
    for start in range(len(nodes)):
        stack = [start]
        entered: set[int] = set()
        while stack:
            index = stack[-1]
            waiting = [producer[name] for name in reads(nodes[index]) if name in producer]
            waiting = [i for i in waiting if i not in done and i not in entered]
            entered.add(index)
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                order.append(nodes[index])
    return order


def reads(node: NodeProto) -> Iterable[str]:
    """The names a node reads, captures of its subgraphs included."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        inside = {name for inner in graph.node for name in inner.output} | {t.name for t in graph.initializer}
        inside |= {i.name for i in graph.input}
        for inner in graph.node:
            yield from (name for name in reads(inner) if name not in inside)
        yield from (o.name for o in graph.output if o.name not in inside)


def _types(graph: GraphProto) -> dict[str, TensorType]:
    types: dict[str, TensorType] = {}
    for info in (*graph.value_info, *graph.output, *graph.input):
        if info.type.HasField("tensor_type") and info.type.tensor_type.elem_type:
            types[info.name] = _tensor_type(info.type.tensor_type)
    types |= {t.name: TensorType(t.data_type, tuple(t.dims)) for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.output[0] not in types:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    types[node.output[0]] = TensorType(attribute.t.data_type, tuple(attribute.t.dims))
    return types


def _tensor_type(proto: onnx.TypeProto.Tensor) -> TensorType:
    if not proto.HasField("shape"):
        return TensorType(proto.elem_type, None)
    return TensorType(
        proto.elem_type,
        tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in proto.shape.dim),
    )


def _fill_types(view: GraphView) -> None:
    """Give every value that inference left untyped the element type its operator implies."""
    for node in topological(view.nodes):
        missing = [index for index, name in enumerate(node.output) if name and name not in view.types]
        if not missing:
            continue
        elements = _implied_elements(node, view)
        for index in missing:
            if index < len(elements) and elements[index] is not None:
                view.types[node.output[index]] = TensorType(elements[index] or 0, None)


def _implied_elements(node: NodeProto, view: GraphView) -> list[int | None]:
    """Element types of the outputs, by the operator's type constraints; a contrib operator keeps its first input's."""
    first = view.elem(node.input[0]) if node.input and node.input[0] else None
    if node.op_type in ("Cast", "EyeLike"):
        return [attribute.i for attribute in node.attribute if attribute.name in ("to", "dtype")] or [first]
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, min(view.opset, onnx.defs.onnx_opset_version()), domain)
    except onnx.defs.SchemaError:
        return [first] * len(node.output)
    bound: dict[str, int | None] = {}
    for formal, name in zip(schema.inputs, node.input, strict=False):
        if name and bound.get(formal.type_str) is None:
            bound[formal.type_str] = view.elem(name)
    fixed = {"tensor(int64)": TensorProto.INT64, "tensor(bool)": TensorProto.BOOL, "tensor(float)": TensorProto.FLOAT}
    formals = [
        schema.outputs[min(i, len(schema.outputs) - 1)] for i in range(len(node.output) if schema.outputs else 0)
    ]
    return [bound.get(formal.type_str, fixed.get(formal.type_str)) for formal in formals]
