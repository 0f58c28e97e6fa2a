"""Make a model safe to look at: after this, every name is text, every attribute has the kind its operator defines, and
every small tensor has as much data as its shape says. What had to be put aside is said in a remark.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from op_patches.graph_view import all_graphs
from op_patches.readiness.inference import standard_opset
from runtime.errors import ReadinessError


def sanitize(model: ModelProto) -> list[str]:
    """Change `model` in place; return remarks about what was ignored. Names that are no text cannot be checked."""
    remarks: list[str] = []
    opset = standard_opset(model)
    for graph in all_graphs(model.graph):
        for name in _names(graph):
            if not isinstance(name, str):
                raise ReadinessError(f"the graph holds a name that is not UTF-8 text: {name!r}")
        for node in graph.node:
            ignored = [a.name for a in node.attribute if not _has_known_kind(node, a, opset)]
            if ignored:
                kept = [a for a in node.attribute if a.name not in ignored]
                del node.attribute[:]
                node.attribute.extend(kept)
                remarks.append(f"node {node.name or node.op_type}: ignored {', '.join(ignored)}, of the wrong kind")
        for tensor in _tensors(graph):
            problem = _data_problem(tensor)
            if problem:
                remarks.append(f"tensor {tensor.name or 'of a node'}: its data were not read ({problem})")
                _drop_data(tensor)
    return remarks


def _names(graph: GraphProto) -> Iterator[Any]:
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output, *(a.name for a in node.attribute))
    yield from (info.name for info in (*graph.input, *graph.output, *graph.value_info))
    for tensor in graph.initializer:
        yield from (tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value)))


def _has_known_kind(node: NodeProto, attribute: AttributeProto, opset: int) -> bool:
    if attribute.type not in AttributeProto.AttributeType.values() or attribute.type == AttributeProto.UNDEFINED:
        return False
    if node.domain not in ("", "ai.onnx"):
        return True
    kind = _kinds(opset).get((node.op_type, attribute.name))
    return kind is None or attribute.type == kind


@functools.cache
def _kinds(opset: int) -> dict[tuple[str, str], int]:
    """(standard operator, attribute) -> its kind at an opset; where that has none, in a younger one."""
    kinds: dict[tuple[str, str], int] = {}
    schemas: Sequence[Any] = onnx.defs.get_all_schemas_with_history()  # Any: the kinds are no int in the stubs
    standard = (schema for schema in schemas if schema.domain == "")
    # The last one written counts: younger opsets come first, then those up to the one asked for, in their order.
    order = sorted(standard, key=lambda s: (s.since_version <= opset, s.since_version))
    for schema in order:
        for name, attribute in schema.attributes.items():
            kinds[schema.name, name] = int(attribute.type.value)
    return kinds


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        yield from (a.t for a in node.attribute if a.type == AttributeProto.TENSOR)


def _data_problem(tensor: TensorProto) -> str | None:
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    if tensor.data_type not in TensorProto.DataType.values():
        return f"element type {tensor.data_type} does not exist"
    if any(dim < 0 for dim in tensor.dims):
        return f"negative dimension in {list(tensor.dims)}"
    try:
        numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return None


def _drop_data(tensor: TensorProto) -> None:
    for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data"):
        tensor.ClearField(name)
    tensor.data_location = TensorProto.EXTERNAL  # as a header without data, which no rule reads
