"""Rules about the model as a whole, none of which changes a number.

local_functions   calls of model.functions -> their bodies; CANN's parser knows no functions (section 3)
node_order        nodes sorted so that producers come first
dead_nodes        nodes that nothing reads are removed: the parser refuses an unknown operator even there
opset_imports     "ai.onnx" -> "", unused domains dropped: a second domain is E16005 up to CANN 9.2.0-beta.1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx
import onnx.inliner
from onnx import ModelProto

from op_patches.graph_view import all_graphs
from op_patches.report import LoweredNode, RefusedNode, RuleReport
from op_patches.rewriter import Run, node_label, remove_dead_nodes, sort_nodes

Change = tuple[list[LoweredNode], list[RefusedNode]]


@dataclass(frozen=True, slots=True)
class ModelRule:
    """A rule that sees the whole model."""

    name: str
    change: Callable[[ModelProto], Change]

    def run(self, run: Run) -> RuleReport:
        lowered, refused = self.change(run.model)
        if lowered:
            run.model_changed()
        return RuleReport(self.name, tuple(lowered), tuple(refused))


def _inline_functions(model: ModelProto) -> Change:
    if not model.functions:
        return [], []
    keys = {(f.domain, f.name) for f in model.functions}
    calls = [n for g in all_graphs(model.graph) for n in g.node if (n.domain, n.op_type) in keys]
    lowered = [LoweredNode(node_label(n), f"{n.domain}.{n.op_type}", "inlined", None) for n in calls]
    inlined = onnx.inliner.inline_local_functions(model)
    model.CopyFrom(inlined)
    del model.functions[:]
    return lowered or [LoweredNode(f.name, "function", "never called", None) for f in inlined.functions], []


def _sort(model: ModelProto) -> Change:
    before = [[node.output[:1] for node in g.node] for g in all_graphs(model.graph)]
    sort_nodes(model)
    after = [[node.output[:1] for node in g.node] for g in all_graphs(model.graph)]
    moved = before != after
    return ([LoweredNode(model.graph.name, "graph", "sorted", None)] if moved else []), []


def _remove_dead(model: ModelProto) -> Change:
    return [LoweredNode(node_label(n), n.op_type, "removed", None) for n in remove_dead_nodes(model)], []


def _imports(model: ModelProto) -> Change:
    used = {n.domain for g in all_graphs(model.graph) for n in g.node}
    lowered: list[LoweredNode] = []
    for graph in all_graphs(model.graph):
        for node in graph.node:
            if node.domain == "ai.onnx":
                node.domain = ""
    used = {"" if d == "ai.onnx" else d for d in used}
    kept: dict[str, int] = {}
    for entry in model.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        if domain in used or (domain == "" and not used - {""}):
            kept[domain] = entry.version
        if domain not in kept or domain != entry.domain:
            lowered.append(LoweredNode(entry.domain or '""', "opset_import", f"version {entry.version}", None))
    if lowered:
        del model.opset_import[:]
        model.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in kept.items())
    refused = [
        RefusedNode(node_label(n), f"domain {n.domain} has no lowering, and ATC knows no operator {n.op_type} in it")
        for g in all_graphs(model.graph)
        for n in g.node
        if n.domain not in ("", "ai.onnx", "npu")
    ]
    return lowered, refused


LOCAL_FUNCTIONS = ModelRule("local_functions", _inline_functions)
NODE_ORDER = ModelRule("node_order", _sort)
DEAD_NODES = ModelRule("dead_nodes", _remove_dead)
OPSET_IMPORTS = ModelRule("opset_imports", _imports)
