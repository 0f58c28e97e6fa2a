"""The ordered lowerings for a target, with the reason for each place in the order, and the run.

    patched, report = apply_lowerings(model, Target.parse("910B4"))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import ModelProto

from op_patches.constant import CONSTANT, SPARSE_INITIALIZER
from op_patches.gelu import GELU
from op_patches.gelu_pattern import GELU_PATTERN
from op_patches.gemm import GEMM
from op_patches.graph_view import all_graphs, bind_shapes, is_external, skeleton
from op_patches.layer_norm import LAYER_NORM
from op_patches.matmul import MATMUL
from op_patches.matmul_conv1x1 import MATMUL_CONV1X1
from op_patches.model_rules import DEAD_NODES, LOCAL_FUNCTIONS, NODE_ORDER, OPSET_IMPORTS
from op_patches.names import NAMES
from op_patches.proof import Prover
from op_patches.report import LoweringReport, RuleReport
from op_patches.rewriter import Rule, copy_model
from op_patches.targets import Target
from runtime.errors import PatchError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """One or more rules at one place in the order. Several rules repeat until none of them finds anything."""

    rules: tuple[Rule, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may ask for beyond the target."""

    matmul: str = "keep"  # or "conv1x1"

    def __post_init__(self) -> None:
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
        Step((GELU,), "operators younger than opset 17 become primitives before the opset is lowered"),
        Step((LAYER_NORM,), _LAYER_NORM_WHY),
        Step((GELU_PATTERN,), "after Gelu, whose products it must find in their final form"),
        Step((GEMM, MATMUL), "Gemm makes MatMul"),
    ]
    if options.matmul == "conv1x1":
        steps.append(Step((MATMUL_CONV1X1,), "after every rule that makes a MatMul"))
    steps += [
        Step((OPSET_IMPORTS,), "last: a domain can go when the last of its nodes is gone"),
    ]
    return tuple(steps)


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
    patched = copy_model(model)
    if input_shapes:
        bind_shapes(patched, input_shapes)
    interface = _interface(patched)
    num_nodes = count_nodes(patched)
    prover = Prover()
    reports: list[RuleReport] = []
    for step in steps_for(target, options):
        reports.extend(_run_step(step, patched, target, prover))
    if _interface(patched) != interface:
        raise PatchError("the lowerings changed the interface of the graph; this is a bug: do not use the result")
    check_model(patched)
    return patched, LoweringReport(str(target), tuple(reports), num_nodes, count_nodes(patched))


def _run_step(step: Step, model: ModelProto, target: Target, prover: Prover) -> list[RuleReport]:
    """Run the rules of a step once, and again while there are several and one of them found something."""
    merged = {rule.name: RuleReport(rule.name, (), ()) for rule in step.rules}
    again = True
    while again:
        again = False
        for rule in step.rules:
            report = rule.run(model, target, prover)
            log.info("%s: %d", rule.name, report.count)
            again = again or (report.count > 0 and len(step.rules) > 1)
            merged[rule.name] = RuleReport(rule.name, merged[rule.name].lowered + report.lowered, report.refused)
    return list(merged.values())


def count_nodes(model: ModelProto) -> int:
    """Nodes of the graph and of every branch in it."""
    return sum(len(g.node) for g in all_graphs(model.graph))


def _interface(model: ModelProto) -> list[bytes]:
    return [i.SerializeToString(deterministic=True) for i in (*model.graph.input, *model.graph.output)]


def check_model(model: ModelProto) -> None:
    """Full ONNX checker with strict shape inference; tensors without their data stand in as graph inputs."""
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
        raise PatchError(f"the patched graph does not pass the ONNX checker: {error}") from error
