"""The ordered lowerings for a target, with the reason for each place in the order, and the run.

patched, report = apply_lowerings(model, Target.parse("910B4"))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import ModelProto

from op_patches import readiness
from op_patches.arg_extrema import ARG_EXTREMA
from op_patches.bool_data import BOOL_DATA
from op_patches.cast_like import CAST_LIKE
from op_patches.clip import CLIP
from op_patches.constant import CONSTANT, SPARSE_INITIALIZER
from op_patches.constant_if import CONSTANT_IF
from op_patches.constant_of_shape import CONSTANT_OF_SHAPE
from op_patches.conv_kernel import CONV_KERNEL
from op_patches.dropout import DROPOUT
from op_patches.einsum import EINSUM
from op_patches.finite_masks import FINITE_MASKS
from op_patches.fold_constants import FOLD_CONSTANTS
from op_patches.function_body import FUNCTION_BODY
from op_patches.fused_conv import FUSED_CONV
from op_patches.fused_matmul import FUSED_MATMUL
from op_patches.gather_nd import GATHER_ND
from op_patches.gelu import GELU
from op_patches.gelu_pattern import GELU_PATTERN
from op_patches.gemm import GEMM
from op_patches.graph_view import all_graphs, bind_shapes, is_external, skeleton
from op_patches.int64_kernels import INT64_KERNELS
from op_patches.is_nan import IS_NAN
from op_patches.layer_norm import LAYER_NORM
from op_patches.matmul import MATMUL
from op_patches.matmul_310p import LIFTED_WEIGHTS, MATMUL_310P
from op_patches.matmul_conv1x1 import MATMUL_CONV1X1
from op_patches.model_rules import DEAD_NODES, LOCAL_FUNCTIONS, NODE_ORDER, OPSET_IMPORTS
from op_patches.names import NAMES
from op_patches.narrow_int64 import NARROW_INT64
from op_patches.opset import OPSET_17
from op_patches.reduce_noop import REDUCE_NOOP
from op_patches.report import LoweringReport, RuleReport
from op_patches.rewriter import Rule, Run, copy_model, remove_dead_nodes
from op_patches.rms_norm import RMS_NORM
from op_patches.rotary_embedding import ROTARY_EMBEDDING
from op_patches.scatter import SCATTER
from op_patches.shape_slice import SHAPE_SLICE
from op_patches.skip_layer_norm import SKIP_LAYER_NORM
from op_patches.slice_bounds import SLICE_BOUNDS
from op_patches.targets import Target
from op_patches.top_k import top_k
from op_patches.transpose import TRANSPOSE
from op_patches.trilu import TRILU
from op_patches.validity import require_valid
from op_patches.variadic import VARIADIC
from op_patches.where_bool import WHERE_BOOL
from runtime.errors import PatchError

log = logging.getLogger(__name__)
_MAX_ROUNDS = 10  # two are usual: one that works and one that finds nothing


@dataclass(frozen=True, slots=True)
class Step:
    """One or more rules at one place in the order. Several rules repeat until none of them finds anything."""

    rules: tuple[Rule, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may ask for beyond the target."""

    matmul: str = "keep"  # or "conv1x1": matrices as 1x1 convolutions
    top_k: str = "keep"  # or "rank": ranks by counting on every type

    def __post_init__(self) -> None:
        if self.top_k not in ("keep", "rank"):
            raise PatchError(f"top_k={self.top_k}: expected keep or rank")
        if self.matmul not in ("keep", "conv1x1"):
            raise PatchError(f"matmul={self.matmul}: expected keep or conv1x1")


def steps_for(target: Target, options: Options | None = None) -> tuple[Step, ...]:
    """The rules in order."""
    options = options or Options()
    steps = [
        Step((LOCAL_FUNCTIONS,), "first: what is inside a function is invisible to every other rule"),
        Step((NODE_ORDER,), "type inference and every rule read the nodes in order"),
        Step((NAMES,), "every later report and every new name builds on a unique node name"),
        Step((SPARSE_INITIALIZER, CONSTANT), "rules read constants in one form only"),
        Step((DEAD_NODES,), "nothing below should spend a proof on what nobody reads"),
        Step((CLIP, TRANSPOSE, DROPOUT), "trivial forms go before anything has to look through them"),
        Step(_FOREIGN, "a foreign operator hides the types behind it, so these repeat until all types are known"),
        Step((LAYER_NORM,), _LAYER_NORM_WHY),
        Step((FUNCTION_BODY, CONSTANT), "what opset 17 lacks becomes primitives, and bodies hold odd Constants"),
        Step(
            (FOLD_CONSTANTS, CONSTANT_IF), "shapes and axes must be constants before opset 17 makes attributes of them"
        ),
        Step((OPSET_17,), "now every operator exists at 17; the rules below write opset 13 … 17"),
        Step((SHAPE_SLICE, CAST_LIKE, TRILU, EINSUM), "operators that parse but have no kernel"),
        Step((FOLD_CONSTANTS,), "their masks and shapes become constants"),
        Step(_MISREAD, "operators whose plugin refuses or misreads a form"),
        Step((SCATTER, top_k(always=options.top_k == "rank"), IS_NAN), "operators whose kernel is on AICPU"),
        Step((INT64_KERNELS,), "exact for every value, so it comes before the rule that needs a proven range"),
        Step((NARROW_INT64, BOOL_DATA, WHERE_BOOL), "types without a kernel, also in what the rules above wrote"),
        Step((FINITE_MASKS,), "after folding, which turns computed masks into constants"),
        Step((GELU_PATTERN,), "after Gelu and folding, whose constants it must find in their final form"),
        Step((GEMM, MATMUL), "Gemm makes MatMul"),
    ]
    if options.matmul == "conv1x1":
        steps.append(Step((MATMUL_CONV1X1,), "after every rule that makes a MatMul"))
    steps += [
        Step((MATMUL_310P,), "after every rule that makes or takes a MatMul"),
        Step((LIFTED_WEIGHTS,), "removes the Unsqueeze nodes that the rule above writes on weights"),
        Step((OPSET_IMPORTS,), "last: a domain can go when the last of its nodes is gone"),
    ]
    return tuple(steps)


_FOREIGN: tuple[Rule, ...] = (
    GELU,
    FUSED_MATMUL,
    FUSED_CONV,
    RMS_NORM,
    SKIP_LAYER_NORM,
    ROTARY_EMBEDDING,
)

_MISREAD: tuple[Rule, ...] = (
    SLICE_BOUNDS,
    GATHER_ND,
    ARG_EXTREMA,
    VARIADIC,
    REDUCE_NOOP,
    CONSTANT_OF_SHAPE,
    CONV_KERNEL,
)

_LAYER_NORM_WHY = (
    "the decomposed form parses in every release and GE fuses it again; the plugin for LayerNormalization is closed up "
    "to 9.1 and documented for float16 only, and the open one of 9.2 broadcasts scale and bias to the size of x"
)


def apply_lowerings(
    model: ModelProto,
    target: Target,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    options: Options | None = None,
) -> tuple[ModelProto, LoweringReport]:
    """Return a lowered copy of the model and the report; the model itself is not touched.

    Input and output names, dtypes, shapes and order stay; `input_shapes` binds open axes of inputs to numbers first,
    as ATC's --input_shape will, which lets shape arithmetic become constants.
    """
    require_valid(model)
    patched = copy_model(model)
    if input_shapes:
        bind_shapes(patched, input_shapes)
    interface = _interface(patched)
    num_nodes = count_nodes(patched)
    try:
        reports = _run_to_the_end(steps_for(target, options), Run(patched, target))
    except (
        ArithmeticError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        NotImplementedError,
    ) as error:
        wrong = check_model(model)  # rules trust types and ranks; in a valid graph this is a bug and stays one
        if not wrong:
            raise
        raise PatchError(f"the graph is not valid ONNX: {wrong}") from error
    remove_dead_nodes(patched)  # constants that a rule read and replaced
    if _interface(patched) != interface:
        raise PatchError("the lowerings changed the interface of the graph; this is a bug: do not use the result")
    wrong = check_model(patched)
    if wrong and not check_model(model):
        raise PatchError(f"the patched graph does not pass the ONNX checker, and the given one does: {wrong}")
    remaining = [f"the ONNX checker, as for the given graph: {wrong}"] if wrong else []
    for finding in readiness.check_model(patched, target).blocking:
        remaining.append(f"{finding.severity.value}: {finding.node or 'graph'} ({finding.rule}): {finding.message}")
    return patched, LoweringReport(str(target), tuple(reports), num_nodes, count_nodes(patched), tuple(remaining))


def _run_to_the_end(steps: Sequence[Step], run: Run) -> Sequence[RuleReport]:
    """Run the steps in order, and again until a round finds nothing: what a late rule writes may suit an early one.

    A rule's report holds what it did in all rounds, and what it refused in the last.
    """
    reports = {rule.name: RuleReport(rule.name, (), ()) for step in steps for rule in step.rules}
    for _ in range(_MAX_ROUNDS):
        found = sum(_run_step(step, run, reports) for step in steps)
        if not found:
            return list(reports.values())
    raise PatchError(f"the lowerings did not come to an end after {_MAX_ROUNDS} rounds; this is a bug")


def _run_step(step: Step, run: Run, reports: dict[str, RuleReport]) -> int:
    """Run the rules of a step, and again while there are several and one of them found something."""
    total, again = 0, True
    while again:
        found = 0
        for rule in step.rules:
            report = rule.run(run)
            log.info("%s: %d", rule.name, report.count)
            found += report.count
            reports[rule.name] = RuleReport(rule.name, reports[rule.name].lowered + report.lowered, report.refused)
        total += found
        again = found > 0 and len(step.rules) > 1
    return total


def count_nodes(model: ModelProto) -> int:
    """Nodes of the graph and of every branch in it."""
    return sum(len(g.node) for g in all_graphs(model.graph))


def _interface(model: ModelProto) -> list[bytes]:
    return [i.SerializeToString(deterministic=True) for i in (*model.graph.input, *model.graph.output)]


def check_model(model: ModelProto) -> str:
    """Full ONNX checker with strict shape inference: "" or what is wrong. Tensors without data stand in as inputs."""
    light = skeleton(model)
    outside = [t for t in light.graph.initializer if is_external(t)]
    kept = [t for t in light.graph.initializer if not is_external(t)]
    inputs = {i.name for i in light.graph.input}
    del light.graph.initializer[:]
    light.graph.initializer.extend(kept)
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in outside if t.name not in inputs
    )
    try:
        onnx.checker.check_model(light, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return " ".join(str(error).split())
    return ""
