"""Put the rules together: one graph, one target, one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import ModelProto

from op_patches.graph_view import skeleton
from op_patches.readiness.cost import closed_plugin_remarks, cost_findings, unknown_kernel_remark
from op_patches.readiness.folding import Folded, folded
from op_patches.readiness.interface import (
    Shapes,
    cycle_findings,
    external_data_findings,
    input_shape_findings,
    name_findings,
    open_axis_findings,
    zero_dim_findings,
)
from op_patches.readiness.kernels import place_all, placement_finding, shape_finding
from op_patches.readiness.loader import load_structure
from op_patches.readiness.padded_past import padded_past_findings
from op_patches.readiness.parser import parser_refusals, resolve_opset
from op_patches.readiness.precision import precision_findings
from op_patches.readiness.report import Finding, ReadinessReport, Severity
from op_patches.readiness.sanitize import sanitize
from op_patches.readiness.silent import silent_losses
from op_patches.readiness.views import TypedGraph, bind_axes, typed_graph
from op_patches.targets import Certainty, Engine, Plugin, Release, Target
from runtime.errors import ReadinessError

FIRST_8_5, LAST_8_5 = Release.parse("8.5.0"), Release.parse("8.5.99")


def check_model(graph: Path | str | ModelProto, target: Target, input_shapes: Shapes | None = None) -> ReadinessReport:
    """Say what ATC will say about a graph: findings in its order, and the engine of every node.

    A path is read without weights, so memory follows the number of nodes. A model in memory is not changed.
    """
    path = None if isinstance(graph, ModelProto) else Path(graph)
    model = skeleton(graph) if isinstance(graph, ModelProto) else load_structure(Path(graph))
    ignored = sanitize(model)
    shapes = input_shapes or {}
    flags = list(input_shape_findings(model, shapes))
    bound = _bound_inputs(model, shapes)
    bind_axes(model, shapes)
    typed = typed_graph(model, target)
    constants = _constants(typed)
    placements, engines, remarks = _placements(model, typed, target, constants)
    findings = [
        *parser_refusals(model, typed.views, target),
        *silent_losses(typed, target),
        *name_findings(typed.root),
        *flags,
        *cycle_findings(typed.views),
        *external_data_findings(model, path, typed.views),
        *zero_dim_findings(typed.views, constants[id(typed.root)].names),
        *placements,
        *precision_findings(typed.views, target, path, constants),
        *padded_past_findings(typed.root, bound),
        *cost_findings(typed.views, constants, target),
        *open_axis_findings(typed.root),
    ]
    return ReadinessReport(
        graph=str(path) if path else model.graph.name or "model",
        target=target,
        findings=tuple(_once(_as_known_for(target, findings))),
        engines=dict(engines),
        num_nodes=sum(engines.values()),
        remarks=(*ignored, *typed.remarks, *remarks),
    )


def check_directory(directory: Path, target: Target, input_shapes: Shapes | None = None) -> list[ReadinessReport]:
    """Check every .onnx file below a directory; each graph takes the input shapes that bear its inputs' names."""
    files = sorted(directory.glob("**/*.onnx"))
    if not files:
        raise ReadinessError(f"{directory}: holds no .onnx file")
    shapes = input_shapes or {}
    inputs = {file: {info.name for info in load_structure(file).graph.input} for file in files}
    unknown = sorted(set(shapes) - set().union(*inputs.values()))
    if unknown:
        raise ReadinessError(f"--input-shape names {', '.join(unknown)}, which no graph in {directory} has as an input")
    return [
        check_model(file, target, {name: shape for name, shape in shapes.items() if name in names})
        for file, names in inputs.items()
    ]


def first_refusal(graph: Path | str | ModelProto, target: Target) -> tuple[str, str] | None:
    """Return the code and text with which the ONNX parser refuses a graph, or None when it parses.

    A crash of the parser has the signal's name as its code ("SIGSEGV").
    """
    model = skeleton(graph) if isinstance(graph, ModelProto) else load_structure(Path(graph))
    sanitize(model)
    typed = typed_graph(model, target)
    finding = next(parser_refusals(model, typed.views, target), None)
    return None if finding is None else (finding.code, finding.message)


def _bound_inputs(model: ModelProto, shapes: Shapes) -> frozenset[str]:
    """Graph inputs with an axis that is open in the file and bound by `shapes`, or fixed in the file already."""
    bound = set()
    for info in model.graph.input:
        tensor: onnx.TypeProto.Tensor = info.type.tensor_type
        sizes = list(shapes.get(info.name, ()))
        dims = list(tensor.shape.dim)
        if dims and all(dim.HasField("dim_value") or (i < len(sizes) and sizes[i] > 0) for i, dim in enumerate(dims)):
            bound.add(info.name)
    return frozenset(bound)


def _constants(typed: TypedGraph) -> dict[int, Folded]:
    constants: dict[int, Folded] = {}
    for view in typed.views:  # outermost first
        constants[id(view)] = folded(view, constants[id(view.parent)] if view.parent else None)
    return constants


def _placements(
    model: ModelProto, typed: TypedGraph, target: Target, constants: dict[int, Folded]
) -> tuple[list[Finding], Counter[Engine], list[str]]:
    plugins: dict[int, Plugin | None] = {}
    used: dict[str, Plugin] = {}
    for view in typed.views:
        for node in view.nodes:
            domain, opset = resolve_opset(model, node)
            plugin = target.plugin(node.op_type, opset, domain) if opset is not None else None
            plugins[id(node)] = plugin
            if plugin is not None:
                used[node.op_type] = plugin
    findings: list[Finding] = []
    engines: Counter[Engine] = Counter()
    unknown: Counter[str] = Counter()
    untyped = 0
    for view, node, name, placement in place_all(typed.views, target, plugins, constants):
        engines[placement.engine] += 1
        untyped += placement.assumed
        if placement.engine is Engine.UNKNOWN:
            unknown[placement.ge_op] += 1
        found = shape_finding(node, name, view)
        if found is None and plugins[id(node)] is not None:
            found = placement_finding(placement, node, name)
        if found is not None:
            findings.append(found)
    remarks = [*closed_plugin_remarks(used), *unknown_kernel_remark(unknown)]
    if untyped:
        remarks.append(f"the element type of {untyped} nodes could not be inferred; float32 is assumed for them")
    return findings, engines, remarks


def _as_known_for(target: Target, findings: list[Finding]) -> Iterator[Finding]:
    """The parser itself was asked at 8.5.0 only: later releases were read, earlier ones are inferred."""
    if FIRST_8_5 <= target.release <= LAST_8_5:
        yield from findings
        return
    certainty = Certainty.SOURCE if target.release > LAST_8_5 else Certainty.INFERRED
    for finding in findings:
        checked = finding.certainty is Certainty.PARSER
        yield replace(finding, certainty=certainty) if checked else finding


def _once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Drop repetitions, keep the order; notes go last."""
    unique = dict.fromkeys(findings)
    yield from (finding for finding in unique if finding.severity is not Severity.NOTE)
    yield from (finding for finding in unique if finding.severity is Severity.NOTE)
