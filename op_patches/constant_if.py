"""If with a constant condition -> the nodes of the branch that runs.

Exporters write such an If around an optional axis; folding shapes makes its condition a constant. ATC takes a constant
If as well (CondRemovePass), but every other rule and the readiness report see more without it. Nothing is computed
differently: names inside the branch become unique, and an Identity carries each result to the name outside.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, NodeProto, helper

from op_patches.graph_view import all_graphs, attributes, subgraphs
from op_patches.report import LoweredNode, RuleReport
from op_patches.rewriter import Namer, Run, node_label


class _ConstantIf:
    """Model rule: branches have initializers of their own, which a node rule could not move."""

    name = "constant_if"

    def run(self, run: Run) -> RuleReport:
        if not any(node.op_type == "If" for graph in all_graphs(run.model.graph) for node in graph.node):
            return RuleReport(self.name, (), ())
        for view in run.views():
            for index, node in enumerate(view.nodes):
                condition = view.constant(node.input[0]) if node.op_type == "If" else None
                if condition is None or condition.size != 1:
                    continue
                taken = "then_branch" if bool(np.ravel(condition)[0]) else "else_branch"
                nodes = _inlined(node, attributes(node)[taken], view.proto, Namer(run.model))
                done = LoweredNode(node_label(node), "If", f"{taken} inlined", None)
                kept = [*view.nodes[:index], *nodes, *view.nodes[index + 1 :]]
                del view.proto.node[:]
                view.proto.node.extend(kept)
                run.model_changed()
                return RuleReport(self.name, (done, *self.run(run).lowered), ())
        return RuleReport(self.name, (), ())


def _inlined(node: NodeProto, branch: GraphProto, around: GraphProto, namer: Namer) -> list[NodeProto]:
    """The nodes of a branch under names that are free, and its constants moved to the graph around."""
    inner = [t.name for t in branch.initializer] + [o for n in branch.node for o in n.output if o]
    renamed = {name: namer.fresh(f"{node_label(node)}/{name}") for name in inner}
    for tensor in branch.initializer:
        moved = around.initializer.add()
        moved.CopyFrom(tensor)
        moved.name = renamed[tensor.name]
    nodes: list[NodeProto] = []
    for old in branch.node:
        new = NodeProto()
        new.CopyFrom(old)
        _rename(new, renamed)
        new.output[:] = [renamed.get(o, o) for o in old.output]
        new.name = namer.fresh(f"{node_label(node)}/{old.name or old.op_type}")
        nodes.append(new)
    for value, out in zip(branch.output, node.output, strict=False):
        if out:
            source = renamed.get(value.name, value.name)
            nodes.append(
                helper.make_node("Identity", [source], [out], name=namer.fresh(f"{node_label(node)}/Identity"))
            )
    return nodes


def _rename(node: NodeProto, renamed: Mapping[str, str]) -> None:
    """Read the new names, also in graphs nested in the node."""
    node.input[:] = [renamed.get(name, name) for name in node.input]
    for graph in subgraphs(node):
        for inner in graph.node:
            _rename(inner, renamed)
        for output in graph.output:
            output.name = renamed.get(output.name, output.name)


CONSTANT_IF = _ConstantIf()
