"""What the parts of MOSS-SoundEffect take on a device, from configs alone, and how ATC compiles them.

Weights, caches, inputs and outputs follow from the shapes. Work space is an estimate (the largest values alive at one
time), and RESERVE is an assumption: only a device knows. Nothing here allocates weights.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convert.atc import SideFile, atc_command, side_files
from op_patches.readiness.check import check_model
from op_patches.readiness.report import ReadinessReport, summary_line
from op_patches.targets import Target
from runtime.config import CodecConfig
from runtime.errors import AtcError
from runtime.graphs import codec_stream_spec, derived_axes
from runtime.modules.codec import CodecStream
from runtime.sfx.artifacts import bound_spec, om_path
from runtime.sfx.codec import read_sfx_codec_config
from runtime.sfx.config import PUBLISHED_IDS, SfxConfig, read_sfx_config
from runtime.sfx.graphs import Block, SfxPlan, block_spec, inside_spec, text_spec
from runtime.sfx.manifest import SFX_MANIFEST_NAME, SfxManifest
from runtime.spec import GraphSpec

GIB = 2**30
RESERVE_BYTES = 2 * GIB  # assumed: driver, context, streams, fragmentation; measure on the device with npu-smi
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DEFAULT_TARGET = "cann=8.5,soc=Ascend910B4,precision=origin"


@dataclass(frozen=True, slots=True)
class PartMemory:
    """Bytes of one graph while the model is loaded."""

    name: str
    weights: int
    cache: int  # keys and values, or the codec's rings; stay on the device between launches
    io: int  # the other inputs and outputs
    workspace: int  # estimate; parts run in turn, so only the largest counts

    @property
    def resident(self) -> int:
        return self.weights + self.cache + self.io


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All parts, and what they add up to."""

    parts: tuple[PartMemory, ...]
    host_bytes: int  # embedding tables
    hbm_bytes: int

    def total(self, with_codec: bool) -> int:
        """Device memory with the reserve; the codec can stay on the CPU."""
        parts = [p for p in self.parts if with_codec or p.name != "codec_stream"]
        return sum(p.resident for p in parts) + max(p.workspace for p in parts) + RESERVE_BYTES

    def total_with_weights_twice(self) -> int:
        """What separate graphs for prompt and steps would take if each held its own copy of the blocks."""
        return self.total(with_codec=False) + sum(p.weights for p in self.parts if p.name.startswith("block_"))

    def fits(self, num_bytes: int) -> bool:
        return num_bytes <= self.hbm_bytes


def memory_plan(config: SfxConfig, codec: CodecConfig, plan: SfxPlan, hbm_bytes: int) -> MemoryPlan:
    """The memory of every part at the plan's numbers."""
    parts = [_block_memory(config, plan, block) for block in plan.blocks(config)]
    size, E = DTYPE_BYTES[plan.dtype], config.hidden_size
    for spec, width in (
        (inside_spec(config), 2 + config.n_vq * config.codebook_size),
        (text_spec(config), config.vocab_size),
    ):
        parts.append(PartMemory(spec.name, E * width * size, 0, _io(spec, plan.axes()), width * size))
    parts.append(_codec_memory(codec, plan))
    tables = config.vocab_size + config.n_vq * (config.codebook_size + 1)
    return MemoryPlan(tuple(parts), tables * E * size, hbm_bytes)


def _block_memory(config: SfxConfig, plan: SfxPlan, block: Block) -> PartMemory:
    E, F, D, R, size = (config.hidden_size, config.inner_size, config.head_size, plan.rows, DTYPE_BYTES[plan.dtype])
    matrices = 2 * E * config.num_heads * D + 2 * E * config.num_kv_heads * D + 3 * E * F
    norms = 2 * E + 2 * D
    weights = len(block) * (matrices * size + norms * 4) + (E * 4 if block.last == config.num_layers else 0)
    spec = block_spec(config, block, plan).bind(**plan.axes())
    cache = sum(t.num_bytes for t in spec.inputs if t.name.startswith("past_"))
    scores = config.num_heads * R * (plan.capacity + R) * (4 + 4 + size)  # float32, their softmax, and its rounding
    feed_forward = 3 * R * F * size
    return PartMemory(block.name, weights, cache, _io(spec, {}) - cache, max(scores, feed_forward) + 2 * R * E * 4)


def _codec_memory(codec: CodecConfig, plan: SfxPlan) -> PartMemory:
    with torch.device("meta"):
        weights = sum(p.numel() * 4 for p in CodecStream(codec).parameters())
    spec = codec_stream_spec(codec).bind(**_codec_axes(codec, plan))
    cache = sum(t.num_bytes for t in spec.inputs if t.name.startswith(("past_key", "past_value")))
    scores = [
        s.num_heads * n * (n + s.ring_frames * s.tokens_per_frame) * 4 * 2
        for s in codec.decoder
        for n in (plan.codec_frames * s.tokens_per_frame,)
    ]
    return PartMemory(spec.name, weights, cache, _io(spec, {}) - cache, max(scores))


def _codec_axes(codec: CodecConfig, plan: SfxPlan) -> dict[str, int]:
    axes = {"B": 1, **derived_axes(codec, plan.codec_frames)}
    return {axis: axes[axis] for axis in codec_stream_spec(codec).dynamic_axes()}


def _io(spec: GraphSpec, axes: dict[str, int]) -> int:
    bound = spec.bind(**{a: n for a, n in axes.items() if a in spec.dynamic_axes()})
    return sum(t.num_bytes for t in (*bound.inputs, *bound.outputs))


@dataclass(frozen=True, slots=True)
class SfxBuild:
    """One graph for ATC: the bound interface, the command, its side files, and what readiness says."""

    name: str
    spec: GraphSpec
    argv: tuple[str, ...]
    files: tuple[SideFile, ...]
    readiness: ReadinessReport

    @property
    def line(self) -> str:
        return f"{self.name}: {summary_line(self.readiness)}"


def atc_builds(
    manifest: SfxManifest, target: Target, files_by_graph: Mapping[str, Path] | None = None
) -> list[SfxBuild]:
    """The ATC run of every graph; weights stay outside the .om, which then holds the graph alone.

    `files_by_graph`: what convert.sfx_patch.patch_parts returned; the exported files otherwise.
    """
    if target.precision != "origin":
        raise AtcError(
            f"precision {target.precision}: these graphs say which values are {manifest.plan.dtype} and which float32; "
            "expected precision=origin, which keeps them"
        )
    if manifest.plan.dtype == "bfloat16" and not target.has_bfloat16:
        raise AtcError(f"{target.soc} has no bfloat16; export with --dtype float16")
    directory = manifest.directory.resolve()
    builds = []
    for name, graph in manifest.graphs.items():
        spec, output = bound_spec(manifest, name), om_path(directory, target.soc, name)
        files = tuple(side_files(target, output.parent, name, "", ""))
        model = (files_by_graph or {}).get(name, directory / graph.file).resolve()
        argv = atc_command(spec, model, output.with_suffix(""), target, files)
        report = check_model(model, target, {t.name: t.bound_shape for t in spec.inputs})
        builds.append(SfxBuild(name, spec, (*argv, "--external_weight=1"), files, report))
    return builds


def atc_script(builds: Iterable[SfxBuild]) -> str:
    """A bash script that compiles every graph; the .om files and their `weight` directory belong together."""
    builds = list(builds)
    files = {file.path: file.content for build in builds for file in build.files}
    lines = [
        "#!/usr/bin/env bash",
        "# Source the CANN set_env.sh first. Written by convert-moss sfx-plan.",
        "set -euo pipefail",
    ]
    for path, content in files.items():
        lines += [f"mkdir -p {shlex.quote(str(path.parent))}", f"cat >{shlex.quote(str(path))} <<'END_OF_FILE'",
                  f"{content}END_OF_FILE"]  # fmt: skip
    for build in builds:
        lines += [f"echo {shlex.quote(build.name)}", shlex.join(build.argv)]
    return "\n".join(lines) + "\n"


def configs_of(directory: Path | None, codec: Path | None) -> tuple[SfxConfig, CodecConfig, SfxManifest | None]:
    """Configs of an artifacts directory, of checkpoints (config.json alone is read), or the published shapes."""
    if directory is not None and (directory / SFX_MANIFEST_NAME).is_file():
        manifest = SfxManifest.load(directory)
        return manifest.config, manifest.codec, manifest
    config = SfxConfig.from_dict(published_config()) if directory is None else read_sfx_config(directory)
    if codec is None:
        return config, CodecConfig.from_dict(published_codec(config.n_vq), "the published codec"), None
    return config, read_sfx_codec_config(codec, config), None


def published_config() -> dict[str, Any]:
    """MOSS-SoundEffect v1 as published (docs/soundeffect.md)."""
    language = {
        "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
    }  # fmt: skip
    return {
        "model_type": "moss_tts_delay", "language_config": language, "n_vq": 16, "audio_vocab_size": 1024,
        "audio_pad_code": 1024, "sampling_rate": 24000, **PUBLISHED_IDS,
    }  # fmt: skip


def published_codec(n_vq: int) -> dict[str, Any]:
    """The 24 kHz MOSS-Audio-Tokenizer as published, with the codebooks that are used."""

    def stage(size_in: int, size_out: int, size: int, heads: int, layers: int) -> dict[str, Any]:
        return {
            "module_type": "Transformer", "input_dimension": size_in, "output_dimension": size_out, "d_model": size,
            "num_heads": heads, "num_layers": layers, "dim_feedforward": 4 * size, "causal": True, "norm": "layer_norm",
            "positional_embedding": "rope", "gating": "none", "max_period": 10000,
        }  # fmt: skip

    def patch(size: int) -> dict[str, Any]:
        return {"module_type": "PatchedPretransform", "patch_size": size}

    encoder = [patch(240), stage(240, 384, 768, 12, 12), patch(2), stage(768, 384, 768, 12, 12), patch(2),
               stage(768, 640, 768, 12, 12), patch(2), stage(1280, 768, 1280, 20, 32)]  # fmt: skip
    decoder = [stage(768, 1280, 1280, 20, 32), patch(2), stage(640, 768, 768, 12, 12), patch(2),
               stage(384, 768, 768, 12, 12), patch(2), stage(384, 240, 768, 12, 12), patch(240)]  # fmt: skip
    return {
        "model_type": "speech_tokenizer", "sampling_rate": 24000, "downsample_rate": 1920,
        "causal_transformer_context_duration": 10, "encoder_kwargs": encoder, "decoder_kwargs": decoder,
        "quantizer_kwargs": {"quantizer_type": "rlfq", "input_dim": 768, "rvq_dim": 512, "num_quantizers": n_vq,
                             "codebook_size": 1024, "codebook_dim": 8},
    }  # fmt: skip
