"""Names that CANN's parser takes: every node has one, no two are equal, none holds a separator, no output is "".

    empty node name          CANN calls it <op_type>_<index>, which may collide (E13009) -> named here
    duplicate node name      E13009; names of graph inputs and initializers count, they become nodes too
    ':' ';' ' ' in a name    --input_shape and --out_nodes split on them -> '_'
    "" among the outputs     a spurious edge "" is made (ATC_ONNX_ACCEPTANCE.md, section 4) -> dropped or named

Names of graph inputs and outputs are the interface and stay; an odd one is refused, since only the exporter may change
it. Nothing is computed here, so there is nothing to measure.
"""

from __future__ import annotations

import re

from onnx import GraphProto

from op_patches.graph_view import all_graphs, subgraphs
from op_patches.report import LoweredNode, RefusedNode, RuleReport
from op_patches.rewriter import Run

_ODD = re.compile(r"[:;,\s\"'\\]")


class _Names:
    name = "names"

    def run(self, run: Run) -> RuleReport:
        model = run.model
        graphs = list(all_graphs(model.graph))
        lowered = [*_rename_values(graphs), *_name_nodes(graphs), *_fill_outputs(graphs)]
        if lowered:
            run.model_changed()
        refused = tuple(
            RefusedNode(info.name, "an interface name that --input_shape cannot hold; rename it in the exporter")
            for info in (*model.graph.input, *model.graph.output)
            if _ODD.search(info.name)
        )
        return RuleReport(self.name, tuple(lowered), refused)


def _rename_values(graphs: list[GraphProto]) -> list[LoweredNode]:
    """Values inside the graph whose names hold separators."""
    interface = {i.name for i in (*graphs[0].input, *graphs[0].output)}
    values = dict.fromkeys(
        name
        for g in graphs
        for name in (
            *(t.name for t in g.initializer),
            *(i.name for i in (*g.input, *g.output)),
            *(o for n in g.node for o in n.output),
        )
    )
    taken = set(values)
    renamed: dict[str, str] = {}
    for name in values:
        if name in interface or not _ODD.search(name):
            continue
        renamed[name] = _unique(_ODD.sub("_", name), taken)
    if renamed:
        _replace(graphs[0], renamed)
    return [LoweredNode(old, "value", f"renamed to {new}", None) for old, new in renamed.items()]


def _replace(graph: GraphProto, renamed: dict[str, str]) -> None:
    for item in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
        item.name = renamed.get(item.name, item.name)
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name in renamed:
                    names[index] = renamed[name]
        for inner in subgraphs(node):
            _replace(inner, renamed)


def _name_nodes(graphs: list[GraphProto]) -> list[LoweredNode]:
    """Unique node names over all graphs, apart from inputs and initializers."""
    lowered: list[LoweredNode] = []
    taken = {i.name for g in graphs for i in (*g.input, *g.initializer)}
    wanted = {n.name for g in graphs for n in g.node}
    for graph in graphs:
        for index, node in enumerate(graph.node):
            old = node.name
            wish = (
                _ODD.sub("_", old) or f"{node.op_type}_{index}_{_ODD.sub('_', next((o for o in node.output if o), ''))}"
            )
            if old == wish and old not in taken:
                taken.add(old)
                continue
            node.name = _unique(wish, taken | (wanted - {wish}))
            taken.add(node.name)
            lowered.append(LoweredNode(node.name, node.op_type, f"was {old!r}", None))
    return lowered


def _fill_outputs(graphs: list[GraphProto]) -> list[LoweredNode]:
    """Trailing "" outputs go; one between others gets a name that nothing reads."""
    lowered: list[LoweredNode] = []
    taken = {o for g in graphs for n in g.node for o in n.output}
    for graph in graphs:
        for node in graph.node:
            if "" not in node.output:
                continue
            outputs = list(node.output)
            while outputs and not outputs[-1]:
                outputs.pop()
            outputs = [o or _unique(f"{node.name}_unused", taken) for o in outputs]
            del node.output[:]
            node.output.extend(outputs)
            lowered.append(LoweredNode(node.name, node.op_type, "empty output name", None))
    return lowered


def _unique(wish: str, taken: set[str]) -> str:
    name, number = wish, 2
    while name in taken:
        name, number = f"{wish}_{number}", number + 1
    taken.add(name)
    return name


NAMES = _Names()
