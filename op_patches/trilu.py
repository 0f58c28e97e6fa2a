"""Trilu -> a constant mask. Trilu parses, and no chip of the tables has a kernel for it.

    Trilu(x, k) = Where(mask, x, 0)        mask[i, j] = j - i <= k (lower) or >= k (upper)

The mask needs the last two axes and k; where one of them is open the rule refuses.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from op_patches.graph_view import GraphView, attributes, input_name
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    x, k_name = node.input[0], input_name(node, 1)
    k_value = graph.constant(k_name)
    if k_name and k_value is None:
        return Refusal(f"k ({k_name}) is computed at run time, so the mask is no constant")
    shape, elem = graph.shape(x), graph.elem(x)
    if elem is None or shape is None or not all(isinstance(d, int) for d in shape[-2:]):
        return Refusal(f"the last two axes of {x} are open: bind the input shapes")
    if elem == TensorProto.STRING:
        return Refusal("strings, which no engine selects")
    rows, columns = (int(d) for d in shape[-2:] if isinstance(d, int))
    k = int(np.ravel(k_value)[0]) if k_value is not None else 0
    offset = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    keep = offset >= k if attributes(node).get("upper", 1) else offset <= k
    mask = new.const(keep, hint="mask")
    if elem == TensorProto.BOOL:
        new.op("And", x, mask, out=node.output[0])
    else:
        new.op("Where", mask, x, new.const(0, x, "zero"), out=node.output[0])
    return Rewrite()


TRILU = Lowering("trilu", ("Trilu",), lower)
