"""Which engine runs each node: the GE operators the parser made, their dtypes, and the kernels of the chip.

GE asks AICore first, then AICPU. A node without either fails the compilation with EZ3002 (one line per engine, with the
reason) and EZ3003. Tables: data/ge_kernels.json; the rules around them are in the notes of the fact tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes, input_name
from op_patches.readiness.fixes import aicpu_fix, missing_kernel_fix
from op_patches.readiness.folding import Folded
from op_patches.readiness.parser import node_names
from op_patches.readiness.report import Finding, Severity
from op_patches.readiness.views import DTYPE_NAMES, dtype_of, is_standard
from op_patches.targets import Certainty, Engine, Plugin, Target

_TABLE = "ops-info of CANN 8.1.RC1 (data/ge_kernels.json)"
_CUBE = {"MatMul", "Gemm", "Conv", "ConvTranspose"}
# The ONNX input whose dtype decides, where it is not the first.
_DATA_INPUT = {"Where": 1, "OneHot": 2}
_SEQUENCE_OPS = ("SequenceEmpty", "SequenceErase", "SequenceLength")  # host kernels only, like those in the table


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one node runs, and why."""

    engine: Engine
    ge_op: str
    dtype: str | None
    reason: str = ""
    certainty: Certainty = Certainty.SOURCE

    @property
    def assumed(self) -> bool:
        """Whether the dtype was not known, so that float32 had to stand in."""
        return self.dtype is None and self.engine not in (Engine.LOCAL, Engine.UNKNOWN) and bool(self.ge_op)


def place(node: NodeProto, view: GraphView, target: Target, plugin: Plugin, constants: Folded) -> Placement:
    """Choose the engine of one node that the parser accepts."""
    if constants.covers(node):
        return Placement(Engine.LOCAL, plugin.ge_op, None, "folded while compiling")
    standard = is_standard(node)
    ge_op = _ge_op(node, view, plugin, constants) if standard else plugin.ge_op
    dtype = _dtype(node, view) if standard else dtype_of(view, input_name(node, 0))
    if node.op_type in _SEQUENCE_OPS:
        return Placement(Engine.HOST, ge_op, dtype, "host kernel only", Certainty.INFERRED)
    kernel = target.kernel(ge_op)
    if kernel is None:
        return Placement(Engine.UNKNOWN, ge_op, dtype, "not in the kernel tables", Certainty.INFERRED)
    if kernel.local or dtype is None:
        engine = Engine.LOCAL if kernel.local else kernel.engine("float32")
        return Placement(
            engine, ge_op, dtype, "" if kernel.local else "dtype unknown: float32 assumed", kernel.certainty
        )
    special = _special(node, view, target, dtype) if standard else None
    if special is not None:
        return special
    effective = effective_dtype(node, dtype, target)
    engine = kernel.engine(effective)
    if engine is not Engine.AICORE and effective != dtype:
        engine = kernel.engine(dtype)
    if engine is Engine.NONE and kernel.aicore is None and not kernel.aicpu:
        reason = f"op type {ge_op} is not found in this op store"
    else:
        reason = {
            Engine.AICPU: f"AICore has no {ge_op} for {dtype}",
            Engine.NONE: f"data type {dtype} of {ge_op} is not supported",
        }.get(engine, "")
    return Placement(engine, ge_op, dtype, reason, kernel.certainty)


def effective_dtype(node: NodeProto, dtype: str, target: Target) -> str:
    """The dtype ATC's precision mode computes in, when the kernel has it."""
    if dtype != "float32" or not target.half_precision:
        return dtype
    if target.precision == "fp16":
        return "float16"
    if node.op_type in _CUBE:  # white-listed in the mixed modes; float16 inputs in cube_fp16in_fp32out
        return "bfloat16" if target.precision == "mixed_bfloat16" else "float16"
    return dtype


def placement_finding(placement: Placement, node: NodeProto, name: str) -> Finding | None:
    """Say what is wrong with a placement, if anything is."""
    dtype = placement.dtype or "unknown dtype"
    if placement.engine is Engine.AICPU:
        fix, lowering = aicpu_fix(node.op_type, dtype)
        return Finding(
            Severity.AICPU,
            "kernel.aicpu",
            name,
            node.op_type,
            f"Op {name} ({placement.ge_op}, {dtype}) does not hit the high-priority operator information library:"
            f" {placement.reason or 'it runs on AICPU'}",
            fix,
            _TABLE,
            placement.certainty,
            "W11001",
            lowering,
        )
    if placement.engine in (Engine.NONE, Engine.HOST):
        fix, lowering = missing_kernel_fix(node.op_type, dtype)
        return Finding(
            Severity.NO_KERNEL,
            "kernel.host-only" if placement.engine is Engine.HOST else "kernel.none",
            name,
            node.op_type,
            f"optype [{placement.ge_op}] of node {name} is unsupported: {placement.reason};"
            " then EZ3003 No supported Ops kernel and engine are found",
            fix,
            _TABLE,
            placement.certainty,
            "EZ3002",
            lowering,
        )
    return None


def place_all(
    views: list[GraphView], target: Target, plugins: Mapping[int, Plugin | None], constants: Mapping[int, Folded]
) -> Iterator[tuple[GraphView, NodeProto, str, Placement]]:
    """Place every node but constants; a node that the parser refuses runs nowhere. Keys are id(node), id(view)."""
    for view in views:
        for node, name in zip(view.nodes, node_names(view.proto), strict=True):
            if node.op_type == "Constant":
                continue
            plugin = plugins.get(id(node))
            if plugin is None:
                yield view, node, name, Placement(Engine.NONE, "", None, "refused by the parser")
            else:
                yield view, node, name, place(node, view, target, plugin, constants[id(view)])


def _ge_op(node: NodeProto, view: GraphView, plugin: Plugin, constants: Folded) -> str:
    """Name the GE operator that does the work, where it depends on the node."""
    inputs = [name for name in node.input if name]
    if node.op_type in ("Max", "Min", "Concat") and len(inputs) == 1:
        return "Identity"
    if node.op_type == "Slice" and plugin.ge_op == "StridedSliceV2" and all(n in constants.names for n in inputs[1:]):
        return "StridedSlice"  # by ConstToAttrStridedSliceV2Fusion
    if node.op_type == "TopK" and plugin.ge_op == "TopK" and len(inputs) > 1 and inputs[1] in constants.names:
        return "TopKV2"
    if node.op_type in ("Conv", "ConvTranspose"):
        rank = view.rank(input_name(node, 0))
        flat = "Conv2D" if node.op_type == "Conv" else "Conv2DTranspose"
        return flat.replace("2D", "3D") if rank == 5 else flat
    if node.op_type == "Clip":
        bounds = len(inputs) - 1 if view.opset >= 11 else 2
        return "ClipByValue" if bounds == 2 else "Minimum"
    return plugin.ge_op


def _dtype(node: NodeProto, view: GraphView) -> str | None:
    """The dtype of the operand that decides the kernel."""
    attrs = attributes(node)
    if node.op_type == "ConstantOfShape":
        return DTYPE_NAMES.get(attrs["value"].data_type) if "value" in attrs else "float32"
    if node.op_type == "Xor":
        return "int32"  # the plugin casts to an integer and uses BitwiseXor
    if node.op_type.startswith("Random"):
        return "int64"  # the kernel reads a shape
    return dtype_of(view, input_name(node, _DATA_INPUT.get(node.op_type, 0)))


def _special(node: NodeProto, view: GraphView, target: Target, dtype: str) -> Placement | None:
    """Rules that a dtype list cannot say."""
    if node.op_type == "Cast":
        return _cast(node, target, dtype)
    if node.op_type == "TopK":
        return _top_k(node, view, target, dtype)
    if node.op_type in ("MatMul", "Gemm") and target.family == "310p" and dtype == "float32":
        if effective_dtype(node, dtype, target) == "float16":
            return None
        return _float32_matmul_on_310p(node, view)
    if node.op_type == "LayerNormalization" and dtype == "float16" and len(node.input) < 3:
        # The plugin then makes a float32 beta: float16/float16/float32 is no row of the kernel.
        reason = "x and gamma are float16 and the beta that the parser adds is float32: no such row"
        return Placement(Engine.NONE, "LayerNorm", dtype, reason, Certainty.SOURCE)
    return None


def _cast(node: NodeProto, target: Target, dtype: str) -> Placement:
    kernel = target.kernel("Cast")
    assert kernel is not None
    wanted = DTYPE_NAMES.get(int(attributes(node).get("to", 0)), "an undefined type")
    ends = [kernel.engine(dtype), kernel.engine(wanted)]
    for engine in (Engine.NONE, Engine.AICPU):
        if engine in ends:
            return Placement(engine, "Cast", dtype, f"Cast from {dtype} to {wanted} is not on AICore", kernel.certainty)
    return Placement(Engine.AICORE, "Cast", dtype)


def _top_k(node: NodeProto, view: GraphView, target: Target, dtype: str) -> Placement | None:
    """AICore has TopKV2 for floats only; GE rewrites TopK to it when k is a constant [I]. Integers stay on AICPU."""
    kernel = target.kernel("TopKV2")
    assert kernel is not None
    if kernel.aicore is not None and dtype in kernel.aicore["x"]:
        return None
    plain = target.kernel("TopK")
    assert plain is not None
    return Placement(plain.engine(dtype), "TopK", dtype, f"TopKV2 has no {dtype}", plain.certainty)


def _float32_matmul_on_310p(node: NodeProto, view: GraphView) -> Placement:
    """310P has no float32 matrix unit; a static vector form exists under conditions (check_fp32_case_scenario)."""
    shapes = [view.static_shape(input_name(node, index)) for index in (0, 1)]
    if node.op_type == "Gemm":
        if all(shape is not None for shape in shapes):
            return Placement(Engine.AICORE, "MatMulV2", "float32", "static vector form")
        return Placement(Engine.NONE, "MatMulV2", "float32", "dynamic-shape float32 MatMul is not supported")
    a, b = shapes
    if a and b and len(a) > 2 and len(a) == len(b) and a[:-2] == b[:-2] and a[-1] != 1 and b[-1] != 1:
        return Placement(Engine.AICORE, "BatchMatMulV2", "float32", "static vector form")
    reason = "float32 needs static shapes of rank > 2 with equal batch axes and a last axis other than 1"
    return Placement(Engine.AICPU, "BatchMatMulV2", "float32", reason)


def shape_finding(node: NodeProto, name: str, view: GraphView) -> Finding | None:
    """Operand shapes that the GE operator does not take, although the ONNX operator does."""
    shapes = [view.shape(value) for value in node.input if value]
    if not is_standard(node):
        return None
    if node.op_type == "MatMul" and any(shape is not None and len(shape) == 1 for shape in shapes):
        problem, fix, lowering = (
            "BatchMatMulV2 has no 1-D operands, and the plugin reshapes none",
            "Reshape to 2-D",
            "matmul",
        )
    elif node.op_type in ("Sum", "Mean") and len({shape for shape in shapes if shape is not None}) > 1:
        problem, fix, lowering = "AccumulateNV2 does not broadcast", "use Add", "variadic"
    else:
        return None
    return Finding(
        Severity.FAILS,
        "kernel.operand-shape",
        name,
        node.op_type,
        problem,
        fix,
        "notes of the operator's plugin (data/onnx_ops.json)",
        Certainty.INFERRED,
        "EZ9999",
        lowering,
    )
