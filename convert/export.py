"""Checkpoint -> ONNX graphs in one artifacts directory.

    open_model, open_codec  ->  state (weights rearranged once)  ->  weights.bin
    for each graph:  module + GraphSpec  ->  trace  ->  <graph>.onnx  ->  onnx.checker, strict shape inference,
                     interface against the spec, torch = ONNX on several shapes
    manifest.json   last

Every file is written beside its name and then moved. A graph that fails a check leaves no file and no manifest entry.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import onnx
from torch import Tensor, nn

from convert.checkpoint import TOKENIZER_NAME, Checkpoint, open_codec, open_model
from convert.cpu_weights import Reducer, verify_reduced
from convert.import_origin import recorded_origin
from convert.recorded_inputs import export_versions
from convert.trace import WeightRef, trace
from convert.verify import example_axes, verify_graph
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import ExportError, ManifestError
from runtime.graphs import GRAPH_NAMES, LLM_GRAPHS, graph_specs
from runtime.manifest import FLOAT32, MANIFEST_NAME, GraphFile, Manifest, sha256_of, write_atomically
from runtime.modules.codec import build_codec_module
from runtime.modules.codec_state import derive_codec_state
from runtime.modules.llm import build_llm_module
from runtime.modules.llm_state import derive_llm_state
from runtime.sampling import TOP_K_MAX
from runtime.spec import GraphSpec
from runtime.weights import WEIGHTS_NAME, WeightRecord, write_weights

MAX_POSITIONS = 4096  # rows that prompt and frames may take together: 5 minutes of frames
MIN_POSITIONS = 200  # convert/verify.py feeds positions below this
FORBIDDEN_OPS = {"Shape", "Range", "If", "Loop", "Scan", "Einsum", "Trilu", "Size", "NonZero"}
INT64_ONLY = {"Reshape", "Slice", "Split", "Unsqueeze", "Squeeze", "ReduceSum", "TopK", "Pad"}  # their operands
Report = Callable[[str], None]
Verified = TypeVar("Verified")


def export_artifacts(
    model_source: str | Path,
    codec_source: str | Path,
    directory: Path,
    only: Iterable[str] = (),
    max_positions: int = MAX_POSITIONS,
    report: Report = lambda line: None,
    cpu_weights: str | None = None,
) -> Manifest:
    """Export both checkpoints; with `only`, those graphs alone, kept beside the ones that are there.

    `cpu_weights` int8 or int4 makes artifacts for ONNX Runtime on a CPU alone (convert/cpu_weights.py).
    """
    reducer = None if cpu_weights is None else Reducer(cpu_weights)
    _refuse_other_weights(directory, cpu_weights or FLOAT32)
    names = list(only) or list(GRAPH_NAMES)
    unknown = [n for n in names if n not in GRAPH_NAMES]
    if unknown:
        raise ExportError(f"no graph {', '.join(unknown)}; graphs: {', '.join(GRAPH_NAMES)}")
    model, codec = open_model(model_source), open_codec(codec_source)
    for finding in (*model.findings, *codec.findings):
        report(f"notice: {finding}")
    check_pair(model.config, codec.config)
    max_positions = min(max_positions, model.config.max_positions)
    if max_positions < MIN_POSITIONS:
        raise ExportError(f"{max_positions} positions: the verification needs at least {MIN_POSITIONS}")
    state = derive_llm_state(model.config, model.tensors, max_positions)
    state |= derive_codec_state(codec.config, codec.tensors)
    directory.mkdir(parents=True, exist_ok=True)
    weights = _write_weights(directory, state, reducer)
    report(f"{WEIGHTS_NAME}: {(directory / WEIGHTS_NAME).stat().st_size / 1e6:.0f} MB, {len(weights)} tensors")

    specs = graph_specs(model.config, codec.config)
    manifest = _with_records(_manifest(directory, model, codec, weights, max_positions, cpu_weights or FLOAT32))
    kept = _graphs_to_keep(directory, manifest, names)
    graphs: dict[str, GraphFile] = {}
    for name in GRAPH_NAMES:
        if name in names:
            module = build_module(name, model.config, codec.config, state, max_positions)
            graphs[name] = export_graph(specs[name], module, directory, weights, model.config, codec.config, reducer)
            worst = max(graphs[name].max_abs_difference.values())
            report(f"{name}: {graphs[name].num_nodes} nodes, torch = ONNX (largest difference {worst:.1e})")
            dataclasses.replace(manifest, graphs=kept | graphs).save()  # an interrupted export keeps what it finished
        elif name in kept:
            graphs[name] = kept[name]
    manifest = dataclasses.replace(manifest, graphs=graphs)
    manifest.save()
    return manifest


def _refuse_other_weights(directory: Path, cpu_weights: str) -> None:
    """Weights of another precision are artifacts of their own: neither may overwrite the other."""
    if not (directory / MANIFEST_NAME).is_file():
        return
    there = Manifest.load(directory).cpu_weights
    if there != cpu_weights:
        raise ExportError(
            f"{directory} holds an export with {there} weights, this one has {cpu_weights}; give another directory"
        )


def check_pair(model: ModelConfig, codec: CodecConfig) -> None:
    """Refuse a language model and a codec that do not speak the same codes."""
    if codec.n_vq < model.n_vq or codec.codebook_size < model.codebook_size:
        raise ExportError(
            f"the model speaks {model.n_vq} codebooks of {model.codebook_size} codes, the codec reads {codec.n_vq} of "
            f"{codec.codebook_size}; give the codec that belongs to this model"
        )


def build_module(
    name: str, model: ModelConfig, codec: CodecConfig, state: Mapping[str, Tensor], max_positions: int
) -> nn.Module:
    """The torch module of any graph."""
    if name in LLM_GRAPHS:
        return build_llm_module(name, model, state, max_positions)
    return build_codec_module(name, codec, state)


def export_graph(
    spec: GraphSpec,
    module: nn.Module,
    directory: Path,
    weights: Mapping[str, WeightRecord],
    model: ModelConfig,
    codec: CodecConfig,
    reducer: Reducer | None = None,
) -> GraphFile:
    """Trace, check and verify one graph; move it to its name only when all of it held."""
    axes = example_axes(spec.name, codec)[-1]
    proto, refs = trace(module, spec, {a: axes[a] for a in spec.dynamic_axes()})
    check_graph(proto, spec)
    reduced = reducer.rewrite(proto, refs) if reducer is not None else refs
    _point_at_weights(proto, reduced, weights)
    path, verify = directory / f"{spec.name}.onnx", verify_graph if reduced == refs else verify_reduced
    differences = save_verified(proto, path, lambda scratch: verify(spec, module, scratch, model, codec))
    return GraphFile(spec, path.name, sha256_of(path), len(proto.graph.node), differences)


def save_verified(proto: onnx.ModelProto, path: Path, verify: Callable[[Path], Verified]) -> Verified:
    """Write a graph beside `path`, run the full ONNX checker and `verify` on it, and move it only when both held."""
    handle, scratch_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".onnx")
    os.close(handle)
    scratch = Path(scratch_name)
    try:
        onnx.save(proto, scratch)
        onnx.checker.check_model(str(scratch), full_check=True)
        verified = verify(scratch)
        scratch.chmod(0o644)
        scratch.replace(path)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{path.stem}: onnx.checker refuses the exported graph: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return verified


def check_graph(proto: onnx.ModelProto, spec: GraphSpec) -> None:
    """Refuse what ATC would stumble over: shape logic, int64 arithmetic, names used twice, another interface."""
    graph = proto.graph
    forbidden = sorted({n.op_type for n in graph.node if n.op_type in FORBIDDEN_OPS or "Sequence" in n.op_type})
    if forbidden:
        raise ExportError(f"{spec.name}: nodes of shape or control logic: {', '.join(forbidden)}")
    names = [n.name for n in graph.node]
    if len(set(names)) != len(names):
        raise ExportError(f"{spec.name}: node names are not unique")
    for kind, tensors, infos in (("input", spec.inputs, graph.input), ("output", spec.outputs, graph.output)):
        found = [(i.name, tuple(d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim)) for i in infos]
        if found != [(t.name, t.shape) for t in tensors]:
            raise ExportError(f"{spec.name}: {kind}s differ from the spec: {found}")
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    wide = {v.name for v in inferred.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.INT64}
    wide |= {i.name for i in graph.initializer if i.data_type == onnx.TensorProto.INT64}
    for node in graph.node:
        if wide & set(node.input) and node.op_type not in INT64_ONLY and node.op_type != "Cast":
            raise ExportError(f"{spec.name}: {node.name} computes on int64; cast to int32 in the module")


def _point_at_weights(
    proto: onnx.ModelProto, refs: Mapping[str, WeightRef], weights: Mapping[str, WeightRecord]
) -> None:
    for tensor in proto.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        ref = refs[tensor.name]
        offset = weights[ref.state_name].offset + ref.byte_offset
        for key, value in (("location", WEIGHTS_NAME), ("offset", offset), ("length", ref.num_bytes)):
            tensor.external_data.add(key=key, value=str(value))


def _write_weights(
    directory: Path, state: dict[str, Tensor], reducer: Reducer | None = None
) -> dict[str, WeightRecord]:
    stored = reducer.stored(state) if reducer is not None else ((name, t.numpy()) for name, t in sorted(state.items()))
    handle, scratch_name = tempfile.mkstemp(dir=directory, prefix=f".{WEIGHTS_NAME}.")
    scratch = Path(scratch_name)
    try:
        with os.fdopen(handle, "wb") as file:
            index = write_weights(file, stored)
        scratch.chmod(0o644)
        scratch.replace(directory / WEIGHTS_NAME)
    finally:
        scratch.unlink(missing_ok=True)
    return index


def _manifest(
    directory: Path,
    model: Checkpoint[ModelConfig],
    codec: Checkpoint[CodecConfig],
    weights: dict[str, WeightRecord],
    max_positions: int,
    cpu_weights: str,
) -> Manifest:
    data_files = {WEIGHTS_NAME: sha256_of(directory / WEIGHTS_NAME)}
    tokenizer = model.directory / TOKENIZER_NAME
    if tokenizer.is_file():  # without one every graph works, but no text can be read: open_model has noted it
        write_atomically(directory / TOKENIZER_NAME, tokenizer.read_bytes())
        data_files[TOKENIZER_NAME] = sha256_of(directory / TOKENIZER_NAME)
    source: dict[str, Any] = {
        role: {"directory": str(c.directory.resolve()), "files": c.files, "dtype": c.storage_dtype}
        for role, c in (("model", model), ("codec", codec))
    } | recorded_origin(model.directory)
    return Manifest(
        directory=directory,
        name=directory.name,
        made_up=model.made_up or codec.made_up,
        source=source,
        model=model.config,
        codec=codec.config,
        limits={"max_positions": max_positions, "top_k_max": TOP_K_MAX},
        graphs={},
        data_files=data_files,
        weights=weights,
        versions=export_versions(),
        cpu_weights=cpu_weights,
    )


def _with_records(manifest: Manifest) -> Manifest:
    """What was patched and compiled before stays recorded: each record knows the hashes of its inputs."""
    try:
        before = Manifest.load(manifest.directory)
    except ManifestError:
        return manifest
    return dataclasses.replace(manifest, patched=before.patched, builds=before.builds)


def _graphs_to_keep(directory: Path, manifest: Manifest, names: list[str]) -> dict[str, GraphFile]:
    """Graphs of an earlier export of the very same weights that are not exported again now."""
    if set(names) == set(GRAPH_NAMES) or not (directory / MANIFEST_NAME).is_file():
        return {}
    try:
        before = Manifest.load(directory)
    except ManifestError:
        return {}
    same = all(getattr(before, part) == getattr(manifest, part) for part in ("data_files", "limits", "versions"))
    return {n: g for n, g in before.graphs.items() if same and (directory / g.file).is_file()}
