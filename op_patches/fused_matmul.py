"""com.microsoft FusedMatMul, TransposeMatMul and FusedGemm -> the standard operators.

    FusedMatMul   alpha * A' @ B'     A' with the last two axes exchanged (transA); transBatchA also moves axis 0 to -2
    FusedGemm     activation(Gemm)

Source: ONNX Runtime docs/ContribOperators.md.
"""

from __future__ import annotations

from onnx import NodeProto

from op_patches.fused_conv import activate
from op_patches.graph_view import FLOATS, GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    attrs = attributes(node)
    if graph.elem(node.input[0]) not in FLOATS:
        return Refusal(f"the element type of {node.input[0]} is unknown")
    if node.op_type == "FusedGemm":
        kept = {k: v for k, v in attrs.items() if not k.startswith("activation")}
        if "activation" not in attrs:
            return Refusal("no activation is named")
        y = new.op("Gemm", *node.input, **kept)
        refusal = activate(new, y, node.input[0], attrs, node.output[0])
        return refusal or Rewrite(attrs["activation"].decode())
    if attrs.get("transBatchA") or attrs.get("transBatchB"):
        return Refusal("transBatchA or transBatchB: batch axes inside the matrix")
    a, b = node.input[:2]
    sides = [a, b]
    for i, flag in enumerate(("transA", "transB")):
        rank = graph.rank(sides[i])
        if attrs.get(flag) and rank is None:
            return Refusal(f"{flag} of {sides[i]}, whose rank is unknown")
        if attrs.get(flag) and rank is not None and rank > 1:
            sides[i] = new.op("Transpose", sides[i], perm=[*range(rank - 2), rank - 1, rank - 2])
    alpha = attrs.get("alpha", 1.0)
    y = new.op("MatMul", *sides, out=node.output[0] if alpha == 1.0 else None)
    if alpha != 1.0:
        new.op("Mul", y, new.const(alpha, a, "alpha"), out=node.output[0])
    return Rewrite()


FUSED_MATMUL = Lowering("fused_matmul", ("FusedMatMul", "TransposeMatMul", "FusedGemm"), lower)
