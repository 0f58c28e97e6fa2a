"""Conv and ConvTranspose without kernel_shape -> with the shape of the weight, which is what ONNX infers.

The plugin of Conv wants one attribute of kernel_shape, pads, strides and dilations; that of ConvTranspose wants
kernel_shape (data/onnx_ops.json).
"""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

_ENOUGH_FOR_CONV = {"kernel_shape", "pads", "strides", "dilations"}


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    attrs = attributes(node)
    if attrs.get("kernel_shape") or (node.op_type == "Conv" and _ENOUGH_FOR_CONV & set(attrs)):
        return None
    shape = graph.static_shape(node.input[1])
    if shape is None or len(shape) < 3:
        return Refusal(f"the shape of the weight {node.input[1]} is unknown, and kernel_shape is its last axes")
    new.op(node.op_type, *node.input, out=node.output[0], **{**attrs, "kernel_shape": list(shape[2:])})
    return Rewrite()


CONV_KERNEL = Lowering("conv_kernel", ("Conv", "ConvTranspose"), lower)
