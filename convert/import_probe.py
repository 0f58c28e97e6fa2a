"""Numbers that a graph computes instead of storing: head size and RoPE angles, seen in a short run of the graph."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto

from convert.import_attention import score_operands
from convert.import_llm import base_of_frequencies
from convert.import_view import GraphView
from runtime.errors import BackendError, CheckpointError
from runtime.package_session import PackageSession
from runtime.spec import Array

_FRAMES = 2


@dataclass(frozen=True, slots=True)
class Rope:
    head_size: int
    base: float


def probe_ropes(view: GraphView, attentions: Sequence[NodeProto]) -> list[Rope]:
    """Head size and base of RoPE of each attention, named by its Softmax."""
    queries = [score_operands(view, softmax)[0] for softmax in attentions]
    angles = []
    for softmax, query in zip(attentions, queries, strict=True):
        cosine = next((node for node in view.ancestors(query) if node.op_type == "Cos"), None)
        if cosine is None:
            raise CheckpointError(f"{view.name}: {softmax.name}: no Cos behind its queries, so no RoPE is known")
        angles.append(cosine.input[0])
    seen = _run_for(view, {*queries, *angles})
    ropes = []
    for softmax, query, angle in zip(attentions, queries, angles, strict=True):
        head_size = seen[query].shape[-1]
        base = _base(seen[angle].astype(np.float32), head_size)
        if base is None:
            raise CheckpointError(f"{view.name}: {softmax.name}: its angles are not those of RoPE")
        ropes.append(Rope(head_size, base))
    return ropes


def _base(angles: Array, head_size: int) -> float | None:
    """From the angles of the positions 0 and 1, [..., tokens, D / 2]."""
    rows = angles.reshape(-1, angles.shape[-1])
    if len(rows) < 2 or rows.shape[1] != head_size // 2 or rows[0].any():
        return None
    return base_of_frequencies(rows[1], head_size)


def _run_for(view: GraphView, values: set[str]) -> dict[str, Array]:
    """Inner values of a run on a short input with empty caches."""
    model = onnx.ModelProto()
    model.CopyFrom(view.model)
    known = {info.name for info in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=value) for value in sorted(values - known))
    feeds = {name: _feed(name, dims) for name, dims in view.inputs.items()}
    if "waveform" in feeds:
        feeds["input_lengths"][:] = feeds["waveform"].shape[2]
    with tempfile.TemporaryDirectory(prefix="moss-import-") as scratch:
        path = Path(scratch) / view.name
        onnx.save(model, path)
        try:
            with PackageSession(path) as session:
                return session.run(feeds)
        except BackendError as error:
            reason = str(error).splitlines()[0].replace(str(path), "the graph")
            raise CheckpointError(f"{view.path}: {reason}; download the package again") from error


def _feed(name: str, dims: Sequence[int | None]) -> Array:
    if name == "waveform":
        samples = 8192  # two frames and a bit of the published codec; the graph pads to whole frames
        return np.random.default_rng(0).normal(0, 0.1, (1, dims[1] or 1, samples)).astype(np.float32)
    if name == "audio_codes":
        return np.zeros((1, _FRAMES, dims[2] or 1), np.int32)
    fill = {"audio_code_lengths": _FRAMES}.get(name, -1 if name.startswith("attn_cached_positions") else 0)
    dtype = np.float32 if name.startswith(("attn_cached_keys", "attn_cached_values")) else np.int32
    return np.full([size or 1 for size in dims], fill, dtype)
