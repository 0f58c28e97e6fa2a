"""int64 arithmetic that falls to AICPU -> int32 between two Casts, when the range of every operand is proven.

    CumSum, Div, Mod, Pow, Pad on int64: y = Cast(op(Cast(x, int32)), int64)

AICore has these kernels for int32 only (ATC_ONNX_ACCEPTANCE.md, section 5). The result's range must be proven too, as
int32 would wrap where int64 does not; op_patches.ranges says what counts as proof.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView, attributes
from op_patches.ranges import Range, node_range, value_range
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite
from op_patches.targets import Engine

# ONNX operator -> its GE operator and how many of its inputs hold data
_DATA = {"CumSum": ("Cumsum", 1), "Div": ("RealDiv", 2), "Mod": ("Mod", 2), "Pow": ("Pow", 2), "Pad": ("PadV3", 1)}


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match int64 data whose GE operator takes int32 on AICore but not int64."""
    ge_op, num_data = _DATA[node.op_type]
    data = [name for i, name in enumerate(node.input) if name and (i < num_data or (node.op_type == "Pad" and i == 2))]
    if graph.elem(data[0]) != TensorProto.INT64 or graph.engine(ge_op, data[0]) == Engine.AICORE:
        return None
    known: dict[str, Range] = {}
    for name in data:
        found = value_range(graph, name)
        if found is None or not found.fits_int32:
            return Refusal(f"{node.op_type} on int64 runs on AICPU, and no range of {name} within int32 is proven")
        known[name] = found
    result = node_range(graph, node)
    if result is None or not result.fits_int32:
        return Refusal(f"{node.op_type} on int64 runs on AICPU, and its result may leave int32")
    narrow = {name: new.cast(name, TensorProto.INT32) for name in dict.fromkeys(data)}
    inputs = [narrow.get(name, name) if name in data else name for name in node.input]
    if node.op_type == "CumSum":  # the axis may be the very tensor that is summed; it stays as it is
        inputs[1] = node.input[1]
    y = new.op(node.op_type, *inputs, **attributes(node))
    new.cast(y, TensorProto.INT64, out=node.output[0])
    return Rewrite("int32", ranges={name: (r.low, r.high) for name, r in known.items()})


NARROW_INT64 = Lowering("narrow_int64", tuple(_DATA), lower)
