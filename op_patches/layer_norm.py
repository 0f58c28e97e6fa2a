"""LayerNormalization(x, scale, bias) -> primitives, over the axes from `axis` to the last.

    mean = ReduceMean(x)            d = x - mean
    y    = d / sqrt(ReduceMean(d * d) + epsilon) * scale + bias

Source of the formula: ONNX operator LayerNormalization-17. The variance is taken of the centred value; E[x^2] - E[x]^2
is one node shorter and cancels. GE fuses this form into its LayerNorm kernel (LayerNormFusionPass of 8.1.RC1). d * d
overflows float16 at |d| = 256, so float16 gets another form of the same quotient: see op_patches.normalization.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from op_patches.graph_view import FLOATS, GraphView, attributes, input_name, output_name
from op_patches.normalization import Normalized, normalize, normalized_axes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match LayerNormalization; `axis` needs no rank when it counts from the end."""
    if node.domain not in ("", "ai.onnx"):
        return None
    attrs = attributes(node)
    x, scale, bias = node.input[0], node.input[1], input_name(node, 2)
    elem = graph.elem(x)
    if elem not in FLOATS:
        return Refusal(f"the element type of {x} is unknown, and with it whether squares overflow")
    axes = normalized_axes(attrs.get("axis", -1), graph.rank(x))
    if axes is None:
        return Refusal(f"axis {attrs['axis']} of {x} counts from the front, and its rank is unknown")
    stash = attrs.get("stash_type", TensorProto.FLOAT)
    if stash != TensorProto.FLOAT:
        return Refusal(f"stash_type {stash}: mean and deviation in another type than float32")
    parts, form = normalize(new, graph, x, axes, attrs.get("epsilon", 1e-5), centred=True)
    affine(new, graph, parts, scale, bias, elem, node.output[0])
    statistics(new, graph, parts, output_name(node, 1), output_name(node, 2))
    return Rewrite(form)


def affine(
    new: Builder, graph: GraphView, parts: Normalized, scale: str, bias: str, elem: int | None, out: str
) -> None:
    """value * scale + bias, in the type of the computation, then back to the type of the graph."""
    last = out if parts.elem == elem else None
    y = new.op("Mul", parts.value, parts.operand(new, graph, scale), out=None if bias else last)
    if bias:
        y = new.op("Add", y, parts.operand(new, graph, bias), out=last)
    if last is None and elem is not None:
        new.cast(y, elem, out=out)


def statistics(new: Builder, graph: GraphView, parts: Normalized, mean: str, inverse: str) -> None:
    """The optional outputs Mean and InvStdDev: float32 by definition."""
    if mean and graph.uses(mean):
        _float32(new, parts.mean, parts.elem, mean)
    if inverse and graph.uses(inverse):
        _float32(new, parts.inverse_deviation(new), parts.elem, inverse)


def _float32(new: Builder, value: str, elem: int, out: str) -> None:
    new.op("Identity", value, out=out) if elem == TensorProto.FLOAT else new.cast(value, TensorProto.FLOAT, out=out)


LAYER_NORM = Lowering("layer_norm", ("LayerNormalization",), lower)
