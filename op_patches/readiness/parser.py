"""What the ONNX parser of GE refuses, in the order in which it would.

The parser works in phases, each over all nodes: inputs (E16001), pre-check of every node (E16005, E13009, E13010), the
plugins' own attribute checks in node order (EZ9999), element types of inputs and initializers (E19999), outputs
(E16001). A phase with an error is the last one. Inputs and initializers are nodes too, appended after the real ones.

Read in hicann/ge v8.5.0, parser/parser/onnx, and compared with its verdicts on 1,334 graphs (docs/readiness.md).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from op_patches.graph_view import GraphView
from op_patches.readiness.plugin_rules import plugin_refusal
from op_patches.readiness.report import Finding, Severity
from op_patches.targets import Certainty, Release, Target

GE_SOURCE = "hicann/ge v8.5.0 parser/parser/onnx"

# Element types of onnx.proto that the parser maps: all up to bfloat16, and two of the float8 kinds.
_PARSED_TYPES = {*range(1, 17), TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2}
_OLDEST_CONVERTED = 8  # the opset lowering leaves older models alone
_INT4_SINCE = Release.parse("9.2.0-beta.2")

# What each operator without a plugin could be instead; the lowering that does it, if there is one.
_INSTEAD: Mapping[str, tuple[str, str | None]] = {
    "Gelu": ("write GELU with Erf or Tanh; GE fuses the pattern", "gelu"),
    "LayerNormalization": ("write it with ReduceMean, Sub, Mul, Sqrt and Div", "layer_norm"),
    "RMSNormalization": ("write it with ReduceMean, Mul, Sqrt and Div", "rms_norm"),
    "SimplifiedLayerNormalization": ("write it with ReduceMean, Mul, Sqrt and Div", "rms_norm"),
    "SkipLayerNormalization": ("write it as Add and LayerNormalization", "skip_layer_norm"),
    "RotaryEmbedding": ("write it with Slice, Neg, Concat, Mul and Add", "rotary_embedding"),
    "Attention": ("write it with MatMul, Softmax and MatMul", "function_body"),
    "Swish": ("write it as x * Sigmoid(x)", "function_body"),
    "FusedMatMul": ("write it with Transpose, MatMul and Mul", "fused_matmul"),
    "FusedGemm": ("write it with MatMul, Add and the activation", "fused_matmul"),
    "FusedConv": ("write it with Conv and the activation", "fused_conv"),
    "Loop": ("unroll it, or run the loop on the host", None),
    "Scan": ("unroll it, or run the loop on the host", None),
    "QuantizeLinear": ("export without quantization nodes; quantize with AMCT", None),
    "DequantizeLinear": ("export without quantization nodes; quantize with AMCT", None),
    "DynamicQuantizeLinear": ("export without quantization nodes; quantize with AMCT", None),
}


def node_names(graph: GraphProto) -> list[str]:
    """Name every node as the parser does: an unnamed one becomes <OpType>_<number among the unnamed>."""
    names = []
    unnamed = 0
    for node in graph.node:
        names.append(node.name or f"{node.op_type}_{unnamed}")
        unnamed += not node.name
    return names


def parser_refusals(model: ModelProto, views: list[GraphView], target: Target) -> Iterator[Finding]:
    """Yield what the parser refuses, root graph first, in its own order."""
    if not model.HasField("graph"):
        yield _refusal("E16004", "parser.no-graph", "The model has no graph.", "write a model that holds a graph")
        return
    root = views[0]
    if not root.proto.input:
        yield _refusal(
            "E16001", "parser.no-input", "The model has no input node.", "give the graph an input, or fold it away"
        )
    for view in views:
        yield from _precheck(model, view, target)
    for view in views:
        yield from _plugin_refusals(view, target)
        yield from _undefined_types(view.proto, target)
    if not root.proto.output:
        yield _refusal("E16001", "parser.no-output", "The model has no output node.", "name at least one graph output")


def resolve_opset(model: ModelProto, node: NodeProto) -> tuple[str, int | None]:
    """Return the domain and opset under which the parser looks a node up; None when it cannot decide.

    A node without a domain takes the only entry of opset_import, whichever it is; with several, the parser gives up
    (E16005). For the sake of the later rules the default domain's version is then assumed.
    """
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if node.domain:
        return node.domain, versions.get(node.domain)
    if len(versions) == 1:
        return next(iter(versions.items()))
    return "", versions.get("", versions.get("ai.onnx"))


def _precheck(model: ModelProto, view: GraphView, target: Target) -> Iterator[Finding]:
    seen: set[str] = set()
    domains = {entry.domain for entry in model.opset_import}
    ambiguous = False
    for node, name in zip(view.nodes, node_names(view.proto), strict=True):
        built_in = node.op_type == "Constant" and node.domain in ("", "ai.onnx")
        if not built_in and not node.domain and len(domains) != 1 and not ambiguous:
            ambiguous = True
            yield _several_domains(model, len(domains))
        domain, opset = resolve_opset(model, node)
        if node.domain and not built_in and opset is None:
            yield _unknown_domain(node, name)
        if name in seen:
            yield _duplicate(name, node.op_type)
        seen.add(name)
        if not built_in and opset is not None and target.plugin(node.op_type, opset, domain) is None:
            yield _not_registered(node, name, domain, opset, target, model)
    for name, kind in _generated_names(view.proto):
        if name in seen:
            yield _duplicate(name, kind)
        seen.add(name)


def _generated_names(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Names of the nodes that the parser appends for inputs and initializers."""
    initializers = {tensor.name for tensor in graph.initializer}
    yield from ((info.name, "graph input") for info in graph.input if info.name not in initializers)
    yield from ((f"{name}_Initializer_{index}", "initializer") for index, name in enumerate(sorted(initializers)))


def _several_domains(model: ModelProto, count: int) -> Finding:
    listed = ", ".join(f"{entry.domain or 'the default domain'} {entry.version}" for entry in model.opset_import)
    return _refusal(
        "E16005",
        "parser.several-domains",
        f"The model has {count} --domain_version fields, but only one is allowed.",
        f"opset_import lists {listed or 'nothing'}: keep the default domain alone (even an unused second one counts)",
        lowering="opset_imports" if count else None,
    )


def _unknown_domain(node: NodeProto, name: str) -> Finding:
    return _refusal(
        "E19999",
        "parser.domain-without-opset",
        f"The opset of domain[{node.domain}] has no responding version.",
        "list the domain in opset_import, or clear it on the node",
        node=name,
        op_type=node.op_type,
        certainty=Certainty.SOURCE,
    )


def _duplicate(name: str, op_type: str) -> Finding:
    return _refusal(
        "E13009",
        "parser.duplicate-name",
        f"Op {name} has a name conflict in the graph.",
        "give every node a name of its own; inputs and <initializer>_Initializer_<n>, <OpType>_<n> are taken too",
        node=name,
        op_type=op_type,
        lowering="names",
    )


def _not_registered(node: NodeProto, name: str, domain: str, opset: int, target: Target, model: ModelProto) -> Finding:
    known = target.opsets(node.op_type, domain)
    lowering: str | None
    if known:
        fix = f"the plugin knows {node.op_type} at opsets {known}: export at opset 17"
        lowering = "opset" if opset >= _OLDEST_CONVERTED else None
    else:
        fix, lowering = _INSTEAD.get(node.op_type) or _without_plugin(node, model)
    return _refusal(
        "E13010",
        "parser.not-registered",
        f"No operator plugin is registered for Op: {name}, optype: {domain or 'ai.onnx'}::{opset}::{node.op_type}.",
        fix,
        node=name,
        op_type=node.op_type,
        lowering=lowering,
        source="OriginOpType registrations of ops-nn, ops-math, ops-cv, ops-transformer (data/onnx_ops.json)",
    )


def _without_plugin(node: NodeProto, model: ModelProto) -> tuple[str, str | None]:
    """What to do about an operator that no release knows and that has no line in the table above."""
    if any((f.domain, f.name) == (node.domain, node.op_type) for f in model.functions):
        return "the parser does not expand local functions: inline it", "local_functions"
    if node.domain in ("", "ai.onnx") and node.op_type in _defined_by_functions():
        return "write out the operator's definition", "function_body"
    return "no release has a plugin for it: replace it by other operators", None


@functools.cache
def _defined_by_functions() -> frozenset[str]:
    """Standard operators that ONNX defines by other operators."""
    schemas: Sequence[Any] = onnx.defs.get_all_schemas_with_history()  # Any: the stubs lack the function properties
    defined = (s for s in schemas if s.domain == "" and (s.has_function or s.has_context_dependent_function))
    return frozenset(s.name for s in defined)


def _plugin_refusals(view: GraphView, target: Target) -> Iterator[Finding]:
    for node, name in zip(view.nodes, node_names(view.proto), strict=True):
        if node.domain not in ("", "ai.onnx"):
            continue
        found = plugin_refusal(node, view)
        if found is not None:
            yield Finding(
                severity=Severity.REFUSED,
                rule=found.rule,
                node=name,
                op_type=node.op_type,
                message=found.message,
                fix=found.fix,
                source=found.source,
                certainty=found.certainty,
                code=found.code,
                lowering=found.lowering,
            )
        for tensor in _tensors(node):
            if not _parsed(tensor.data_type, target):
                yield _undefined_type(tensor.data_type, name, node.op_type)


def _undefined_types(graph: GraphProto, target: Target) -> Iterator[Finding]:
    initializers = {tensor.name for tensor in graph.initializer}
    for info in graph.input:
        # Sequences, optionals and maps have no tensor type: the parser reads 0.
        element = info.type.tensor_type.elem_type
        if info.name not in initializers and not _parsed(element, target):
            yield _undefined_type(element, info.name, "graph input")
    for tensor in graph.initializer:
        if not _parsed(tensor.data_type, target):
            yield _undefined_type(tensor.data_type, tensor.name, "initializer")


def _parsed(element: int, target: Target) -> bool:
    return element in _PARSED_TYPES or (element == TensorProto.INT4 and target.release >= _INT4_SINCE)


def _undefined_type(element: int, node: str, op_type: str) -> Finding:
    kind = TensorProto.DataType.Name(element) if element in TensorProto.DataType.values() else str(element)
    return _refusal(
        "E19999",
        "parser.element-type",
        f"tensor_proto date type {element} is undefined.",
        f"{kind if element else 'a sequence, optional or map'} is not an element type of the parser: use a tensor of"
        " float32, float16, bfloat16, float64, bool or (u)int8 … (u)int64",
        node=node,
        op_type=op_type,
    )


def _tensors(node: NodeProto) -> Iterator[TensorProto]:
    if node.op_type == "Constant":
        yield from (a.t for a in node.attribute if a.name == "value" and a.type == AttributeProto.TENSOR)


def _refusal(
    code: str,
    rule: str,
    message: str,
    fix: str,
    node: str = "",
    op_type: str = "",
    lowering: str | None = None,
    source: str = GE_SOURCE,
    certainty: Certainty = Certainty.PARSER,
) -> Finding:
    return Finding(Severity.REFUSED, rule, node, op_type, message, fix, source, certainty, code, lowering)
