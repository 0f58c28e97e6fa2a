"""RMSNormalization-23 and ONNX Runtime's SimplifiedLayerNormalization -> primitives.

    y = x / sqrt(ReduceMean(x * x) + epsilon) * scale

Sources: ONNX operator RMSNormalization-23; ONNX Runtime contrib operator SimplifiedLayerNormalization. x * x overflows
float16 at 256: the same three forms as for LayerNormalization, see op_patches.normalization.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from op_patches.graph_view import FLOATS, GraphView, attributes, output_name
from op_patches.layer_norm import affine, statistics
from op_patches.normalization import normalize, normalized_axes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match both operators; ONNX Runtime writes its own into the standard domain."""
    attrs = attributes(node)
    x, scale = node.input[0], node.input[1]
    elem = graph.elem(x)
    if elem not in FLOATS:
        return Refusal(f"the element type of {x} is unknown, and with it whether squares overflow")
    axes = normalized_axes(attrs.get("axis", -1), graph.rank(x))
    if axes == []:
        return Refusal(f"axis {attrs['axis']} lies beyond the last axis of {x}")
    if axes is None:
        return Refusal(f"axis {attrs['axis']} of {x} counts from the front, and its rank is unknown")
    if attrs.get("stash_type", TensorProto.FLOAT) != TensorProto.FLOAT:
        return Refusal(f"stash_type {attrs['stash_type']}: squares summed in another type than float32")
    parts, form = normalize(new, graph, x, axes, attrs.get("epsilon", 1e-5), centred=False)
    affine(new, graph, parts, scale, "", elem, node.output[0])
    statistics(new, graph, parts, "", output_name(node, 1))
    return Rewrite(form)


RMS_NORM = Lowering("rms_norm", ("RMSNormalization", "SimplifiedLayerNormalization"), lower)
