"""Numbers that half precision cannot hold, and operators that lost accuracy in other people's conversions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from op_patches.graph_view import Array, GraphView, attributes, input_name
from op_patches.readiness.folding import Folded
from op_patches.readiness.loader import float_chunks
from op_patches.readiness.parser import node_names
from op_patches.readiness.report import Finding, Severity
from op_patches.readiness.views import dtype_of, is_standard
from op_patches.targets import Certainty, Target

_HALF_MAX = 65504.0
# Where a mask or a bound enters; weights of MatMul and Conv are clipped by ATC itself (--is_weight_clip).
_MASKING = {"Add", "Sub", "Mul", "Where", "Max", "Min", "Clip", "Pad", "Expand", "ConstantOfShape", "Concat"}


def precision_findings(
    views: list[GraphView], target: Target, path: Path | None, constants: Mapping[int, Folded]
) -> Iterator[Finding]:
    for view in views:
        tensors = {tensor.name: tensor for tensor in view.proto.initializer}
        for node, name in zip(view.nodes, node_names(view.proto), strict=True):
            if not is_standard(node):
                continue
            if node.op_type in _MASKING:
                yield from _beyond_half(node, name, view, tensors, target, path)
            if target.half_precision and node.op_type in ("ReduceMean", "ReduceSum"):
                yield from _sum_of_squares(node, name, view)
            if target.half_precision and node.op_type == "ConvTranspose":
                yield _risk(
                    "precision.conv-transpose",
                    name,
                    node.op_type,
                    "ConvTranspose lost accuracy when ATC reduced its precision (Ascend/pytorch #125)",
                    "keep it in float32 with --keep_dtype, or use precision=origin",
                    Certainty.REPORTED,
                )
            if node.op_type == "Div" and not constants[id(view)].covers(node):
                yield from _integer_div(node, name, view)


def _integer_div(node: NodeProto, name: str, view: GraphView) -> Iterator[Finding]:
    if dtype_of(view, input_name(node, 0)) in ("int32", "int64"):
        yield _risk(
            "precision.integer-div",
            name,
            node.op_type,
            "integer Div becomes RealDiv, which is not documented to truncate toward zero",
            "compute it on the host, or as a constant",
            Certainty.INFERRED,
        )


def _beyond_half(
    node: NodeProto, name: str, view: GraphView, tensors: dict[str, TensorProto], target: Target, path: Path | None
) -> Iterator[Finding]:
    for chunks in _float_constants(node, view, tensors, path):
        largest, infinite = _extremes(chunks)
        if infinite:
            yield _risk(
                "precision.infinite-constant",
                name,
                node.op_type,
                "a constant is infinite: a fully masked row, or -inf minus -inf, becomes NaN",
                "use a finite number such as -1e4",
                Certainty.REPORTED,
                "finite_masks",
            )
        elif largest > _HALF_MAX and target.half_precision:
            yield _risk(
                "precision.beyond-float16",
                name,
                node.op_type,
                f"a constant of magnitude {largest:.4g} overflows float16 (65504) under {target.precision}",
                "use a finite number such as -1e4 for masks",
                Certainty.DOCUMENTED,
                "finite_masks",
            )


def _float_constants(
    node: NodeProto, view: GraphView, tensors: dict[str, TensorProto], path: Path | None
) -> Iterator[Iterable[Array]]:
    for index, name in enumerate(node.input):
        if node.op_type == "Clip" and index > 0:
            continue  # the bounds of a Clip may be as wide as they like
        small = view.constant(name)
        if small is not None and small.dtype.kind == "f":
            yield [small]
        elif name in tensors and small is None:
            yield float_chunks(tensors[name], path)
    if node.op_type == "ConstantOfShape" and "value" in attributes(node):
        fill = numpy_helper.to_array(attributes(node)["value"])
        if fill.dtype.kind == "f":
            yield [fill]


def _extremes(chunks: Iterable[Array]) -> tuple[float, bool]:
    """The largest finite magnitude, and whether any element is infinite."""
    largest, infinite = 0.0, False
    for chunk in chunks:
        magnitude = np.abs(np.asarray(chunk, dtype=np.float64))
        finite = magnitude[np.isfinite(magnitude)]
        infinite |= bool(np.isinf(magnitude).any())
        largest = max(largest, float(finite.max(initial=0.0)))
    return largest, infinite


def _sum_of_squares(node: NodeProto, name: str, view: GraphView) -> Iterator[Finding]:
    source = view.producer(input_name(node, 0))
    if source is None:
        return
    exponent = view.constant(input_name(source, 1)) if source.op_type == "Pow" else None
    squared = source.op_type == "Mul" and len(source.input) == 2 and source.input[0] == source.input[1]
    if squared or (exponent is not None and exponent.size == 1 and float(exponent.reshape(-1)[0]) == 2.0):
        yield _risk(
            "precision.sum-of-squares",
            name,
            node.op_type,
            "squares are summed in half precision: values above 255 overflow (RMSNorm, LayerNorm written out)",
            "scale before squaring, keep the island in float32 (--keep_dtype), or use precision=origin",
            Certainty.REPORTED,
            "layer_norm",
        )


def _risk(
    rule: str, node: str, op_type: str, message: str, fix: str, certainty: Certainty, lowering: str | None = None
) -> Finding:
    source = "facts of ATC's precision modes and public reports (docs/readiness.md)"
    return Finding(Severity.PRECISION, rule, node, op_type, message, fix, source, certainty, lowering=lowering)
