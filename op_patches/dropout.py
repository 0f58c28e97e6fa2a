"""Dropout at inference -> Identity, and its mask -> all true."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView, attributes, input_name, output_name
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    training = input_name(node, 2)
    value = graph.constant(training)
    if training and (value is None or bool(np.any(value))):
        return Refusal("training_mode is on or not constant; export the model in eval mode")
    if attributes(node).get("is_test", 1) == 0:
        return Refusal("is_test=0; export the model in eval mode")
    x, mask = node.input[0], output_name(node, 1)
    new.op("Identity", x, out=node.output[0])
    if mask and graph.uses(mask):
        truth = new.cast(x, TensorProto.BOOL)  # t or not t: true in the shape of x, without a Shape node
        new.op("Or", truth, new.op("Not", truth), out=mask)
    return Rewrite()


DROPOUT = Lowering("dropout", ("Dropout",), lower)
