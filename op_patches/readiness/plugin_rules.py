"""Attribute checks inside the ONNX plugins of ops-nn, ops-math and ops-cv: one rule per operator.

A rule returns the refusal with the text that ATC prints, or None. Each was read in the plugin of that name
(data/onnx_ops.json has file and commit); those marked PARSER were also seen in the parser's own verdicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView, attributes, input_name, output_name
from op_patches.targets import Certainty


@dataclass(frozen=True, slots=True)
class Refusal:
    rule: str
    message: str
    fix: str
    code: str = "EZ9999"
    lowering: str | None = None
    certainty: Certainty = Certainty.PARSER
    source: str = "the operator's ONNX plugin (data/onnx_ops.json)"


def plugin_refusal(node: NodeProto, view: GraphView) -> Refusal | None:
    """Return what the node's plugin refuses, if anything."""
    rule = _RULES.get(node.op_type)
    return rule(node, attributes(node), view) if rule else None


Attributes = dict[str, Any]


def _arg(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if attrs.get("select_last_index", 0) == 0:
        return None
    text = {
        "ArgMax": "Only support select_last_index=0, but 1 is obtained now",
        "ArgMin": "select_last_index should be 0, but now it's 1",
    }[node.op_type]
    return Refusal(
        "plugin.arg-select-last", text, "reverse the axis first, or drop select_last_index", lowering="arg_extrema"
    )


def _bernoulli(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if "seed" not in attrs:
        return None
    return Refusal(
        "plugin.bernoulli-seed", "the parser aborts (signal 6)", "drop the seed; sample on the host", "SIGABRT"
    )


def _cast(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if "to" in attrs:
        return None
    return Refusal("plugin.cast-to", "attr to is missing", "write the attribute to", certainty=Certainty.SOURCE)


def _clip(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if view.opset < 11 or input_name(node, 1) or input_name(node, 2):
        return None
    return Refusal(
        "plugin.clip-bounds",
        "At least 'min' or 'max' must not be None or Empty",
        "a Clip without bounds does nothing: remove it",
        lowering="clip",
    )


def _concat(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if "axis" not in attrs:
        return Refusal("plugin.concat-axis", "onnx Concat op has no axis attr.", "write the attribute axis")
    if not any(node.input):
        return Refusal("plugin.concat-empty", "input size is 0", "give Concat an input", certainty=Certainty.SOURCE)
    return None


def _constant_of_shape(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    value = attrs.get("value")
    typed = (TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE)
    if value is None or value.raw_data or value.data_type in typed:
        return None
    return Refusal(
        "plugin.constant-of-shape-value",
        f"value of element type {value.data_type} in typed fields is not supported",
        "store the value as raw_data (onnx.numpy_helper.from_array does)",
        lowering="constant_of_shape",
        certainty=Certainty.SOURCE,
    )


def _conv(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if {"kernel_shape", "pads", "strides", "dilations"} & set(attrs):
        return None
    return Refusal(
        "plugin.conv-attributes",
        "node must have attr (kernel_shape,pads,strides,dilations) at least one",
        "write kernel_shape",
        lowering="conv_kernel",
    )


def _conv_transpose(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if attrs.get("kernel_shape"):
        return None
    return Refusal(
        "plugin.conv-transpose-kernel",
        "attr kernel_shape must have value",
        "write kernel_shape",
        lowering="conv_kernel",
    )


def _einsum(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if "equation" in attrs:
        return None
    return Refusal("plugin.einsum", "attr equation is missing", "write the equation", certainty=Certainty.SOURCE)


def _gather_nd(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if attrs.get("batch_dims", 0) == 0:
        return None
    return Refusal(
        "plugin.gathernd-batch-dims",
        "only support batch_dims=0",
        "put the batch index into the indices, or use GatherElements",
        lowering="gather_nd",
    )


def _if(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if set(attrs) == {"then_branch", "else_branch"}:
        return None
    return Refusal(
        "plugin.if-branches",
        f"node has {len(attrs)} attributes, expected then_branch and else_branch",
        "keep exactly these two attributes",
        certainty=Certainty.SOURCE,
    )


def _is_inf(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if attrs.get("detect_negative", 1) and attrs.get("detect_positive", 1):
        return None
    return Refusal(
        "plugin.isinf-one-sided",
        "The operator will computes both positive and negative cases!",
        "add And with Greater or Less than zero",
    )


def _layer_norm(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if len(node.input) in (2, 3):
        return None
    return Refusal(
        "plugin.layer-norm-inputs",
        f"LayerNormalization has {len(node.input)} inputs, expected 2 or 3",
        "give it a scale",
        lowering="layer_norm",
        certainty=Certainty.SOURCE,
    )


def _max_pool(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if not output_name(node, 1):
        return None
    return Refusal(
        "plugin.maxpool-indices",
        "The output of Indices is not support, transforming failed.",
        "drop the Indices output",
    )


def _selu(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    # The kernel has these two constants built in; ONNX gives the same ones as defaults.
    alpha = np.float32(attrs.get("alpha", 1.67326319217681884765625))
    gamma = np.float32(attrs.get("gamma", 1.05070102214813232421875))
    if np.isclose(alpha, 1.6732632, rtol=1e-5) and np.isclose(gamma, 1.050701, rtol=1e-5):
        return None
    return Refusal(
        "plugin.selu",
        "the attr of alpha or gamma is not default. transform failed.",
        "write it with Elu, Where and Mul",
    )


def _split(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    """Explicit sizes and the even split of opsets up to 17 are fine; num_outputs (18) hardly ever is."""
    outputs = len(node.output)
    sizes = view.constant(input_name(node, 1)) if view.opset >= 13 else np.asarray(attrs.get("split", ()))
    if sizes is not None and sizes.size not in (0, outputs):
        return _split_refusal(f"split has {sizes.size} values for {outputs} outputs", Certainty.SOURCE)
    if "num_outputs" not in attrs or input_name(node, 1):
        return None
    return _split_by_count(node, attrs, view)


def _split_by_count(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    count = int(attrs["num_outputs"])
    if count != len(node.output):
        return _split_refusal(f"num_outputs {count} is not the number of outputs {len(node.output)}", Certainty.SOURCE)
    source = input_name(node, 0)
    if view.parent is not None or all(info.name != source for info in view.proto.input):
        return _split_refusal("the parser crashes (signal 11): it has no shape for an inner tensor", code="SIGSEGV")
    shape = view.shape(source) or ()
    axis = int(attrs.get("axis", 0))
    if not 0 <= axis < len(shape):
        # The parser reads memory beside the shape here, so the numbers of its text vary.
        return _split_refusal(f"dim_size of axis {axis} can not be evenly divided by split_size")
    size = shape[axis]
    if not isinstance(size, int) or size % count:
        number = size if isinstance(size, int) else -1
        return _split_refusal(f"dim_size[{number}] can not be evenly divided by split_size[{int(number / count)}].")
    return None


def _split_refusal(message: str, certainty: Certainty = Certainty.PARSER, code: str = "EZ9999") -> Refusal:
    return Refusal("plugin.split", message, "give the sizes as a constant second input", code, "opset", certainty)


def _transpose(node: NodeProto, attrs: Attributes, view: GraphView) -> Refusal | None:
    if attrs.get("perm"):
        return None
    return Refusal(
        "plugin.transpose-perm", "must input the attr of perm", "write perm: all axes reversed", lowering="transpose"
    )


_RULES: dict[str, Callable[[NodeProto, Attributes, GraphView], Refusal | None]] = {
    "ArgMax": _arg,
    "ArgMin": _arg,
    "Bernoulli": _bernoulli,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "GatherND": _gather_nd,
    "If": _if,
    "IsInf": _is_inf,
    "LayerNormalization": _layer_norm,
    "MaxPool": _max_pool,
    "Selu": _selu,
    "Split": _split,
    "Transpose": _transpose,
}
