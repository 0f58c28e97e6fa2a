"""What the parser accepts and yet loses: empty constants, vanished outputs, unconnected inputs, ignored attributes.

ATC prints nothing, or an E18888 beside its success line, and the .om computes something else. A loss that does not
change the result (empty axes that mean "all axes" anyway) is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes, input_name, subgraphs
from op_patches.readiness.parser import GE_SOURCE, node_names
from op_patches.readiness.report import Finding, Severity
from op_patches.readiness.views import TypedGraph, reads, topological
from op_patches.targets import Certainty, Release, Target

_PLUGINS = "the operator's ONNX plugin (data/onnx_ops.json)"
_ZERO_INPUT_NODES_FIXED = Release.parse("9.2.0-beta.2")
# The release whose plugin reads the axes input of opset 18; ReduceSum always did (with its own input since 13).
_REDUCE_AXES_FIXED = {
    "ReduceMean": Release.parse("9.2.0-beta.2"),
    **dict.fromkeys(
        ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp", "ReduceLogSum", "ReduceSumSquare"),
        Release.parse("9.1.0"),
    ),
}
_REDUCE_INFERRED = ("ReduceLogSum", "ReduceSumSquare")  # not named in the plugin notes; same form as the others
_SCATTER_REDUCTION_FIXED = Release.parse("9.1.0")
_SCATTER_ND_REDUCTION_FIXED = Release.parse("9.2.0-beta.2")


def silent_losses(typed: TypedGraph, target: Target) -> Iterator[Finding]:
    """Yield every silent loss, graph by graph, in node order."""
    for view in typed.views:
        produced = _visible_names(view)
        for node, name in zip(view.nodes, node_names(view.proto), strict=True):
            yield from _unconnected(node, name, view, produced, typed)
            yield from _empty_outputs(node, name, view)
            yield from _without_inputs(node, name, target)
            rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            if rule is not None:
                yield from rule(node, name, view, target)
        yield from _initializers(view)
    yield from _vanished_outputs(typed.root)


def _visible_names(view: GraphView) -> set[str]:
    """The names a node of this graph may read: its own values, and those of the graph directly around it.

    Values from further out are not connected by the parser (see `_unconnected`).
    """
    names = _own_names(view)
    if view.parent is not None:
        names |= _own_names(view.parent)
    return names


def _own_names(view: GraphView) -> set[str]:
    names = {name for node in view.nodes for name in node.output if name}
    names |= {info.name for info in view.proto.input}
    return names | {tensor.name for tensor in view.proto.initializer}


def _unconnected(
    node: NodeProto, name: str, view: GraphView, produced: set[str], typed: TypedGraph
) -> Iterator[Finding]:
    for value in dict.fromkeys(node.input):
        if not value or value in produced:
            continue
        outer = view.parent.parent if view.parent else None
        while outer is not None and value not in _own_names(outer):
            outer = outer.parent
        if outer is None:
            yield _loss(
                "silent.unconnected-input",
                name,
                node.op_type,
                f"input {value} is produced by nothing: the parser leaves it unconnected",
                "correct the name, or produce the tensor",
            )
        elif not _read_between(view, value, typed):
            yield _loss(
                "silent.nested-capture",
                name,
                node.op_type,
                f"input {value} comes from outside the outer If, which does not read it itself: it stays unconnected",
                "read the tensor in the branch of the outer If as well (Identity), or flatten the nesting",
            )


def _read_between(view: GraphView, value: str, typed: TypedGraph) -> bool:
    """Whether every If between the reader and the owner of `value` captures it.

    An If captures what a node of either branch reads directly, and hands it to both branches.
    """
    between = view.parent
    while between is not None and between.parent is not None and value not in _own_names(between):
        branches = subgraphs(typed.branch_of[id(between)])
        if not any(value in inner.input for branch in branches for inner in branch.node):
            return False
        between = between.parent
    return True


def _empty_outputs(node: NodeProto, name: str, view: GraphView) -> Iterator[Finding]:
    if not any(output == "" for output in node.output):
        return
    readers = any("" in other.input for other in view.nodes)
    yield _loss(
        "silent.empty-output-name",
        name,
        node.op_type,
        "an output named '' is joined to every input left out as ''" if readers else "an output is named ''",
        "drop trailing empty outputs, or name them",
        lowering="names",
        severity=Severity.WRONG if readers else Severity.NOTE,
        code="E18888" if readers else "",
    )


def _without_inputs(node: NodeProto, name: str, target: Target) -> Iterator[Finding]:
    if node.op_type == "Constant" or any(reads(node)) or target.release >= _ZERO_INPUT_NODES_FIXED:
        return
    yield _loss(
        "silent.node-without-inputs",
        name,
        node.op_type,
        "a node without inputs is dropped from the graph",
        "feed its result as a graph input, or make it a constant",
        certainty=Certainty.SOURCE,
    )


def _initializers(view: GraphView) -> Iterator[Finding]:
    used = {name for node in view.nodes for name in reads(node)}
    for tensor in view.proto.initializer:
        if 0 in tensor.dims and tensor.name in used:
            yield _loss(
                "silent.empty-constant",
                tensor.name,
                "initializer",
                f"constant of shape {list(tensor.dims)} holds no data; an operator reading it may fail or misread it",
                "leave the input out, or write the operator without it",
                severity=Severity.NOTE,
            )
    for sparse in view.proto.sparse_initializer:
        yield _loss(
            "silent.sparse-initializer",
            sparse.values.name,
            "initializer",
            "sparse_initializer is ignored: its readers stay unconnected",
            "store the tensor densely",
            lowering="sparse_initializer",
            certainty=Certainty.SOURCE,
        )


def _vanished_outputs(root: GraphView) -> Iterator[Finding]:
    """Graph outputs that no graph input reaches: the parser keeps only what hangs on an input."""
    initializers = {tensor.name for tensor in root.proto.initializer}
    alive = {info.name for info in root.proto.input if info.name not in initializers}
    for node in topological(root.nodes):
        if any(name in alive for name in reads(node)):
            alive |= {name for name in node.output if name}
    for info in root.proto.output:
        if info.name not in alive:
            yield _loss(
                "silent.vanished-output",
                info.name,
                "graph output",
                f"output {info.name} depends on no graph input: it silently vanishes from the outputs",
                "remove the output and keep the value on the host, or make it depend on an input",
            )


def _constant(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    forms = [attribute.name for attribute in node.attribute if attribute.name != "value"]
    if not any(attribute.name == "value" for attribute in node.attribute):
        yield _loss(
            "silent.empty-constant",
            name,
            node.op_type,
            f"Const {name} is empty: the parser reads only the attribute value, not {', '.join(forms) or 'nothing'}",
            "store the number as the tensor attribute value",
            lowering="constant",
        )


def _reduce(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    attrs = attributes(node)
    axes_input = input_name(node, 1)
    keeps_all = bool(attrs.get("noop_with_empty_axes", 0))
    is_sum = node.op_type == "ReduceSum"
    fixed = _REDUCE_AXES_FIXED.get(node.op_type)
    if fixed is not None and view.opset >= 18 and axes_input and target.release < fixed:
        yield _loss(
            "silent.reduce-axes-input",
            name,
            node.op_type,
            "the axes input of opset 18 is not read: axes are empty and everything is reduced",
            "export at opset 17, where axes are an attribute",
            lowering="opset",
            code="E18888",
            certainty=Certainty.INFERRED if node.op_type in _REDUCE_INFERRED else Certainty.PARSER,
        )
    elif axes_input or attrs.get("axes"):
        return
    elif keeps_all and view.opset >= 13:
        yield _loss(
            "silent.noop-with-empty-axes",
            name,
            node.op_type,
            "noop_with_empty_axes=1 is ignored: everything is reduced instead of nothing",
            "replace the node by Identity",
            lowering="reduce_noop" if is_sum else "opset",
            certainty=Certainty.SOURCE,
        )
    else:
        yield _loss(
            "silent.empty-axes",
            name,
            node.op_type,
            "axes become an empty constant, which reduces everything, as the node means",
            "write the axes if the kernel complains",
            severity=Severity.NOTE,
        )


def _resize(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    attrs = attributes(node)
    missing = [what for what, index in (("roi", 1), ("scales", 2)) if not input_name(node, index)]
    if input_name(node, 2) and view.opset >= 11 and "roi" not in missing and _is_empty(view, input_name(node, 1)):
        missing.append("roi")
    # The plugin builds these inputs itself for every mode but nearest.
    if missing and view.opset >= 11 and attrs.get("mode", b"nearest") != b"nearest":
        yield _loss(
            "silent.empty-constant",
            name,
            node.op_type,
            f"{' and '.join(missing)} become an empty constant, as the node means",
            "nothing, unless the kernel complains",
            severity=Severity.NOTE,
        )
    ignored = [
        a for a in ("antialias", "axes", "keep_aspect_ratio_policy") if attrs.get(a) not in (None, 0, b"stretch")
    ]
    if ignored:
        yield _ignored(node, name, ", ".join(ignored), "do the resizing with explicit sizes for all axes")


def _is_empty(view: GraphView, value: str) -> bool:
    shape = view.shape(value)
    return shape is not None and 0 in shape


def _shape(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    attrs = attributes(node)
    rank = view.rank(input_name(node, 0))
    start, end = int(attrs.get("start", 0)), attrs.get("end")
    whole = (start == 0 or (rank is not None and start <= -rank)) and (
        end is None or (rank is not None and end >= rank)
    )
    if not whole:
        yield _ignored(node, name, "start/end", "take the whole Shape and Slice it", lowering="shape_slice")


def _scatter(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    fixed = _SCATTER_ND_REDUCTION_FIXED if node.op_type == "ScatterND" else _SCATTER_REDUCTION_FIXED
    if attributes(node).get("reduction", b"none") != b"none" and target.release < fixed:
        yield _ignored(node, name, "reduction", "scatter into zeros and Add, or compute a mask", lowering="scatter")


def _mod(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    if attributes(node).get("fmod", 0):
        yield _ignored(node, name, "fmod", "write it as x - y * trunc(x / y)")


def _softmax(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    axis = int(attributes(node).get("axis", 1))
    rank = view.rank(input_name(node, 0))
    if view.opset >= 13 or rank is None or axis in (-1, rank - 1):
        return
    yield _loss(
        "silent.softmax-axis",
        name,
        node.op_type,
        f"opset {view.opset} flattens from axis {axis} on; the plugin works on that single axis",
        "export at opset 13 or later",
        certainty=Certainty.SOURCE,
        source=_PLUGINS,
    )


def _pad(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    if view.opset >= 18 and input_name(node, 3):
        yield _ignored(node, name, "the axes input", "write pads for every axis", lowering="opset")


def _dropout(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    """GE Dropout has one input: ratio and training_mode are cut off."""
    if not any(node.input[1:]):
        return
    training = view.constant(input_name(node, 2))
    off = not input_name(node, 2) or (training is not None and not training.any())
    yield _loss(
        "silent.dropout-inputs",
        name,
        node.op_type,
        "ratio and training_mode are not connected",
        "export in eval mode, so that no Dropout is left",
        lowering="dropout" if off else None,
        severity=Severity.NOTE if off else Severity.WRONG,
        code="E18888",
    )


def _ignored(node: NodeProto, name: str, what: str, fix: str, lowering: str | None = None) -> Finding:
    return _loss(
        "silent.ignored-attribute",
        name,
        node.op_type,
        f"{what} of {node.op_type} is ignored",
        fix,
        lowering=lowering,
        certainty=Certainty.SOURCE,
        source=_PLUGINS,
    )


def _loss(
    rule: str,
    node: str,
    op_type: str,
    message: str,
    fix: str,
    *,
    lowering: str | None = None,
    severity: Severity = Severity.WRONG,
    certainty: Certainty = Certainty.PARSER,
    source: str = GE_SOURCE,
    code: str = "",
) -> Finding:
    return Finding(severity, rule, node, op_type, message, fix, source, certainty, code, lowering)


_RULES: dict[str, Callable[[NodeProto, str, GraphView, Target], Iterator[Finding]]] = {
    "Constant": _constant,
    "Dropout": _dropout,
    "Mod": _mod,
    "Pad": _pad,
    "Resize": _resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Shape": _shape,
    "Softmax": _softmax,
    **dict.fromkeys(("ReduceSum", *_REDUCE_AXES_FIXED), _reduce),
}
