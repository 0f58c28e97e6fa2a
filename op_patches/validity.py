"""Refuse to patch what is not ONNX, in one line: the rules below trust inputs, attributes and data to fit the schema.

`convert-moss check` goes on where this stops, since ATC looks at less than ONNX does. A graph whose nodes are out of
order, or which ATC would refuse, is valid here: putting that right is what lowerings are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from google.protobuf.message import Message
from onnx import ModelProto, NodeProto, TensorProto, defs, numpy_helper

from op_patches.graph_view import STANDARD_OPSET, all_graphs, model_opsets
from runtime.errors import PatchError

# Inputs without which a foreign operator says nothing; ONNX has no schemas for them.
_FOREIGN_INPUTS = {
    **dict.fromkeys(("BiasGelu", "FusedMatMul", "TransposeMatMul", "FusedGemm", "FusedConv"), 2),
    **dict.fromkeys(("SimplifiedLayerNormalization",), 2),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), 3),
    "RotaryEmbedding": 4,
}


def require_valid(model: ModelProto) -> None:
    """Raise PatchError with the first fault of a model, and how many more there are."""
    broken = next(_broken_texts(model), None)
    if broken is not None:
        raise PatchError(f"the file is damaged: {broken!r} is not UTF-8 text; export it again")
    standard = {n.op_type for g in all_graphs(model.graph) for n in g.node if n.domain in ("", "ai.onnx")}
    if standard and "" not in model_opsets(model):
        raise PatchError(
            f"the model imports no opset for the standard domain and uses {', '.join(sorted(standard))}; "
            'opset_import needs an entry such as {domain: "", version: 17}: export it again'
        )
    opset = model_opsets(model).get("", STANDARD_OPSET)
    if not 1 <= opset <= defs.onnx_opset_version():
        raise PatchError(
            f"opset {opset} of the standard domain: onnx {onnx.__version__} knows 1 to {defs.onnx_opset_version()}"
        )
    functions = {(f.domain, f.name) for f in model.functions}
    nodes = [n for g in all_graphs(model.graph) for n in g.node] + [n for f in model.functions for n in f.node]
    faults = [*(fault for n in nodes for fault in _node_faults(n, opset, functions)), *_type_faults(model)]
    if faults:
        more = f" (and {len(faults) - 1} more like it)" if len(faults) > 1 else ""
        raise PatchError(f"the graph is not valid ONNX: {faults[0]}{more}; `convert-moss check` reads it all the same")


def _broken_texts(message: Message) -> Iterator[Any]:
    """Text fields that hold no text; protobuf hands their bytes out."""
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        for item in value if field.is_repeated else [value]:
            if field.type == field.TYPE_MESSAGE:
                yield from _broken_texts(item)
            elif isinstance(item, bytes):
                yield item


def _node_faults(node: NodeProto, opset: int, functions: set[tuple[str, str]]) -> Iterator[str]:
    label = f"node {node.name or (node.output[0] if node.output else '?')} ({node.op_type})"
    for attribute in node.attribute:
        for tensor in [attribute.t] if attribute.HasField("t") else []:
            yield from (f"{label}, attribute {attribute.name}: {fault}" for fault in _tensor_faults(tensor))
    if (node.domain, node.op_type) in functions:
        return
    if not any(node.output):
        yield f"{label} has no output"
    if node.domain not in ("", "ai.onnx"):
        needed = _FOREIGN_INPUTS.get(node.op_type, 1)
        if node.domain == "com.microsoft" and len([name for name in node.input[:needed] if name]) < needed:
            yield f"{label} has {len(node.input)} inputs, expected {needed} or more"
        return
    try:
        schema: Any = defs.get_schema(node.op_type, opset, "")  # Any: the stubs of AttrType are no int
    except defs.SchemaError:
        return  # unknown here: a rule may know it, and the report says what is left
    yield from (f"{label} {fault}" for fault in _schema_faults(node, schema))


def _schema_faults(node: NodeProto, schema: Any) -> Iterator[str]:
    for kind, names, least, most in (
        ("inputs", node.input, schema.min_input, schema.max_input),
        ("outputs", node.output, schema.min_output, schema.max_output),
    ):
        if not least <= len(names) <= most:
            yield f"has {len(names)} {kind}, expected {least} to {most}"
    single = defs.OpSchema.FormalParameterOption.Single
    for formal, name in zip(schema.inputs, node.input, strict=False):
        if not name and formal.option == single:
            yield f"has no input {formal.name}"
    given = {attribute.name: attribute for attribute in node.attribute}
    for name, wanted in schema.attributes.items():
        if name not in given:
            if wanted.required:
                yield f"has no attribute {name}"
        elif given[name].type != int(wanted.type.value):
            yield f"has attribute {name} of the wrong kind, expected {wanted.type.name}"


def _type_faults(model: ModelProto) -> Iterator[str]:
    for graph in all_graphs(model.graph):
        for tensor in graph.initializer:
            yield from (f"constant {tensor.name}: {fault}" for fault in _tensor_faults(tensor))
        for info in (*graph.input, *graph.output, *graph.value_info):
            elem = info.type.tensor_type.elem_type
            if elem not in TensorProto.DataType.values():
                yield f"{info.name} has element type {elem}, which does not exist"


def _tensor_faults(tensor: TensorProto) -> Iterator[str]:
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        yield f"element type {tensor.data_type} does not exist"
    elif any(dim < 0 for dim in tensor.dims):
        yield f"negative size in {list(tensor.dims)}"
    elif tensor.data_location != TensorProto.EXTERNAL:
        try:
            numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            yield f"its data do not fit {list(tensor.dims)} ({str(error).splitlines()[0]})"
