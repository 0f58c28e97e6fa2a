"""Which values are fixed when ATC compiles: GE folds them on the host, so they need no kernel on the device.

Two tiers [hicann/ge v8.5.0 compiler/host_kernels; host_cpu_kernel.json of 8.1.RC1]: the host kernels of the compiler,
and the fallback HostCpuEngine. What is in neither runs on the device at every call although its inputs never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import NodeProto

from op_patches.graph_view import GraphView, TensorType, subgraphs
from op_patches.readiness.views import topological

# ONNX operators whose GE operator is in the first tier.
_HOST_KERNELS = {
    *("Add", "Sub", "Mul", "Cast", "Concat", "ConstantOfShape", "Gather", "Greater", "Identity", "Max", "Transpose"),
    *("Range", "ReduceProd", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Unsqueeze", "Flatten"),
}
# … and in the second.
_HOST_CPU = {"Equal", "Expand", "GreaterOrEqual", "Where", "Div", "Neg", "Sqrt", "Split", "Pad", "MatMul"}


@dataclass(frozen=True, slots=True)
class Folded:
    """Names that are constants after compilation, and the nodes that stay although all they read is constant."""

    names: frozenset[str]
    stuck: frozenset[int]  # id() of nodes that GE cannot fold

    def covers(self, node: NodeProto) -> bool:
        """Whether GE removes the node while compiling."""
        return id(node) not in self.stuck and bool(node.output) and all(o in self.names for o in node.output if o)


def folded(view: GraphView, outer: Folded | None = None) -> Folded:
    """Follow constants through one graph. A static Shape is a constant too."""
    names = set(outer.names) if outer else set()
    names |= {tensor.name for tensor in view.proto.initializer}
    stuck: set[int] = set()
    for node in topological(view.nodes):
        if node.op_type == "Constant" or (node.op_type in ("Shape", "Size") and _is_static(view, node)):
            names.update(name for name in node.output if name)
            continue
        inputs = [name for name in node.input if name]
        if not inputs or any(name not in names for name in inputs) or any(True for _ in subgraphs(node)):
            continue
        if node.domain in ("", "ai.onnx") and node.op_type in _HOST_KERNELS | _HOST_CPU:
            names.update(name for name in node.output if name)
        else:
            stuck.add(id(node))
    return Folded(frozenset(names), frozenset(stuck))


def _is_static(view: GraphView, node: NodeProto) -> bool:
    types: Mapping[str, TensorType] = view.types
    found = types.get(node.input[0]) if node.input else None
    return found is not None and found.static_shape is not None
