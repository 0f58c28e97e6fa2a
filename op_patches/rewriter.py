"""The lowering engine: one node (or one matched group) in, an equal subgraph out, or a refusal with a reason.

A lowering is one function, `lower(node, graph, new)`. It looks at a node (match), asks the graph what it must know
(check), and describes the replacement with the builder (rewrite); what the check finds lives in local variables, so
nothing can be left over between the two. It returns

    None      not my node
    Refusal   my node, but I cannot prove that a replacement is equal; the reason goes into the report
    Rewrite   the builder holds the replacement

The engine proves each replacement (op_patches.proof) before it enters the graph; a failed proof becomes a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from op_patches.graph_view import (
    STANDARD_OPSET,
    Array,
    GraphView,
    all_graphs,
    model_opsets,
    subgraphs,
    used_names,
    views,
)
from op_patches.proof import ProofFailed, Prover, Site
from op_patches.report import LoweredNode, RefusedNode, RuleReport, SiteProof
from op_patches.targets import Target
from runtime.errors import PatchError

_MAX_PASSES = 100  # a pass that changes nothing ends the loop long before


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a lowering leaves a node alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What accompanies the nodes in the builder."""

    detail: str = ""  # for the report: which form was taken and why
    group: tuple[NodeProto, ...] = ()  # matched nodes besides the root; each goes once nothing reads it any more
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of integer inputs, proven by the check
    observer: tuple[NodeProto, ...] = ()  # the proof compares what these make of the result (see finite_masks)


LowerFunction = Callable[[NodeProto, GraphView, "Builder"], "Rewrite | Refusal | None"]


class Run:
    """One run of lowerings over one model: the model that changes, the target, and what is known in between."""

    def __init__(self, model: ModelProto, target: Target) -> None:
        self.model = model
        self.target = target
        self.prover = Prover()
        self._views: list[GraphView] | None = None

    def views(self) -> list[GraphView]:
        """Views with inferred types, kept until the model changes."""
        if self._views is None:
            self._views = views(self.model, self.target)
        return self._views

    def model_changed(self) -> None:
        """Forget the views; a model of foreign operators alone now has standard ones and imports their opset."""
        self._views = None
        nodes = (n for g in all_graphs(self.model.graph) for n in g.node)
        if "" not in model_opsets(self.model) and any(n.domain in ("", "ai.onnx") for n in nodes):
            self.model.opset_import.append(helper.make_opsetid("", STANDARD_OPSET))


class Rule(Protocol):
    """One entry of the pipeline: changes the model of the run in place and says what it did."""

    @property
    def name(self) -> str: ...

    def run(self, run: Run) -> RuleReport: ...


@dataclass(frozen=True, slots=True)
class Lowering:
    """A node rule: its name, the operators it looks at (none: all of them), and the function."""

    name: str
    op_types: tuple[str, ...]
    lower: LowerFunction

    def run(self, run: Run) -> RuleReport:
        """Lower until nothing more matches; new nodes are seen by the next pass, with inferred types."""
        lowered: list[LoweredNode] = []
        for _ in range(_MAX_PASSES):
            refused: list[RefusedNode] = []
            namer = Namer(run.model)
            changes = 0
            for view in self._matching_views(run):
                done = self._run_graph(view, namer, run.prover, refused)
                lowered.extend(done)
                changes += len(done)
            if not changes:
                return RuleReport(self.name, tuple(lowered), tuple(refused))
            remove_dead_nodes(run.model)
            run.model_changed()
        raise PatchError(f"lowering {self.name} did not come to an end after {_MAX_PASSES} passes; this is a bug")

    def _looks_at(self, node: NodeProto) -> bool:
        return not self.op_types or node.op_type in self.op_types

    def _matching_views(self, run: Run) -> list[GraphView]:
        if not any(self._looks_at(n) for g in all_graphs(run.model.graph) for n in g.node):
            return []
        return run.views()

    def _run_graph(
        self, view: GraphView, namer: Namer, prover: Prover, refused: list[RefusedNode]
    ) -> list[LoweredNode]:
        """One pass over one graph."""
        lowered: list[LoweredNode] = []
        replaced: dict[int, list[NodeProto]] = {}
        taken: set[str] = set()  # outputs of nodes that this pass already matched
        for index, node in enumerate(view.nodes):
            if not self._looks_at(node) or taken.intersection(node.output):
                continue
            builder = Builder(self.name, node, view, namer)
            result = self.lower(node, view, builder)
            if result is None:
                continue
            if isinstance(result, Rewrite):
                if any(taken.intersection(member.output) for member in result.group):
                    continue  # overlaps a match of this pass; the next pass sees what became of it
                proof = _prove(result, node, view, builder, prover)
            else:
                proof = result
            if isinstance(proof, Refusal):
                refused.append(RefusedNode(node_label(node), proof.reason))
                continue
            assert isinstance(result, Rewrite)
            replaced[index] = builder.nodes
            taken.update(name for member in (*result.group, node) for name in member.output)
            view.add_constants(builder.constants)
            lowered.append(LoweredNode(node_label(node), node.op_type, result.detail, proof))
        if replaced:
            nodes = [new for i, old in enumerate(view.nodes) for new in replaced.get(i, [old])]
            del view.proto.node[:]
            view.proto.node.extend(nodes)
        return lowered


def _prove(rewrite: Rewrite, node: NodeProto, view: GraphView, builder: Builder, prover: Prover) -> SiteProof | Refusal:
    made = {name for new in builder.nodes for name in new.output} | set(builder.constants)
    missing = [name for name in node.output if name and name not in made and view.uses(name)]
    assert not missing, f"{builder.rule} left outputs {missing} of {node_label(node)} without a producer"
    site = Site(
        view, (*rewrite.group, node), builder.nodes, builder.constants, view.opsets, rewrite.ranges, rewrite.observer
    )
    try:
        return prover.prove(site)
    except ProofFailed as failure:
        return Refusal(f"proof: {failure}")


class Namer:
    """Gives names that the model does not use yet."""

    def __init__(self, model: ModelProto) -> None:
        self._model = model
        self._taken: set[str] = set()

    def _collect(self) -> None:
        for graph in all_graphs(self._model.graph):
            self._taken.update(i.name for i in (*graph.input, *graph.output, *graph.initializer))
            for node in graph.node:
                self._taken.update((node.name, *node.output, *node.input))

    def fresh(self, wish: str) -> str:
        if not self._taken:
            self._collect()
        name, number = wish, 2
        while name in self._taken:
            name, number = f"{wish}_{number}", number + 1
        self._taken.add(name)
        return name


class Builder:
    """Collects the replacement of one node. Names read `<node>/<rule>/<operator>`."""

    def __init__(self, rule: str, node: NodeProto, graph: GraphView, namer: Namer, opset: int | None = None) -> None:
        self.rule = rule
        self.opset = opset or graph.opset  # of the nodes that are written
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self._graph = graph
        self._namer = namer
        self._base = f"{node_label(node)}/{rule}"

    def op(self, op_type: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        """Add a node with one output and return the output's name; `out` names it (an output of the old node)."""
        return self.ops(op_type, inputs, (out,), **attributes)[0]

    def ops(self, op_type: str, inputs: Sequence[str], outs: Sequence[str | None], **attributes: Any) -> list[str]:
        """Add a node with several outputs; None asks for a fresh name."""
        name = self._namer.fresh(f"{self._base}/{op_type}")
        outputs = [self._namer.fresh(f"{name}_out") if out is None else out for out in outs]
        self.nodes.append(helper.make_node(op_type, list(inputs), outputs, name=name, **attributes))
        return outputs

    def const(
        self, value: Array | np.generic | float | Sequence[int], like: str | None = None, hint: str = "const"
    ) -> str:
        """Add a constant; `like` gives a value whose element type it takes. Sequences of int become int64."""
        array = np.asarray(value)
        if like is not None:
            kind = self._graph.type_of(like)
            assert kind is not None, f"{self.rule} asks for a constant like {like}, whose type is unknown"
            array = array.astype(helper.tensor_dtype_to_np_dtype(kind.elem))
        elif isinstance(value, int | list | tuple):
            array = array.astype(np.int64)
        name = self._namer.fresh(f"{self._base}/{hint}")
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def fixed(self, out: str, value: Array) -> None:
        """Make an output of the old node a constant."""
        self.constants[out] = numpy_helper.from_array(value, out)

    def cast(self, value: str, elem: int, out: str | None = None) -> str:
        return self.op("Cast", value, out=out, to=elem)

    def reduce(self, op_type: str, value: str, axes: Sequence[int], keepdims: int = 1, out: str | None = None) -> str:
        """A reduction: axes are an attribute up to opset 17 (ReduceSum: 12) and an input after it."""
        if self.opset >= (13 if op_type == "ReduceSum" else 18):
            return self.op(op_type, value, self.const(list(axes), hint="axes"), out=out, keepdims=keepdims)
        return self.op(op_type, value, out=out, axes=list(axes), keepdims=keepdims)

    def unsqueeze(self, value: str, axes: Sequence[int], out: str | None = None) -> str:
        return self.op("Unsqueeze", value, self.const(list(axes), hint="axes"), out=out)

    def squeeze(self, value: str, axes: Sequence[int], out: str | None = None) -> str:
        return self.op("Squeeze", value, self.const(list(axes), hint="axes"), out=out)

    def reshape(self, value: str, shape: Sequence[int], out: str | None = None) -> str:
        return self.op("Reshape", value, self.const(list(shape), hint="shape"), out=out)


def node_label(node: NodeProto) -> str:
    """The node's name, or what identifies it when it has none."""
    return node.name or f"{node.op_type}({next((o for o in node.output if o), '')})"


def remove_dead_nodes(model: ModelProto) -> list[NodeProto]:
    """Remove nodes and initializers whose values nothing reads; return the nodes."""
    removed: list[NodeProto] = []
    for graph in list(all_graphs(model.graph)):
        removed.extend(_remove_dead(graph))
    return removed


def _remove_dead(graph: GraphProto) -> list[NodeProto]:
    live = {o.name for o in graph.output}
    kept: list[NodeProto] = []
    removed: list[NodeProto] = []
    for node in reversed(_sorted_nodes(graph)):
        if live.intersection(o for o in node.output if o):
            kept.append(node)
            live.update(node.input)
            for inner in subgraphs(node):
                live.update(used_names(inner))
        else:
            removed.append(node)
    inputs = {i.name for i in graph.input}
    tensors = [t for t in graph.initializer if t.name in live or t.name in inputs]
    if removed:
        del graph.node[:]
        graph.node.extend(reversed(kept))
    if len(tensors) < len(graph.initializer):
        for index in reversed(range(len(graph.initializer))):
            if graph.initializer[index].name not in live and graph.initializer[index].name not in inputs:
                del graph.initializer[index]
    known = {name for node in graph.node for name in node.output}
    for index in reversed(range(len(graph.value_info))):
        if graph.value_info[index].name not in known:
            del graph.value_info[index]
    return removed


def _sorted_nodes(graph: GraphProto) -> list[NodeProto]:
    """Nodes in an order where producers come first; the file's own order when it already is one."""
    producers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    reads = [{*node.input, *(n for inner in subgraphs(node) for n in used_names(inner))} for node in graph.node]
    before = [{producers[n] for n in names if n in producers} - {i} for i, names in enumerate(reads)]
    if all(max(b, default=-1) < i for i, b in enumerate(before)):
        return list(graph.node)
    order: list[int] = []
    placed: set[int] = set()
    waiting = list(range(len(before)))
    while waiting:
        ready = [i for i in waiting if before[i] <= placed]
        if not ready:
            names = ", ".join(node_label(graph.node[i]) for i in waiting[:5])
            raise PatchError(f"graph {graph.name}: the nodes form a cycle: {names}")
        order.extend(ready)
        placed.update(ready)
        waiting = [i for i in waiting if i not in placed]
    return [graph.node[i] for i in order]


def sort_nodes(model: ModelProto) -> None:
    """Put every graph into topological order, which ATC does not need but every pass here does."""
    for graph in all_graphs(model.graph):
        nodes = _sorted_nodes(graph)
        if nodes != list(graph.node):
            del graph.node[:]
            graph.node.extend(nodes)


def copy_model(model: ModelProto) -> ModelProto:
    """An independent copy; the input of a run is never touched."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
