"""The opset of the model -> 17, the youngest that every CANN release of the tables parses without surprises.

    19 and later   the parser refuses every operator (it stops at 18)
    18             parses, but up to CANN 9.1 ReduceMean and its relatives lose their axes, which became an input
    8 … 12         converted up by onnx.version_converter: axes were attributes, Softmax flattened
    7 and before   refused

Going down, an operator may stay as it is when the operator of opset 17 takes the same attributes and types. Those that
changed their form are rewritten, each with a proof: axes inputs of the Reduce family and of Pad, num_outputs of Split,
attributes that hold their default. All nodes go or none: an operator that opset 17 cannot express keeps the old opset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper

from op_patches.graph_view import GraphView, all_graphs, attributes, input_name, is_external, model_opsets
from op_patches.proof import ProofFailed, Prover, Site
from op_patches.report import LoweredNode, RefusedNode, RuleReport, SiteProof
from op_patches.rewriter import Builder, Namer, Refusal, Run, node_label

OPSET = 17
_OLDEST = 8
_AXES_INPUT = 13  # from here on Squeeze, Unsqueeze and ReduceSum take axes as an input, which the rules write
_REDUCES = tuple(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)


class _Opset:
    name = "opset"

    def run(self, run: Run) -> RuleReport:
        opsets = model_opsets(run.model)
        version = opsets.get("")
        if version is None or _AXES_INPUT <= version <= OPSET:
            return RuleReport(self.name, (), ())
        report = _raise(run.model, version) if version < _AXES_INPUT else _lower(run, version)
        if report.count:
            run.model_changed()
        return report


def _raise(model: ModelProto, version: int) -> RuleReport:
    """Opset 8 … 12 -> 17 by ONNX's converter."""
    reason = f"opset {version} is older than {_OLDEST}, the first that the parser knows"
    outside = any(is_external(t) for g in all_graphs(model.graph) for t in g.initializer)
    if outside:
        reason = f"opset {version} with weights outside the file, which onnx.version_converter does not take"
    if version < _OLDEST or outside:
        return RuleReport("opset", (), (RefusedNode("opset_import", f"{reason}: export at opset {OPSET}"),))
    try:
        converted = onnx.version_converter.convert_version(model, OPSET)
    except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as error:
        reason = f"onnx.version_converter: {str(error).splitlines()[0][:160]}"
        return RuleReport("opset", (), (RefusedNode("opset_import", reason),))
    if [i.type for i in converted.graph.input] != [i.type for i in model.graph.input]:
        reason = "onnx.version_converter changes the interface of the graph"
        return RuleReport("opset", (), (RefusedNode("opset_import", f"{reason}: export at opset {OPSET}"),))
    model.graph.CopyFrom(converted.graph)
    del model.opset_import[:]
    model.opset_import.extend(converted.opset_import)
    model.ir_version = max(model.ir_version, converted.ir_version)
    return RuleReport("opset", (LoweredNode("opset_import", "model", f"{version} -> {OPSET}", None),), ())


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of one node at opset 17: itself where there is no builder."""

    node: NodeProto
    builder: Builder | None = None
    proof: SiteProof | None = None

    @property
    def nodes(self) -> list[NodeProto]:
        return self.builder.nodes if self.builder else [self.node]


def _lower(run: Run, version: int) -> RuleReport:
    """All nodes of all graphs, or none."""
    namer = Namer(run.model)
    plans = [(view, [_plan(node, view, namer, run.prover) for node in view.nodes]) for view in run.views()]
    refused = tuple(p for _, found in plans for p in found if isinstance(p, RefusedNode))
    if refused:
        return RuleReport("opset", (), refused)
    change = f"opset {version} -> {OPSET}"
    lowered = [LoweredNode("opset_import", "model", change, None)]
    for view, found in plans:
        steps = [p for p in found if isinstance(p, _Plan)]
        del view.proto.node[:]
        view.proto.node.extend(node for step in steps for node in step.nodes)
        for step in steps:
            if step.builder:
                view.add_constants(step.builder.constants)
                lowered.append(LoweredNode(node_label(step.node), step.node.op_type, change, step.proof))
    for entry in run.model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = OPSET
    return RuleReport("opset", tuple(lowered), ())


def _plan(node: NodeProto, view: GraphView, namer: Namer, prover: Prover) -> _Plan | RefusedNode:
    if node.domain not in ("", "ai.onnx"):
        return _Plan(node)
    new = Builder("opset", node, view, namer, opset=OPSET)
    changed = _translate(node, view, new)
    if isinstance(changed, Refusal):
        return RefusedNode(node_label(node), changed.reason)
    if not changed:
        return _Plan(node)
    opsets = {**view.opsets, "": OPSET}
    try:
        return _Plan(node, new, prover.prove(Site(view, (node,), new.nodes, new.constants, opsets)))
    except ProofFailed as failure:
        return RefusedNode(node_label(node), f"proof: {failure}")


def _translate(node: NodeProto, view: GraphView, new: Builder) -> bool | Refusal:
    """Write the node for opset 17 into the builder; False when it can stay."""
    now = _schema(node.op_type, view.opset)
    if now is None:
        return Refusal(f"{node.op_type} is no operator of opset {view.opset}")
    if now.since_version <= OPSET:
        return False
    old = _schema(node.op_type, OPSET)
    problem = _types_problem(node, view, old) if old is not None else ""
    if problem:
        return Refusal(f"{node.op_type} at opset {OPSET}: {problem}")
    if node.op_type in _REDUCES:
        translate = _reduce
    elif node.op_type == "Split" and not input_name(node, 1):
        translate = _split
    elif node.op_type == "Pad" and input_name(node, 3):
        translate = _pad
    else:
        translate = _trim
    return translate(node, view, new)


def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    return onnx.defs.get_schema(op_type, opset, "") if onnx.defs.has(op_type, opset, "") else None


def _reduce(node: NodeProto, view: GraphView, new: Builder) -> bool | Refusal:
    attrs = attributes(node)
    noop = attrs.pop("noop_with_empty_axes", 0)
    name = input_name(node, 1)
    axes = view.constant(name)
    if name and axes is None:
        return Refusal(f"the axes {name} are computed at run time")
    if axes is not None and axes.size:
        attrs["axes"] = axes.tolist()
    elif noop:
        if node.op_type not in ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"):
            return Refusal("noop_with_empty_axes: no axes, and the operator still maps every element")
        new.op("Identity", node.input[0], out=node.output[0])
        return True
    new.op(node.op_type, node.input[0], out=node.output[0], **attrs)
    return True


def _split(node: NodeProto, view: GraphView, new: Builder) -> bool | Refusal:
    """num_outputs: equal parts, the last one smaller when they do not divide."""
    x, attrs = node.input[0], attributes(node)
    shape = view.shape(x)
    size = shape[attrs.get("axis", 0)] if shape else None
    if not isinstance(size, int):
        return Refusal("the split axis is open, so it is not known that the parts are equal: bind the input shapes")
    count = len(node.output)
    part = -(-size // count)
    sizes = [part] * (count - 1) + [size - part * (count - 1)]
    if sizes[-1] < 1:
        return Refusal(f"{count} parts of {size} elements: one would be empty")
    axis = {"axis": attrs.get("axis", 0)}
    new.ops("Split", [x] if sizes[-1] == part else [x, new.const(sizes, hint="sizes")], list(node.output), **axis)
    return True


def _pad(node: NodeProto, view: GraphView, new: Builder) -> bool | Refusal:
    """axes: pads of the axes that are not listed are zero."""
    pads, axes, rank = view.constant(node.input[1]), view.constant(node.input[3]), view.rank(node.input[0])
    if pads is None or axes is None or rank is None:
        return Refusal("pads or axes are computed at run time, or the rank is unknown")
    if attributes(node).get("mode", b"constant") == b"wrap":
        return Refusal("mode wrap is younger than opset 17")
    full = np.zeros((2, rank), dtype=np.int64)
    full[:, axes] = pads.reshape(2, -1)
    value = [node.input[2]] if input_name(node, 2) else []
    new.op("Pad", node.input[0], new.const(full.ravel(), hint="pads"), *value, out=node.output[0], **attributes(node))
    return True


def _trim(node: NodeProto, view: GraphView, new: Builder) -> bool | Refusal:
    """Drop attributes that opset 17 lacks when they say nothing; refuse what it cannot say."""
    old, now = _schema(node.op_type, OPSET), _schema(node.op_type, view.opset)
    if old is None or now is None:
        return Refusal(f"{node.op_type} is younger than opset {OPSET}, and no lowering took it")
    problem = _inputs_problem(node, view, old) or _attributes_problem(node, old, now)
    if problem:
        return Refusal(f"{node.op_type} at opset {OPSET}: {problem}")
    attrs = attributes(node)
    kept: Mapping[str, Any] = {k: v for k, v in attrs.items() if k in old.attributes}
    if len(kept) == len(attrs):
        return False
    new.ops(node.op_type, list(node.input), list(node.output), **kept)
    return True


def _inputs_problem(node: NodeProto, view: GraphView, old: onnx.defs.OpSchema) -> str:
    given = len([n for n in node.input if n])
    if not old.min_input <= len(node.input) <= old.max_input or given < old.min_input:
        return f"{given} inputs, expected {old.min_input} to {old.max_input}"
    return ""


def _types_problem(node: NodeProto, view: GraphView, old: onnx.defs.OpSchema) -> str:
    for name, formal in zip(node.input, _formals(old.inputs, len(node.input)), strict=True):
        kind = view.type_of(name) if name else None
        if kind is not None and _type_string(kind.elem) not in formal.types:
            return f"{kind.dtype} is no type of {name}"
    return ""


def _attributes_problem(node: NodeProto, old: onnx.defs.OpSchema, now: onnx.defs.OpSchema) -> str:
    attrs = attributes(node)
    for key, value in attrs.items():
        # saturate and round_mode are about float8 alone, which no type list of opset 17 holds
        if key not in old.attributes and key not in ("saturate", "round_mode") and value != _default(now, key):
            return f"attribute {key}={value} is younger"
    mode = attrs.get("mode", b"")
    if node.op_type in ("Pad", "GridSample") and mode in (b"wrap", b"linear", b"cubic"):
        return f"mode {mode.decode()} is younger"
    if node.op_type.endswith("Pool") and attrs.get("ceil_mode"):
        return "ceil_mode counted the last window differently before opset 22"
    return ""


def _formals(parameters: Any, count: int) -> list[Any]:
    """The formal parameters of `count` inputs; the last one repeats when it is variadic."""
    return [parameters[min(i, len(parameters) - 1)] for i in range(count)]


def _default(schema: onnx.defs.OpSchema, key: str) -> Any:
    proto = schema.attributes[key].default_value
    return helper.get_attribute_value(proto) if proto.type else None


def _type_string(elem: int) -> str:
    name = onnx.TensorProto.DataType.Name(elem).lower()
    return f"tensor({name})"


OPSET_17 = _Opset()
