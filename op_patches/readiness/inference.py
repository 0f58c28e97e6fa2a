"""ONNX shape inference for graphs that may be wrong in any way.

The inference functions of the onnx package trust what its checker has passed: a node with an input too few, or an
attribute of the wrong kind, can end the process. Such nodes, and all operators that the parser refuses by domain, are
hidden from it first; what they produce stays untyped.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import ModelProto, NodeProto, defs

from op_patches.graph_view import all_graphs

_HIDDEN = "moss.hidden"
# Their inference functions read the type of an input without asking whether there is one (onnx 1.23: segmentation
# fault); every other operator of every opset was tried with untyped inputs.
_UNSAFE = ("EyeLike", "RegexFullMatch")


def infer_types(model: ModelProto) -> tuple[ModelProto, str | None]:
    """Return the model with inferred types (the same nodes in the same order), and why inference gave up if it did."""
    if not model.opset_import:
        return model, None
    visible = _hide_suspicious(model)
    try:
        return onnx.shape_inference.infer_shapes(visible, data_prop=True), None
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        text = str(error).strip()
        return model, text.splitlines()[0] if text else type(error).__name__


def standard_opset(model: ModelProto) -> int:
    """The opset of the standard operators, 0 when the model names none."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _hide_suspicious(model: ModelProto) -> ModelProto:
    opset = standard_opset(model)
    functions = {(function.domain, function.name) for function in model.functions}
    hidden = [
        [index for index, node in enumerate(graph.node) if _is_suspicious(node, opset, functions)]
        for graph in all_graphs(model.graph)
    ]
    if not any(hidden):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.opset_import.add(domain=_HIDDEN, version=1)
    for graph, indices in zip(list(all_graphs(copy.graph)), hidden, strict=True):
        for index in indices:
            graph.node[index].domain = _HIDDEN
    return copy


def _is_suspicious(node: NodeProto, opset: int, functions: set[tuple[str, str]]) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return (node.domain, node.op_type) not in functions
    if node.op_type in _UNSAFE or not 1 <= opset <= defs.onnx_opset_version():
        return True
    try:
        schema: Any = defs.get_schema(node.op_type, opset, "")  # Any: the stubs of FormalParameterOption are no enum
    except defs.SchemaError:
        return True
    given = {attribute.name for attribute in node.attribute}
    return (
        not schema.min_input <= len(node.input) <= schema.max_input
        or not schema.min_output <= len(node.output) <= schema.max_output
        or any(
            not name and formal.option == defs.OpSchema.FormalParameterOption.Single
            for formal, name in zip(schema.inputs, node.input, strict=False)
        )
        or any(wanted.required and name not in given for name, wanted in schema.attributes.items())
        or any(
            a.name not in schema.attributes or int(schema.attributes[a.name].type.value) != a.type
            for a in node.attribute
        )
    )
