"""com.microsoft SkipLayerNormalization and SkipSimplifiedLayerNormalization -> Add and the normalization.

    sum = input + skip + bias           y = normalization(sum) * gamma + beta

Outputs: y, mean, inverse deviation, sum. Source: ONNX Runtime docs/ContribOperators.md. Written by its transformer
fusions; the parser knows no com.microsoft operator (hand case dom_msft_gelu).
"""

from __future__ import annotations

from onnx import NodeProto

from op_patches.graph_view import FLOATS, GraphView, attributes, input_name, output_name
from op_patches.layer_norm import affine, statistics
from op_patches.normalization import normalize
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

EPSILON = 1e-12  # the default of these two; LayerNormalization has 1e-5


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match both; the simplified one has no beta, so its bias is one place further forward."""
    centred = node.op_type == "SkipLayerNormalization"
    x, skip, gamma = node.input[:3]
    beta, bias = (input_name(node, 3), input_name(node, 4)) if centred else ("", input_name(node, 3))
    elem = graph.elem(x)
    if elem not in FLOATS:
        return Refusal(f"the element type of {x} is unknown, and with it whether squares overflow")
    total = output_name(node, 3)
    summed = new.op("Add", x, skip, out=None if bias or not total else total)
    if bias:
        summed = new.op("Add", summed, bias, out=total or None)
    parts, form = normalize(new, graph, summed, [-1], attributes(node).get("epsilon", EPSILON), centred, elem)
    affine(new, graph, parts, gamma, beta, elem, node.output[0])
    statistics(new, graph, parts, output_name(node, 1), output_name(node, 2))
    return Rewrite(form)


SKIP_LAYER_NORM = Lowering("skip_layer_norm", ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), lower)
