"""What compiles and runs, but slower than it need be, and what relies on a closed package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes, input_name
from op_patches.readiness.folding import Folded
from op_patches.readiness.parser import node_names
from op_patches.readiness.report import Finding, Severity
from op_patches.readiness.views import is_standard
from op_patches.targets import Certainty, Plugin, Release, Target

_DATA_DEPENDENT = {"NonZero", "Compress", "Unique", "NonMaxSuppression"}
_OPEN_GEMM = Release.parse("9.2.0-beta.1")


def cost_findings(views: list[GraphView], constants: Mapping[int, Folded], target: Target) -> Iterator[Finding]:
    for view in views:
        stuck = constants[id(view)].stuck
        for node, name in zip(view.nodes, node_names(view.proto), strict=True):
            if not is_standard(node):
                continue
            if id(node) in stuck:
                yield _slow(
                    "slow.unfolded-constant",
                    name,
                    node,
                    f"all inputs are constant, but GE cannot fold {node.op_type}: it runs at every call",
                    "fold it before ATC",
                    "fold_constants",
                )
            if node.op_type in _DATA_DEPENDENT:
                yield _slow(
                    "slow.data-dependent-shape",
                    name,
                    node,
                    "the output shape depends on the data: no static graph, no whole-graph launch",
                    "use a mask of fixed shape",
                )
            yield from _notes(node, name, view, target)


def closed_plugin_remarks(plugins: Mapping[str, Plugin]) -> list[str]:
    """Say which operators rely on plugins that the open repositories of the release lack."""
    groups: dict[Certainty, list[str]] = {}
    for op_type, plugin in plugins.items():
        if plugin.source.startswith("closed plugin"):
            groups.setdefault(plugin.certainty, []).append(op_type)
    return [
        f"the parser plugins of {', '.join(sorted(ops))} come with the closed package cann-ops-legacy"
        f" ({certainty.value}); without the ops package of this chip ATC refuses them"
        for certainty, ops in groups.items()
    ]


def unknown_kernel_remark(ge_ops: Counter[str]) -> list[str]:
    if not ge_ops:
        return []
    listed = ", ".join(f"{ge_op} ({count})" for ge_op, count in sorted(ge_ops.items()))
    return [f"the kernel tables do not cover {listed}: nothing is said about their engine"]


def _notes(node: NodeProto, name: str, view: GraphView, target: Target) -> Iterator[Finding]:
    if node.op_type == "LayerNormalization":
        yield _note(
            "note.layer-norm",
            name,
            node,
            "the plugin broadcasts scale and bias to the full shape of X; the operator lists of 8.0 … 9.1 document"
            " float16 input only",
            "the form written out parses in every release, and GE fuses it again",
            "layer_norm",
        )
    if node.op_type == "Gemm" and target.release < _OPEN_GEMM:
        attrs = attributes(node)
        if input_name(node, 2) or attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0:
            yield _note(
                "note.gemm",
                name,
                node,
                "the operator list of 8.5 says that C, alpha and beta of Gemm are not supported",
                "write it as MatMul and Add",
                "gemm",
            )
    if node.op_type == "TopK":
        yield _note(
            "note.top-k",
            name,
            node,
            "AICore has TopKV2 only; that GE rewrites TopK to it is inferred, otherwise it runs on AICPU",
            "check the compiled model, or rank by counting",
            "top_k",
        )


def _slow(rule: str, name: str, node: NodeProto, message: str, fix: str, lowering: str | None = None) -> Finding:
    source = "hicann/ge v8.5.0 compiler/host_kernels; host_cpu_kernel.json of 8.1.RC1"
    return Finding(Severity.SLOW, rule, name, node.op_type, message, fix, source, Certainty.SOURCE, lowering=lowering)


def _note(rule: str, name: str, node: NodeProto, message: str, fix: str, lowering: str) -> Finding:
    source = "official operator lists; ops-nn plugins at v9.2.0-beta.1"
    certainty = Certainty.INFERRED if rule == "note.top-k" else Certainty.DOCUMENTED
    return Finding(Severity.NOTE, rule, name, node.op_type, message, fix, source, certainty, lowering=lowering)
