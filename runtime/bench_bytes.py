"""The limit: bytes that one call of a graph must read, and how fast this machine reads.

A weight that a Gather looks rows up in counts with those rows, every other one as a whole. `weights_distinct` counts
each byte once, as if a cache kept what is used again; `weights_read` counts it at every node that uses it. Truth lies
between: the local transformer's layer runs 17 times per frame, from a cache where that is large enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.graphs import ring_axes
from runtime.manifest import Manifest

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

LOOKUPS = ("Gather", "GatherBlockQuantized")  # of rows; input 1 says which
BANDWIDTH_BYTES = 1 << 29  # beyond the caches of most machines, small enough for most memories


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """Bytes that one call reads."""

    graph: str
    weights_distinct: int
    weights_read: int
    cache: int  # keys and values: the whole visible cache, rings of the codec included


def graph_bytes(manifest: Manifest, name: str, cache_rows: int, prompt_rows: int) -> GraphBytes | None:
    """Read off the exported graph; None when its package (onnx) is not installed."""
    try:
        import onnx
    except ImportError:
        return None
    graph = manifest.graph(name)
    proto = onnx.load(str(manifest.path(graph.file)), load_external_data=False).graph
    weights = {tensor.name: tensor for tensor in proto.initializer}
    rows_of = _rows_per_lookup(manifest, name, prompt_rows)
    parts: dict[tuple[str, str], list[int]] = {}
    for node, tensor in _uses(proto, weights):
        size = _num_bytes(tensor)
        if node.op_type in LOOKUPS and node.input[1] != tensor.name and tensor.dims:
            size = min(size, size // tensor.dims[0] * rows_of(tensor.dims[0]))
        parts.setdefault(_place(tensor), []).append(size)
    cache = sum(
        t.num_bytes
        for t in graph.spec.bind_known({"B": 1, "C": cache_rows, **ring_axes(manifest.codec)}).inputs
        if t.name.startswith("past_") and t.dtype == "float32"
    )
    return GraphBytes(name, sum(max(sizes) for sizes in parts.values()), sum(map(sum, parts.values())), cache)


def read_bandwidth(threads: int, num_bytes: int) -> float:
    """Bytes per second that `threads` threads read together: the best of five passes over fresh memory."""
    values = np.ones(num_bytes // 4, np.float32)
    parts = np.array_split(values, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return values.nbytes / best


def _uses(proto: Any, weights: dict[str, TensorProto]) -> Iterator[tuple[NodeProto, TensorProto]]:
    for node in proto.node:
        for name in node.input:
            if name in weights:
                yield node, weights[name]


def _rows_per_lookup(manifest: Manifest, name: str, prompt_rows: int) -> Any:
    """How many rows a Gather takes from a table with that many rows: one per position, n_vq from the audio table."""
    model = manifest.model
    positions = prompt_rows if name == "prefill" else 1
    audio_rows = model.n_vq * (model.codebook_size + 1)
    return lambda rows: positions * (model.n_vq if rows == audio_rows else 1)


def _place(tensor: TensorProto) -> tuple[str, str]:
    """Where the bytes lie: views of one weight at the same offset are one weight."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    return (where["location"], where["offset"]) if where else ("", tensor.name)


def _num_bytes(tensor: TensorProto) -> int:
    sizes = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2}  # onnx.TensorProto.DataType -> bytes
    return int(np.prod(tensor.dims, dtype=np.int64)) * sizes[tensor.data_type]
