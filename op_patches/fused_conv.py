"""com.microsoft FusedConv -> Conv, Add and the activation. Source: ONNX Runtime docs/ContribOperators.md.

y = activation(Conv(x, w, b) + z)
"""

from __future__ import annotations

from typing import Any

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes, input_name
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

_PLAIN = ("Relu", "Tanh", "Sigmoid")


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    attrs = attributes(node)
    x = node.input[0]
    if graph.elem(x) is None:
        return Refusal(f"the element type of {x} is unknown")
    kept = {k: v for k, v in attrs.items() if not k.startswith("activation")}
    bias, z = input_name(node, 2), input_name(node, 3)
    y = new.op("Conv", x, node.input[1], *([bias] if bias else []), **kept)
    if z:
        y = new.op("Add", y, z)
    refusal = activate(new, y, x, attrs, node.output[0])
    return refusal or Rewrite(attrs.get("activation", b"none").decode())


def activate(new: Builder, y: str, like: str, attrs: dict[str, Any], out: str) -> Refusal | None:
    """The activation attribute of the fused operators, on y."""
    name = attrs.get("activation", b"").decode()
    params = list(attrs.get("activation_params", ()))
    if not name:
        new.op("Identity", y, out=out)
    elif name in _PLAIN:
        new.op(name, y, out=out)
    elif name == "LeakyRelu":
        new.op(name, y, out=out, alpha=params[0] if params else attrs.get("activation_alpha", 0.01))
    elif name == "Clip" and len(params) == 2:
        new.op(name, y, new.const(params[0], like, "low"), new.const(params[1], like, "high"), out=out)
    elif name == "HardSigmoid" and len(params) == 2:
        new.op(name, y, out=out, alpha=params[0], beta=params[1])
    else:
        return Refusal(f"activation {name} {params} has no standard operator that was checked")
    return None


FUSED_CONV = Lowering("fused_conv", ("FusedConv",), lower)
