"""Gemm(A, B, C) -> MatMul and Add.

    y = (alpha * A') @ B' + beta * C       A' = A or its transpose

Source: ONNX operator Gemm-13. The plugin of CANN up to 9.1 is closed, and its documentation for 8.5 calls C, alpha and
beta "not supported" (atc_onnx_ops.json, Gemm); MatMul and Add parse everywhere and reach the same kernel. alpha is
applied to A when it shrinks the product, so that float16 does not overflow where Gemm would not.
"""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import FLOATS, GraphView, attributes, input_name
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match every Gemm of the standard domain."""
    if node.domain not in ("", "ai.onnx"):
        return None
    attrs = attributes(node)
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    a, b, c = node.input[0], node.input[1], input_name(node, 2)
    like = a
    elem = graph.elem(a)
    if elem not in FLOATS:
        return Refusal("the element type is unknown or an integer, which no matrix kernel takes")
    if attrs.get("transA"):
        a = new.op("Transpose", a, perm=[1, 0])
    if attrs.get("transB"):
        b = new.op("Transpose", b, perm=[1, 0])
    shrinks = abs(alpha) < 1.0
    if shrinks:
        a = new.op("Mul", a, new.const(alpha, like, "alpha"))
    adds, scales = bool(c) and beta != 0.0, alpha != 1.0 and not shrinks
    y = new.op("MatMul", a, b, out=None if adds or scales else node.output[0])
    if scales:
        y = new.op("Mul", y, new.const(alpha, like, "alpha"), out=None if adds else node.output[0])
    if adds:
        addend = c if beta == 1.0 else new.op("Mul", c, new.const(beta, like, "beta"))
        new.op("Add", y, addend, out=node.output[0])
    return Rewrite()


GEMM = Lowering("gemm", ("Gemm",), lower)
