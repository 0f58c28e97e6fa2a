"""An operator that the target does not parse, but that ONNX defines by a function -> that function's body.

    Attention-23/24, Swish-24, GroupNormalization-21, Mish-18, MeanVarianceNormalization, HannWindow, CenterCropPad …

The source of each formula is the operator's own definition in the `onnx` package. A body may hold operators
that need a lowering themselves, so this rule repeats and stands before most others.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import FunctionProto, NodeProto, TypeProto, helper

from op_patches.graph_view import GraphView, subgraphs
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

OPSET = 17  # what every graph is lowered to
# Rules of their own write these better than the definition does.
_OWN_RULES = ("LayerNormalization", "RMSNormalization", "RotaryEmbedding", "Gelu", "CastLike", "Clip")


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match standard operators without a plugin at opset 17."""
    if node.domain not in ("", "ai.onnx") or node.op_type in ("Constant", *_OWN_RULES):
        return None
    if graph.target.plugin(node.op_type, OPSET) is not None:
        return None
    body = _body(node, graph)
    if body is None:
        return Refusal(f"ATC parses no {node.op_type} at opset {OPSET}, and ONNX defines no body for it")
    if any(True for inner in body.node for _ in subgraphs(inner)):
        return Refusal(f"the body of {node.op_type} holds control flow")
    names = dict(zip(body.input, node.input, strict=False))
    results = dict(zip(body.output, node.output, strict=False))
    for inner in body.node:
        inputs = [names.get(name, "") for name in inner.input]
        outs = [results.get(name) or None for name in inner.output]
        names |= zip(inner.output, new.ops(inner.op_type, inputs, outs), strict=True)
        new.nodes[-1].attribute.extend(_attributes(inner, node, graph.opset))
    return Rewrite(f"{len(body.node)} nodes")


def _body(node: NodeProto, graph: GraphView) -> FunctionProto | None:
    """The function that defines the operator at the graph's opset, for these input types."""
    if not onnx.defs.has(node.op_type, graph.opset, ""):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, graph.opset, "")  # onnx ships no types for functions
    if schema.has_context_dependent_function:
        types = [_type(graph, name) for name in node.input]
        return _function(schema.get_context_dependent_function(node.SerializeToString(), types))
    versions = [v for v in schema.function_opset_versions if v <= graph.opset]
    if not versions:
        return None
    return _function(schema.get_function_with_opset_version(max(versions)))


def _function(data: bytes) -> FunctionProto:
    proto = FunctionProto()
    proto.ParseFromString(data)
    return proto


def _type(graph: GraphView, name: str) -> bytes:
    kind = graph.type_of(name) if name else None
    proto = TypeProto() if kind is None else helper.make_tensor_type_proto(kind.elem, kind.shape)
    return bytes(proto.SerializeToString())


def _attributes(inner: NodeProto, node: NodeProto, opset: int) -> list[onnx.AttributeProto]:
    """The attributes of a body's node; a reference takes the value of the operator's attribute or its default."""
    given = {a.name: a for a in node.attribute}
    defaults = onnx.defs.get_schema(node.op_type, opset, "").attributes
    found: list[onnx.AttributeProto] = []
    for attribute in inner.attribute:
        value = attribute
        if attribute.ref_attr_name:
            key = attribute.ref_attr_name
            value = given.get(key) or defaults[key].default_value
        if value.type:  # an optional attribute without a default stays away
            copy = onnx.AttributeProto()
            copy.CopyFrom(value)
            copy.name = attribute.name
            found.append(copy)
    return found


FUNCTION_BODY = Lowering("function_body", (), lower)
