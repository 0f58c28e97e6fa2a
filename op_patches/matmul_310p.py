"""float32 MatMul on 310P -> the forms that stay on its AI cores.

    [M, K] @ [K, N]             Squeeze([1, M, K] @ [1, K, N])
    [..., M, K] @ [K, N]        Reshape([1, ... * M, K] @ [1, K, N])
    [B, 1, M, K] @ [B, H, K, N] Expand the axes of 1, so that the batch axes are equal
    [..., M, 1] @ [..., 1, N]   a * b
    [..., M, K] @ [..., K, 1]   ReduceSum(a * b transposed)

310P has no float32 matrix unit. Its BatchMatMulV2 computes float32 on the vector unit for static shapes of rank > 2
with equal batch axes and no last axis of 1, and leaves everything else to AICPU (check_fp32_case_scenario;
ge_kernels.json, BatchMatMulV2). An open axis counts as what MatMul needs it to be, and as larger than 1, until ATC
binds it. Only `precision=origin` needs this: the other modes compute matrices in float16.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto, NodeProto, TensorProto

from op_patches.graph_view import Dim, GraphView, all_graphs, attributes, is_external
from op_patches.report import LoweredNode, RuleReport
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite, Run, node_label

Shape = tuple[Dim, ...]


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match float32 MatMul whose operands the vector form does not take."""
    a, b = node.input
    if not graph.target.needs_static_batch or graph.elem(a) != TensorProto.FLOAT:
        return None
    shapes = graph.shape(a), graph.shape(b)
    if shapes[0] is None or shapes[1] is None:
        return Refusal("float32 on 310P needs known shapes, and not even the rank is known; give --input-shape")
    left, right = shapes[0], shapes[1]
    if min(len(left), len(right)) < 2 or stays_on_aicore(left, right):
        return None
    if 1 in (left[-1], right[-1]):
        return _without_matmul(node, left, right, new)
    return (_with_matrix if len(right) == 2 else _with_equal_batch)(node, left, right, new)


def stays_on_aicore(left: Shape, right: Shape) -> bool:
    """Whether the vector form takes operands of these shapes once every open axis is bound."""
    if not len(left) == len(right) > 2 or 1 in (left[-1], right[-1]):
        return False
    return all(x == y or 1 not in (x, y) for x, y in zip(left[:-2], right[:-2], strict=True))


def _without_matmul(node: NodeProto, left: Shape, right: Shape, new: Builder) -> Rewrite:
    """A last axis of 1: products without a sum, or a single sum per row."""
    a, b = node.input
    if left[-1] == 1:
        new.op("Mul", a, b, out=node.output[0])
        return Rewrite("one term per product: Mul")
    perm = [*range(len(right) - 2), len(right) - 1, len(right) - 2]
    product = new.op("Mul", a, new.op("Transpose", b, perm=perm))
    new.reduce("ReduceSum", product, [-1], out=node.output[0])
    return Rewrite("one column: Mul and ReduceSum")


def _with_matrix(node: NodeProto, left: Shape, right: Shape, new: Builder) -> Rewrite | Refusal:
    """Times one matrix: all other axes of the left operand become rows."""
    a, b = node.input
    matrix = new.unsqueeze(b, [0])
    if len(left) == 2:
        new.squeeze(new.op("MatMul", new.unsqueeze(a, [0]), matrix), [0], out=node.output[0])
        return Rewrite("rank 3")
    if len(left) == 3 and left[0] == 1:
        new.op("MatMul", a, matrix, out=node.output[0])
        return Rewrite("rank 3")
    result = (*left[:-1], right[-1])
    is_open = [d for d in result if not isinstance(d, int)]
    if len(is_open) > 1 or not isinstance(left[-1], int):
        return _bind(left, right)
    rows = new.reshape(a, [1, -1, left[-1]])
    new.reshape(new.op("MatMul", rows, matrix), [d if isinstance(d, int) else -1 for d in result], out=node.output[0])
    return Rewrite("rank 3, all leading axes as rows")


def _with_equal_batch(node: NodeProto, left: Shape, right: Shape, new: Builder) -> Rewrite | Refusal:
    """Both operands get the batch axes that broadcasting would give them."""
    rank = max(len(left), len(right))
    batch = [(1,) * (rank - len(shape)) + shape[:-2] for shape in (left, right)]
    operands: list[str] = []
    for name, shape, own, other in zip(node.input, (left, right), batch, reversed(batch), strict=True):
        missing = rank - len(shape)
        operand = new.unsqueeze(name, list(range(missing))) if missing else name
        copies = [there if here == 1 else 1 for here, there in zip(own, other, strict=True)]
        numbers = [c for c in copies if isinstance(c, int)]
        if len(numbers) < len(copies):
            return _bind(left, right)
        if max(numbers, default=1) > 1:
            operand = new.op("Expand", operand, new.const([*numbers, 1, 1], hint="shape"))
        operands.append(operand)
    new.op("MatMul", *operands, out=node.output[0])
    return Rewrite("equal batch axes")


def _bind(left: Shape, right: Shape) -> Refusal:
    shapes = " @ ".join(
        f"[{', '.join('?' if d is None or str(d).startswith('unk__') else str(d) for d in shape)}]"
        for shape in (left, right)
    )
    return Refusal(
        f"float32 on 310P needs static batch axes, and those of {shapes} are open: give the batch with "
        "--input-shape (-1 leaves an axis open), or compile with precision=fp16"
    )


MATMUL_310P = Lowering("matmul_310p", ("MatMul",), lower)


class _LiftedWeights:
    """Model rule: a weight that is only read through Unsqueeze(axis 0) gets its leading 1 in its own shape.

    The bytes stay where they are, in the file or outside. One constant serves all readers: GE could otherwise fold
    every Unsqueeze into a constant of its own, sixteen times for a network that is unrolled sixteen times.
    """

    name = "lifted_weights"

    def run(self, run: Run) -> RuleReport:
        if not run.target.needs_static_batch:
            return RuleReport(self.name, (), ())
        graph = run.model.graph
        view = run.views()[0]
        taken = {i.name for i in graph.input} | {o.name for o in graph.output}
        renamed: dict[str, str] = {}
        lowered: list[LoweredNode] = []
        for tensor in list(graph.initializer):
            readers = view.consumers(tensor.name)
            lifts = [n for n in readers if n.op_type == "Unsqueeze" and _lifts_first(n, view)]
            if len(tensor.dims) != 2 or not lifts or tensor.name in taken:
                continue
            if view.uses(tensor.name) == len(lifts):
                lifted = tensor
            elif is_external(tensor):  # also read as a matrix: a second header for the same bytes
                lifted = graph.initializer.add()
                lifted.CopyFrom(tensor)
                lifted.name = f"{tensor.name}/rank3"
            else:
                continue
            lifted.dims.insert(0, 1)
            renamed |= {n.output[0]: lifted.name for n in lifts}
            lowered += [LoweredNode(node_label(n), n.op_type, "leading 1 in the shape", None) for n in lifts]
        if lowered:
            _remove(graph, renamed)
            run.model_changed()
        return RuleReport(self.name, tuple(lowered), ())


def _lifts_first(node: NodeProto, view: GraphView) -> bool:
    axes = view.constant(node.input[1]) if len(node.input) > 1 else attributes(node).get("axes")
    return axes is not None and [int(axis) for axis in axes] in ([0], [-3]) and not view.is_output(node.output[0])


def _remove(graph: GraphProto, renamed: Mapping[str, str]) -> None:
    """Drop the nodes whose output has another name now, and read that name instead."""
    kept = [n for n in graph.node if not n.output or n.output[0] not in renamed]
    for node in (n for g in all_graphs(graph) for n in g.node):
        node.input[:] = [renamed.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(kept)


LIFTED_WEIGHTS = _LiftedWeights()
