"""MOSS-SoundEffect -> ONNX opset 17 in parts, each with its own weights file.

    for each part:  state, tensor by tensor  ->  <part>.bin  ->  mapped again  ->  module  ->  trace  ->  <part>.onnx
    sfx.json        last

One tensor is in memory at a time (of the codec's decoder: one copy, 3.5 GB at full size): the module that is traced
holds views of the file that was just written. All weights are external data, so each protobuf stays below 1 MB, far
from its limit of 2 GB. The embedding tables go into a file that the host gathers from; they are no graph.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from convert.export import check_graph, save_verified
from convert.sfx_verify import verify_part
from convert.trace import WeightRef, trace
from runtime.config import CodecConfig
from runtime.errors import ExportError
from runtime.graphs import codec_stream_spec, derived_axes
from runtime.manifest import sha256_of, write_atomically
from runtime.modules.codec import CodecStream, build_codec_module
from runtime.modules.sfx import SfxBlock, SfxInsideHeads, SfxTextHead
from runtime.sfx.codec import decoder_state, read_sfx_codec_config
from runtime.sfx.config import SfxConfig, read_sfx_config
from runtime.sfx.graphs import Block, SfxPlan, block_spec, inside_spec, text_spec
from runtime.sfx.manifest import EMBEDDINGS_NAME, SFX_MANIFEST_NAME, TOKENIZER_NAME, SfxGraph, SfxManifest
from runtime.sfx.weights import SfxWeights, block_state, inside_state, text_state
from runtime.spec import Array, GraphSpec
from runtime.weights import WeightRecord, map_weights, write_weights

State = Mapping[str, Tensor]
Report = Callable[[str], None]

FINITE_ROWS = 64  # checked at once: the check makes copies of what it looks at
EXAMPLE_AXES = ({"B": 1, "C": 19}, {"B": 2, "C": 5})  # a graph is traced on the first and verified on both


def export_sfx(
    checkpoint: Path, codec: Path, directory: Path, plan: SfxPlan, report: Report = lambda line: None
) -> SfxManifest:
    """Export both checkpoints into `directory`."""
    config = read_sfx_config(checkpoint)
    codec_config = read_sfx_codec_config(codec, config)
    for notice in config.notices:
        report(f"notice: {notice}")
    weights = SfxWeights(checkpoint, config)
    tokenizer = checkpoint / TOKENIZER_NAME
    if not tokenizer.is_file():
        raise ExportError(f"{tokenizer} is missing; the graphs cannot read text without it: download it")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SFX_MANIFEST_NAME).unlink(missing_ok=True)  # no manifest, no artifacts
    graphs: dict[str, SfxGraph] = {}
    for spec, tensors, build in _parts(weights, plan):
        graphs[spec.name] = export_part(
            spec, _in_dtype(tensors, plan.dtype), build, directory, EXAMPLE_AXES, config.codebook_size
        )
        report(_line(graphs[spec.name]))
    graphs["codec_stream"] = _export_codec(codec, codec_config, directory)
    report(_line(graphs["codec_stream"]))
    embeddings = write_file(directory / EMBEDDINGS_NAME, _embedding_tables(weights))
    write_atomically(directory / TOKENIZER_NAME, tokenizer.read_bytes())
    data_files = [*(g.weights_file for g in graphs.values()), EMBEDDINGS_NAME, TOKENIZER_NAME]
    manifest = SfxManifest(
        directory=directory,
        source={"checkpoint": str(checkpoint.resolve()), "codec": str(codec.resolve())},
        config=config,
        codec=codec_config,
        plan=plan,
        graphs=graphs,
        embeddings=embeddings,
        data_files={file: sha256_of(directory / file) for file in data_files},
        versions={p: version(p) for p in ("torch", "onnx", "onnxruntime", "numpy")}
        | {"python": platform.python_version()},
    )
    manifest.save()
    return manifest


def _parts(
    weights: SfxWeights, plan: SfxPlan
) -> Iterator[tuple[GraphSpec, Iterable[tuple[str, Tensor]], Callable[[State], nn.Module]]]:
    """Interface, weights and module of every graph of the language model."""
    config = weights.config
    for block in plan.blocks(config):
        build = partial(_build_block, config, plan, block)
        yield block_spec(config, block, plan), block_state(weights, block.first, block.last), build
    yield inside_spec(config), inside_state(weights), lambda state: SfxInsideHeads(config, state)
    yield text_spec(config), text_state(weights), SfxTextHead


def _build_block(config: SfxConfig, plan: SfxPlan, block: Block, state: State) -> nn.Module:
    return SfxBlock(config, state, len(block), block.last == config.num_layers, plan.rows)


def export_part(
    spec: GraphSpec,
    tensors: Iterable[tuple[str, Tensor]],
    build: Callable[[State], nn.Module],
    directory: Path,
    examples: Sequence[Mapping[str, int]],
    num_codes: int,
) -> SfxGraph:
    """Write the weights, trace the module on them, check and verify the graph; move it to its name when all held."""
    path, data = directory / f"{spec.name}.onnx", directory / f"{spec.name}.bin"
    path.unlink(missing_ok=True)  # it would point into weights that are about to change
    index = write_file(data, ((name, _as_array(t)) for name, t in tensors))
    module = build({name: _as_tensor(a) for name, a in map_weights(data, index).items()})
    proto, refs = trace(module, spec, {a: examples[0][a] for a in spec.dynamic_axes()})
    point_at_weights(proto, refs, index, data.name)
    check_graph(proto, spec)
    verification = save_verified(proto, path, lambda scratch: verify_part(spec, module, scratch, examples, num_codes))
    num_bytes = sum(r.num_bytes for r in index.values())
    return SfxGraph(
        spec, path.name, data.name, sha256_of(path), len(proto.graph.node), num_bytes,
        verification.max_abs_difference, verification.what,
    )  # fmt: skip


def _export_codec(codec: Path, config: CodecConfig, directory: Path) -> SfxGraph:
    """The decoder with its rings, float32."""
    spec = codec_stream_spec(config)
    with torch.device("meta"):
        wanted = set(CodecStream(config).state_dict())  # the derived state holds the quantizer's encoding side too
    with torch.no_grad():
        state = sorted((n, t) for n, t in decoder_state(codec, config).items() if n in wanted)
    examples = [{"B": batch, **derived_axes(config, frames)} for batch, frames in ((1, 3), (2, 1))]
    return export_part(
        spec, state, lambda s: build_codec_module(spec.name, config, s), directory, examples, config.codebook_size
    )


def point_at_weights(
    proto: onnx.ModelProto, refs: Mapping[str, WeightRef], index: Mapping[str, WeightRecord], location: str
) -> None:
    """External data by file, offset and length."""
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            ref = refs[tensor.name]
            offset = index[ref.state_name].offset + ref.byte_offset
            for key, value in (("location", location), ("offset", offset), ("length", ref.num_bytes)):
                tensor.external_data.add(key=key, value=str(value))


def write_file(path: Path, tensors: Iterable[tuple[str, Array]]) -> dict[str, WeightRecord]:
    """Write tensors one by one beside `path`, then move."""
    handle, scratch_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    scratch = Path(scratch_name)
    try:
        with os.fdopen(handle, "wb") as file:
            index = write_weights(file, tensors)
        scratch.chmod(0o644)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return index


def _in_dtype(tensors: Iterable[tuple[str, Tensor]], dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Matrices in the plan's dtype, vectors (norms) in float32."""
    for name, tensor in tensors:
        wanted = tensor.to(getattr(torch, dtype)) if tensor.ndim > 1 else tensor
        for piece in torch.split(wanted, FINITE_ROWS):
            if not bool(torch.isfinite(piece).all()):
                raise ExportError(f"{name}: not every value is finite in {dtype}; choose --dtype bfloat16 or float32")
        yield name, wanted


def _embedding_tables(weights: SfxWeights) -> Iterator[tuple[str, Array]]:
    tables = weights.embeddings()
    yield "text", tables.text
    yield from ((f"codes_{i}", table) for i, table in enumerate(tables.codes))


def _as_array(tensor: Tensor) -> Array:
    """NumPy has no bfloat16: its bit patterns are stored."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _as_tensor(array: Array) -> Tensor:
    tensor = torch.from_numpy(np.asarray(array))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _line(graph: SfxGraph) -> str:
    return (
        f"{graph.spec.name}: {graph.num_nodes} nodes, {graph.weight_bytes / 1e6:,.1f} MB of weights, "
        f"{graph.verification}"
    )
