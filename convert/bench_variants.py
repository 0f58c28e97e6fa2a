"""Each exact saving taken back, alone: graphs that do the work which ours leave out, for proof and measurement.

A variant has the interface of its graph and computes the same mathematics. tests/convert/test_bench_variants.py shows
that the codes stay the same, tests/e2e/measure_exact_work.py what each saving brings; docs/performance.md has the
figures. Nothing here is ever shipped.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

from convert.trace import trace
from convert.verify import example_axes
from runtime.config import ModelConfig
from runtime.errors import ExportError
from runtime.manifest import Manifest, sha256_of
from runtime.modules.global_transformer import GlobalTransformer
from runtime.modules.layers import Block, attend, attend_split, merge_heads
from runtime.modules.llm import Frame, Prefill, Step
from runtime.modules.load import load_state
from runtime.modules.local_transformer import Cache, LocalTransformer
from runtime.weights import WEIGHTS_NAME, WeightRecord, map_weights, write_weights

EXTRA_NAME = "extra.bin"  # weights that only a variant has


class _JoinedCache(GlobalTransformer):
    """Attention over the cache joined with the new row: keys and values are copied at every step."""

    def read_row(
        self, row: Tensor, position: Tensor, cache_mask: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        x, new = self.embed(row).squeeze(1), []
        cos, sin = self._rope(position.unsqueeze(1))
        mask = functional.pad(cache_mask, (0, 1))
        for i, block in enumerate(self.layers):
            assert isinstance(block, Block)
            q, k, v = block.attention.project_row(block.ln_1(x), cos, sin)
            new += [k, v]
            keys, values = torch.cat([past[2 * i], k], dim=2), torch.cat([past[2 * i + 1], v], dim=2)
            x = block.finish(x, attend(q, keys, values, mask).flatten(1))
        return self.ln_f(x), new


class _ComputedRope(GlobalTransformer):
    """Sine and cosine computed from the position, in every layer."""

    def read_row(
        self, row: Tensor, position: Tensor, cache_mask: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        x, new = self.embed(row).squeeze(1), []
        for i, block in enumerate(self.layers):
            assert isinstance(block, Block)
            cos, sin = self._computed(position)
            q, k, v = block.attention.project_row(block.ln_1(x), cos, sin)
            new += [k, v]
            x = block.finish(x, attend_split(q, past[2 * i], past[2 * i + 1], k, v, cache_mask).flatten(1))
        return self.ln_f(x), new

    def _computed(self, position: Tensor) -> tuple[Tensor, Tensor]:
        d = self.config.head_size
        frequencies = self.config.rope_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = position.to(torch.float32).unsqueeze(1).unsqueeze(2).unsqueeze(3) * frequencies.float()
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin * -1.0, sin], dim=-1)


class _ScaledScores(GlobalTransformer):
    """1 / sqrt(D) in the graph instead of in the weights of q."""

    def read_row(
        self, row: Tensor, position: Tensor, cache_mask: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        x, new = self.embed(row).squeeze(1), []
        cos, sin = self._rope(position.unsqueeze(1))
        for i, block in enumerate(self.layers):
            assert isinstance(block, Block)
            q, k, v = block.attention.project_row(block.ln_1(x), cos, sin)
            new += [k, v]
            scaled = q * self.config.head_size**-0.5
            x = block.finish(x, attend_split(scaled, past[2 * i], past[2 * i + 1], k, v, cache_mask).flatten(1))
        return self.ln_f(x), new


class _AllRows(GlobalTransformer):
    """The last block, and the final norm, for every row of the prompt."""

    def read_rows(
        self,
        rows: Tensor,
        positions: Tensor,
        last: Tensor,
        cache_mask: Tensor | None = None,
        past: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        x, cache = self.embed(rows), []
        cos, sin = self._rope(positions)
        mask = (positions.unsqueeze(1) > positions.unsqueeze(2)).to(torch.float32).unsqueeze(1) * -1.0e4
        for block in self.layers:
            assert isinstance(block, Block)
            q, k, v = block.attention.project(block.ln_1(x), cos, sin)
            cache += [k, v]
            x = block.finish(x, merge_heads(attend(q, k, v, mask)))
        pick = (positions == last.unsqueeze(1)).to(torch.float32).unsqueeze(1)
        return torch.matmul(pick, self.ln_f(x)).squeeze(1), cache


class _OnePass(LocalTransformer):
    """Positions 0 and 1 one after the other."""

    def _first_two(self, hidden: Tensor) -> tuple[Tensor, Tensor, Cache]:
        heads, size = self.config.num_heads, self.config.head_size
        cache: Cache = []
        x = hidden
        for block in self.layers:
            assert isinstance(block, Block)
            q, k, v = block.attention.project_row(block.ln_1(x), self.rope_cos[:1], self.rope_sin[:1])
            cache.append((k, v))
            x = block.finish(x, attend(q, k, v, None).flatten(1))
        z0 = self.ln_f(x)
        x = hidden * 0.0 + self.slot_row[0, 1].clone()
        for i, block in enumerate(self.layers):
            assert isinstance(block, Block)
            if i == 0:
                zero = (hidden * 0.0)[:, :size].unsqueeze(1).unsqueeze(1)  # gives the constant the batch axis
                q, k, v = torch.split(zero + self.slot_qkv[:, :, 1:].clone(), [heads, heads, heads], dim=1)
            else:
                q, k, v = block.attention.project_row(block.ln_1(x), self.rope_cos[1:2], self.rope_sin[1:2])
            keys, values = torch.cat([cache[i][0], k], dim=2), torch.cat([cache[i][1], v], dim=2)
            cache[i] = (keys, values)
            x = block.finish(x, attend(q, keys, values, None).flatten(1))
        return z0, self.ln_f(x), cache


class _WholeTextHead(LocalTransformer):
    """All rows of the text head, of which two are used; the head is the text embedding, as published."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.wte = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        del self.text_head
        self.register_buffer("text_head", torch.eye(2), persistent=False)

    def _first_two(self, hidden: Tensor) -> tuple[Tensor, Tensor, Cache]:
        z0, z1, cache = super()._first_two(hidden)
        logits = torch.matmul(self.wte, z0.transpose(0, 1)).transpose(0, 1)
        slot, end = self.config.audio_assistant_slot_id, self.config.audio_end_id
        return torch.cat([logits[:, slot : slot + 1], logits[:, end : end + 1]], dim=1), z1, cache


class _NoTables(LocalTransformer):
    """LayerNorm -> QKV -> RoPE of the first layer computed instead of looked up."""

    def _first_two(self, hidden: Tensor) -> tuple[Tensor, Tensor, Cache]:
        x = functional.pad(hidden.unsqueeze(1), (0, 0, 0, 1)) + self.slot_row
        cache: Cache = []
        for block in self.layers:
            assert isinstance(block, Block)
            q, k, v = block.attention.project(block.ln_1(x), self.rope_cos[:2], self.rope_sin[:2])
            cache.append((k, v))
            x = block.finish(x, merge_heads(attend(q, k, v, self.two_row_mask)))
        z = self.ln_f(x)
        return z[:, 0], z[:, 1], cache

    def _next(self, code: Tensor, i: int, table: Tensor, cache: Cache) -> Tensor:
        x, at = functional.embedding(code.squeeze(1), table), slice(i + 1, i + 2)
        for layer, block in enumerate(self.layers):
            assert isinstance(block, Block)
            q, k, v = block.attention.project_row(block.ln_1(x), self.rope_cos[at], self.rope_sin[at])
            keys, values = torch.cat([cache[layer][0], k], dim=2), torch.cat([cache[layer][1], v], dim=2)
            cache[layer] = (keys, values)
            x = block.finish(x, attend(q, keys, values, None).flatten(1))
        z: Tensor = self.ln_f(x)
        return z


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One saving taken back."""

    saving: str  # what our graph does instead
    graph: str
    part: Callable[..., nn.Module]  # takes the place of the graph's transformer


VARIANTS: dict[str, Variant] = {
    "joined-cache": Variant("split attention without cache copies", "step", _JoinedCache),
    "computed-rope": Variant("tables of cosines and sines", "step", _ComputedRope),
    "scaled-scores": Variant("constants folded: 1 / sqrt(D)", "step", _ScaledScores),
    "all-rows": Variant("prefill computes the last hidden state only", "prefill", _AllRows),
    "one-pass": Variant("two rows in the first local pass", "frame", _OnePass),
    "whole-text-head": Variant("two rows of the text head", "frame", _WholeTextHead),
    "no-tables": Variant("the first local layer's LayerNorm, QKV and RoPE as tables", "frame", _NoTables),
}


def export_variant(manifest: Manifest, name: str, directory: Path) -> Manifest:
    """Artifacts like `manifest`, with one graph replaced by the variant; the other files are hard links."""
    if name not in VARIANTS:
        raise ExportError(f"no variant {name}; variants: {', '.join(VARIANTS)}")
    variant = VARIANTS[name]
    directory.mkdir(parents=True)
    for file in (*manifest.data_files, *(g.file for g in manifest.graphs.values()), WEIGHTS_NAME):
        if not (directory / file).exists():
            os.link(manifest.path(file).resolve(), directory / file)  # ONNX Runtime follows no symbolic link
    extra = _extra_state(manifest, name)
    state = _state(manifest) | extra
    spec = manifest.graph(variant.graph).spec
    axes = example_axes(variant.graph, manifest.codec)[-1]
    proto, refs = trace(_module(manifest, variant, state), spec, {a: axes[a] for a in spec.dynamic_axes()})
    with (directory / EXTRA_NAME).open("wb") as sink:
        extra_index = write_weights(sink, ((key, tensor.numpy()) for key, tensor in sorted(extra.items())))
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            ref = refs[tensor.name]
            where: tuple[str, Mapping[str, WeightRecord]] = (WEIGHTS_NAME, manifest.weights)
            location, index = (EXTRA_NAME, extra_index) if ref.state_name in extra_index else where
            offset = index[ref.state_name].offset + ref.byte_offset
            for key, value in (("location", location), ("offset", offset), ("length", ref.num_bytes)):
                tensor.external_data.add(key=key, value=str(value))
    path = directory / manifest.graph(variant.graph).file
    path.unlink()
    onnx.save(proto, path)
    replaced = dataclasses.replace(
        manifest.graph(variant.graph), sha256=sha256_of(path), num_nodes=len(proto.graph.node)
    )
    return dataclasses.replace(
        manifest, directory=directory, name=name, graphs={**manifest.graphs, variant.graph: replaced}
    )


def _state(manifest: Manifest) -> dict[str, Tensor]:
    arrays = map_weights(manifest.path(WEIGHTS_NAME), manifest.weights)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _extra_state(manifest: Manifest, name: str) -> dict[str, Tensor]:
    """Weights with their scale taken out again; the text head under the name that the variant has for it."""
    state, config = _state(manifest), manifest.model
    if name == "whole-text-head":
        return {"local.wte": state["global_.wte"].clone()}
    if name != "scaled-scores":
        return {}
    factor = torch.ones(3 * config.hidden_size)
    factor[: config.hidden_size] = config.head_size**0.5
    names = (f"global_.layers.{i}.attention.qkv.{p}" for i in range(config.num_layers) for p in ("weight", "bias"))
    return {key: state[key] * factor for key in names}


def _module(manifest: Manifest, variant: Variant, state: Mapping[str, Tensor]) -> nn.Module:
    """The module of the graph, its transformer replaced."""
    config, positions = manifest.model, manifest.limits["max_positions"]
    module: nn.Module
    if variant.graph == "frame":
        module = Frame(config)
        module.local = variant.part(config)  # type: ignore[assignment]  # VARIANTS pairs graph and part
    else:
        module = (Step if variant.graph == "step" else Prefill)(config, positions)
        module.global_ = variant.part(config, positions)  # type: ignore[assignment]  # as above
    return load_state(module, state)
