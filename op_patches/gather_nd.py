"""GatherND with batch_dims -> GatherND without: the batch coordinates become part of the indices.

    GatherND(x, i, b)[n…, …] = GatherND(x, [n…, i[n…, …]])        n… runs over the b batch axes

The plugin refuses batch_dims other than 0 (hand case gathernd_b1).
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from op_patches.graph_view import GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    batch_dims = attributes(node).get("batch_dims", 0)
    if batch_dims == 0:
        return None
    x, indices = node.input
    shape, data = graph.static_shape(indices), graph.static_shape(x)
    if shape is None or data is None:
        return Refusal(f"the shape of {indices} or {x} is open, and the batch coordinates are constants")
    grid = np.meshgrid(*(np.arange(n) for n in shape[:-1]), indexing="ij")
    coordinates = np.stack(grid[:batch_dims], axis=-1).astype(np.int64)
    where = new.op("Concat", new.const(coordinates, hint="batch"), indices, axis=-1)
    new.op("GatherND", x, where, out=node.output[0])
    bound = min(data[batch_dims : batch_dims + shape[-1]])
    return Rewrite(ranges={indices: (-bound, bound - 1)})


GATHER_ND = Lowering("gather_nd", ("GatherND",), lower)
