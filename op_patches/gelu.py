"""Gelu operators -> primitives.

    erf    y = (0.5 x) * (1 + Erf(x / sqrt 2))                                   Gelu-20, com.microsoft Gelu, BiasGelu
    tanh   y = (0.5 x) * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))           Gelu-20 tanh, com.microsoft FastGelu
    quick  y = x * Sigmoid(alpha * x)                                            com.microsoft QuickGelu

Sources: ONNX operator Gelu-20; ONNX Runtime docs/ContribOperators.md. 0.5 comes first because 2x overflows float16 from
32,752 on. Where ATC may store float16, the argument of Tanh is clipped to ±10 before it is cubed (x^3 overflows from 41
on): Tanh is ±1 there in float32 and float64 alike. The parser knows no Gelu at any opset (ATC_ONNX_ACCEPTANCE.md,
section 2); GE has kernels for Erf, Tanh and Sigmoid on every chip of the tables.
"""

from __future__ import annotations

import math

from onnx import NodeProto

from op_patches.graph_view import FLOATS, GraphView, attributes, input_name, stores_float16
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

CLIP = 10.0
CUBIC = 0.044715


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match each operator by its domain; BiasGelu and FastGelu may add a bias first."""
    kind = _kind(node)
    if kind is None:
        return None
    x, out = node.input[0], node.output[0]
    if graph.elem(x) not in FLOATS:
        return Refusal(f"the element type of {x} is unknown or not floating point")
    bias = input_name(node, 1)
    like = x
    if bias:
        x = new.op("Add", x, bias)
    if kind == "quick":
        alpha = attributes(node).get("alpha", 1.702)
        new.op("Mul", x, new.op("Sigmoid", new.op("Mul", x, new.const(alpha, like, "alpha"))), out=out)
    elif kind == "tanh":
        gelu_tanh(new, x, like, out, clip=stores_float16(graph.target))
    else:
        gelu_erf(new, x, like, out)
    return Rewrite(kind)


def _kind(node: NodeProto) -> str | None:
    if node.domain in ("", "ai.onnx"):
        if node.op_type != "Gelu":
            return None
        return "tanh" if attributes(node).get("approximate", b"none") == b"tanh" else "erf"
    known = {"Gelu": "erf", "BiasGelu": "erf", "FastGelu": "tanh", "QuickGelu": "quick"}
    return known.get(node.op_type) if node.domain == "com.microsoft" else None


def gelu_erf(new: Builder, x: str, like: str, out: str) -> None:
    """The exact form; `like` names a value whose element type the constants take."""
    erf = new.op("Erf", new.op("Div", x, new.const(math.sqrt(2.0), like, "sqrt_2")))
    _gate(new, x, erf, like, out)


def gelu_tanh(new: Builder, x: str, like: str, out: str, clip: bool) -> None:
    """The approximation of Hendrycks and Gimpel, arXiv:1606.08415."""
    c = new.op("Clip", x, new.const(-CLIP, like, "low"), new.const(CLIP, like, "high")) if clip else x
    cube = new.op("Mul", new.op("Mul", c, c), c)
    inner = new.op("Add", c, new.op("Mul", cube, new.const(CUBIC, like, "cubic")))
    tanh = new.op("Tanh", new.op("Mul", inner, new.const(math.sqrt(2.0 / math.pi), like, "sqrt_2_pi")))
    _gate(new, x, tanh, like, out)


def _gate(new: Builder, x: str, odd: str, like: str, out: str) -> None:
    half = new.op("Mul", x, new.const(0.5, like, "half"))
    new.op("Mul", half, new.op("Add", odd, new.const(1.0, like, "one")), out=out)


GELU = Lowering("gelu", ("Gelu", "BiasGelu", "FastGelu", "QuickGelu"), lower)
