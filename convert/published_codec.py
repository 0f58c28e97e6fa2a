"""The audio tokenizer in the interface of the published ONNX package, as torch modules (MODEL.md 6).

Written from the specification, for the same use as convert/published_llm.py: dense masks, caches that are shifted and
returned whole, 1x1 convolutions in the quantizer, weight norm folded, layer scale apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from convert.published_llm import embedding_table, rope_angles, rotate
from runtime.config import CodecConfig, CodecStage


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one attention layer keeps between chunks."""

    offset: Tensor  # [1] tokens read so far
    keys: Tensor  # [1, H, context, D]
    values: Tensor
    positions: Tensor  # [1, context], -1 where nothing was read yet


class PublishedCodec(nn.Module):
    """All weights; the three graphs share one instance. Without encoder tensors it only decodes."""

    def __init__(self, config: CodecConfig, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.decoder = nn.ModuleList(_Stage(s, tensors, f"decoder.{s.index}") for s in config.decoder)
        self.encoder = nn.ModuleList(_Stage(s, tensors, f"encoder.{s.index}") for s in config.encoder)
        names = [f"quantizer.quantizers.{q}" for q in range(config.n_vq)]
        self.codebooks = nn.ModuleList(embedding_table(tensors[f"{n}.codebook.weight"]) for n in names)
        self.in_projs = nn.ModuleList(_conv(tensors, f"{n}.in_proj") for n in names)
        self.out_projs = nn.ModuleList(_conv(tensors, f"{n}.out_proj") for n in names)
        self.input_proj = _conv(tensors, "quantizer.input_proj")
        self.output_proj = _conv(tensors, "quantizer.output_proj")

    def stages(self, part: str) -> list[_Stage]:
        """The stages of "encoder" or "decoder" in their order."""
        return list(cast("Iterable[_Stage]", getattr(self, part)))

    def dequantize(self, codes: Tensor) -> Tensor:
        """codes [B, T, n_vq] -> latents [B, latent_size, T]."""
        total: Tensor | None = None
        for q, (book, project) in enumerate(zip(self.codebooks, self.out_projs, strict=True)):
            part = project(book(codes[:, :, q]).transpose(1, 2))
            total = part if total is None else total + part
        return self.output_proj(total)  # type: ignore[no-any-return]

    def quantize(self, latents: Tensor) -> Tensor:
        """latents [B, latent_size, T] -> codes [B, T, n_vq]: nearest row on the unit sphere, residual by residual."""
        residual = self.input_proj(latents)
        codes = []
        for q, book in enumerate(cast("Iterable[nn.Embedding]", self.codebooks)):
            seen = functional.normalize(self.in_projs[q](residual).transpose(1, 2), dim=2)
            rows = functional.normalize(book.weight, dim=1)
            distance = (
                seen.pow(2).sum(2, keepdim=True) - 2 * torch.matmul(seen, rows.t()) + rows.pow(2).sum(1)[None, None]
            )
            codes.append((-distance).argmax(2))
            residual = residual - self.out_projs[q](book(codes[-1]).transpose(1, 2))
        return torch.stack(codes, 2)


class PublishedEncode(nn.Module):
    def __init__(self, codec: PublishedCodec) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, waveform: Tensor, input_lengths: Tensor) -> tuple[Tensor, Tensor]:
        config = self.codec.config
        batch, channels, samples = waveform.shape
        missing = (config.samples_per_frame - samples % config.samples_per_frame) % config.samples_per_frame
        whole = torch.cat([waveform, torch.zeros(batch, channels, missing)], dim=2)
        x = whole.transpose(1, 2).reshape(batch, 1, -1)
        frames = torch.div(input_lengths.long(), config.samples_per_frame, rounding_mode="floor")
        for stage in self.codec.stages("encoder"):
            x = _join(x, stage.spec.patch_size)
            x = stage(x, frames * stage.spec.tokens_per_frame + stage.spec.tokens_per_frame)
        codes = self.codec.quantize(_join(x, config.encoder_last_patch))
        return codes.to(torch.int32), frames.to(torch.int32)


class PublishedDecodeFull(nn.Module):
    def __init__(self, codec: PublishedCodec) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, audio_codes: Tensor, audio_code_lengths: Tensor) -> tuple[Tensor, Tensor]:
        config = self.codec.config
        x = self.codec.dequantize(audio_codes.long())
        for stage in self.codec.stages("decoder"):
            x = _split(x, stage.spec.patch_size)
            x = stage(x, audio_code_lengths.long() * stage.spec.tokens_per_frame)
        lengths = audio_code_lengths * config.samples_per_frame
        return _waveform(_split(x, config.decoder_last_patch), config), lengths.to(torch.int32)


class PublishedCodecStep(nn.Module):
    """n frames behind those that the caches hold. Inputs and outputs: MODEL.md 6.7."""

    def __init__(self, codec: PublishedCodec) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, audio_codes: Tensor, audio_code_lengths: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        config, num_stages = self.codec.config, len(self.codec.decoder)
        layers = [LayerState(*state[i : i + 4]) for i in range(num_stages, len(state), 4)]
        x = self.codec.dequantize(audio_codes.long())
        offsets: list[Tensor] = []
        kept: list[Tensor] = []
        for number, stage in enumerate(self.codec.stages("decoder")):
            x = _split(x, stage.spec.patch_size)
            before, layers = layers[: stage.spec.num_layers], layers[stage.spec.num_layers :]
            offsets.append((state[number] + x.shape[-1]).to(torch.int32))
            x, after = stage.stream(x, before)
            for layer in after:
                kept += [layer.offset, layer.keys, layer.values, layer.positions]
        lengths = (audio_code_lengths * config.samples_per_frame).to(torch.int32)
        return (_waveform(_split(x, config.decoder_last_patch), config), lengths, *offsets, *kept)


class _Stage(nn.Module):
    def __init__(self, spec: CodecStage, tensors: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self.spec = spec
        self.input_proj, self.output_proj = (_plain(tensors[f"{name}.{p}_proj.weight"]) for p in ("input", "output"))
        names = [f"{name}.transformer.layers.{i}" for i in range(spec.num_layers)]
        self.layers = nn.ModuleList(_Layer(spec, tensors, layer) for layer in names)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x [B, in, T] -> [B, out, T]; tokens from `lengths` on are padding."""
        positions = torch.arange(x.shape[-1])[None]
        behind = positions[:, :, None] - positions[:, None, :]
        valid = positions < lengths[:, None]
        allowed = (behind >= 0) & (behind < self.spec.context) & valid[:, None, :]
        y = self.input_proj(x.transpose(1, 2))
        for layer in self.layers:
            y = layer(y, positions, allowed, valid)
        return self.output_proj(y).transpose(1, 2)  # type: ignore[no-any-return]

    def stream(self, x: Tensor, states: list[LayerState]) -> tuple[Tensor, list[LayerState]]:
        y = self.input_proj(x.transpose(1, 2))
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            y, kept = cast("_Layer", layer).stream(y, state)
            after.append(kept)
        return self.output_proj(y).transpose(1, 2), after


class _Layer(nn.Module):
    def __init__(self, spec: CodecStage, tensors: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self.spec = spec
        self.norm1, self.norm2 = (_norm(tensors, f"{name}.norm{i}", spec.model_size) for i in (1, 2))
        self.in_proj = _plain(tensors[f"{name}.self_attn.in_proj.weight"])
        self.out_proj = _plain(tensors[f"{name}.self_attn.out_proj.weight"])
        self.up, self.down = (_plain(tensors[f"{name}.ffn.{i}.weight"]) for i in (0, 2))
        self.scale_1, self.scale_2 = (
            nn.Parameter(tensors[f"{name}.layer_scale_{i}.scale"], requires_grad=False) for i in (1, 2)
        )
        D = spec.head_size
        self.frequencies = torch.exp(-math.log(spec.rope_base) * torch.arange(0, D, 2, dtype=torch.float32) / D)

    def forward(self, y: Tensor, positions: Tensor, allowed: Tensor, valid: Tensor) -> Tensor:
        q, k, v = self._heads(y, positions)
        context = self._attend(q, k, v, allowed) * valid[:, :, None].to(y.dtype)
        return self._finish(y, context)

    def stream(self, y: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        tokens = y.shape[1]
        positions = state.offset.long()[:, None] + torch.arange(tokens)[None]
        q, k, v = self._heads(y, positions)
        keys, values = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
        held = torch.cat([state.positions.long(), positions], dim=1)
        behind = positions[:, :, None] - held[:, None, :]
        allowed = (held[:, None, :] >= 0) & (behind >= 0) & (behind < self.spec.context)
        y = self._finish(y, self._attend(q, keys, values, allowed))
        last = self.spec.context
        kept = LayerState(
            (state.offset + tokens).to(torch.int32), keys[:, :, -last:], values[:, :, -last:],
            held[:, -last:].to(torch.int32),
        )  # fmt: skip
        return y, kept

    def _heads(self, y: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, _ = y.shape
        qkv = self.in_proj(self.norm1(y)).view(batch, tokens, 3, self.spec.num_heads, self.spec.head_size)
        q, k, v = qkv.permute(2, 0, 1, 3, 4).unbind(0)
        cos, sin = rope_angles(positions, self.frequencies)
        return rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * (1.0 / math.sqrt(self.spec.head_size))
        scores = scores.masked_fill(~allowed[:, None], torch.finfo(torch.float32).min)
        return torch.matmul(torch.softmax(scores, 3), v).transpose(1, 2).flatten(2)

    def _finish(self, y: Tensor, context: Tensor) -> Tensor:
        y = y + self.scale_1 * self.out_proj(context)
        out: Tensor = y + self.scale_2 * self.down(functional.gelu(self.up(self.norm2(y))))
        return out


def _join(x: Tensor, patch: int) -> Tensor:
    """[B, D, T] -> [B, D * patch, T / patch]."""
    if patch == 1:
        return x
    batch, size, _ = x.shape
    return x.reshape(batch, size, -1, patch).permute(0, 1, 3, 2).reshape(batch, size * patch, -1)


def _split(x: Tensor, patch: int) -> Tensor:
    """The inverse of _join."""
    if patch == 1:
        return x
    batch, size, tokens = x.shape
    return x.reshape(batch, size // patch, patch, tokens).permute(0, 1, 3, 2).reshape(batch, size // patch, -1)


def _waveform(x: Tensor, config: CodecConfig) -> Tensor:
    """[B, 1, N * channels] -> [B, channels, N]."""
    return x.reshape(x.shape[0], -1, config.num_channels).transpose(1, 2)


def _conv(tensors: Mapping[str, Tensor], name: str) -> nn.Conv1d:
    """A 1x1 convolution with its weight norm folded."""
    length = tensors[f"{name}.parametrizations.weight.original0"].double()
    direction = tensors[f"{name}.parametrizations.weight.original1"].double()
    weight = (length * direction / direction.norm(dim=(1, 2), keepdim=True)).float()
    layer = nn.Conv1d(weight.shape[1], weight.shape[0], 1)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = nn.Parameter(tensors[f"{name}.bias"], requires_grad=False)
    return layer


def _plain(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _norm(tensors: Mapping[str, Tensor], name: str, size: int) -> nn.LayerNorm:
    layer = nn.LayerNorm(size)
    layer.weight = nn.Parameter(tensors[f"{name}.weight"], requires_grad=False)
    layer.bias = nn.Parameter(tensors[f"{name}.bias"], requires_grad=False)
    return layer
