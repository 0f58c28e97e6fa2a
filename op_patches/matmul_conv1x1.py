"""MatMul with a constant matrix -> Conv with a 1x1 kernel, on request (`--matmul conv1x1`).

    x [..., K] @ W [K, N] = Conv(x as [B, K, H, T], Wᵀ as [N, K, 1, 1]) as [..., N]

For toolchains that have no MatMulV2 for the chip but do have Conv2D. The weight passes through Transpose and Unsqueeze
nodes, which ATC folds, so that weights outside the file stay outside.
"""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import FLOATS, GraphView
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match x of two to four axes times a constant matrix."""
    x, weight = node.input
    if graph.elem(x) not in FLOATS:
        return None
    if not graph.is_constant(weight) or graph.rank(weight) != 2:
        return Refusal("the second operand is no constant matrix, so it cannot be a kernel")
    rank = graph.rank(x)
    if rank not in (2, 3, 4):
        return Refusal(f"the first operand has {rank or 'an unknown number of'} axes; Conv2D takes up to 4")
    kernel = new.unsqueeze(new.op("Transpose", weight, perm=[1, 0]), [2, 3])
    if rank == 2:
        y = new.op("Conv", new.unsqueeze(x, [2, 3]), kernel, kernel_shape=[1, 1])
        new.squeeze(y, [2, 3], out=node.output[0])
    elif rank == 3:
        y = new.op("Conv", new.unsqueeze(new.op("Transpose", x, perm=[0, 2, 1]), [2]), kernel, kernel_shape=[1, 1])
        new.op("Transpose", new.squeeze(y, [2]), perm=[0, 2, 1], out=node.output[0])
    else:
        y = new.op("Conv", new.op("Transpose", x, perm=[0, 3, 1, 2]), kernel, kernel_shape=[1, 1])
        new.op("Transpose", y, perm=[0, 2, 3, 1], out=node.output[0])
    return Rewrite()


MATMUL_CONV1X1 = Lowering("matmul_conv1x1", ("MatMul",), lower)
