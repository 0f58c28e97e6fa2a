"""An operator that the target does not parse, but that ONNX defines by a function -> that function's body.

    Attention-23/24, Swish-24, GroupNormalization-21, Mish-18, MeanVarianceNormalization, HannWindow, CenterCropPad …

The source of each formula is the operator's own definition in the `onnx` package: its inliner writes the body. A body
may hold operators that need a lowering themselves, so this rule runs before the others and again after them.
"""

from __future__ import annotations

import onnx.inliner
from onnx import NodeProto, helper, numpy_helper

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
    if any(True for inner in body for _ in subgraphs(inner)):
        return Refusal(f"the body of {node.op_type} holds control flow")
    names = {name: name for name in (*node.input, *node.output)}
    for inner in body:
        inputs = [names.get(name, "") for name in inner.input]
        outs = [name if name in node.output else None for name in inner.output]
        for name, given in zip(inner.output, new.ops(inner.op_type, inputs, outs), strict=True):
            names[name] = given
        new.nodes[-1].attribute.extend(inner.attribute)
    return Rewrite(f"{len(body)} nodes")


def _body(node: NodeProto, graph: GraphView) -> list[NodeProto] | None:
    """The nodes that ONNX's inliner makes of the node; None when it leaves the node."""
    inputs, initializers = [], []
    for name in dict.fromkeys(n for n in node.input if n):
        kind = graph.type_of(name)
        if kind is None:
            return None
        value = graph.constant(name)
        if value is not None:
            initializers.append(numpy_helper.from_array(value, name))
        inputs.append(helper.make_tensor_value_info(name, kind.elem, kind.shape))
    outputs = [helper.make_empty_tensor_value_info(o) for o in node.output if o]
    model = helper.make_model(
        helper.make_graph([node], "body", inputs, outputs, initializers),
        opset_imports=[helper.make_opsetid("", graph.opset)],
    )
    inlined = onnx.inliner.inline_selected_functions(model, [("", node.op_type)], inline_schema_functions=True)
    nodes = list(inlined.graph.node)
    return None if any(n.op_type == node.op_type for n in nodes) else nodes


FUNCTION_BODY = Lowering("function_body", (), lower)
