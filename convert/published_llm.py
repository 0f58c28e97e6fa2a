"""The language model in the interface of the published ONNX package, as torch modules (MODEL.md 3 to 5.6).

Written from the specification, to make packages for tests and as the official loop for benchmarks. Nothing here is
rearranged for speed: keys lie as [B, T, H, D], the cache grows by Concat, every layer computes its own RoPE with
Einsum and strided slices, the text head has its whole vocabulary. `runtime/modules` is how this project does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from runtime.config import ModelConfig

# Constants that the published fixed_sampled_frame graph holds (MODEL.md 5.4).
TEMPERATURE, TOP_K, TOP_P, PENALTY, LARGEST_UNIFORM = 0.8, 25, 0.95, 1.2, 0.99999994
Caches = list[Tensor]  # key_0, value_0, key_1, …
Mask = Callable[[], Tensor]  # built again in every layer, as upstream does


class PublishedLlm(nn.Module):
    """All weights under their published names; the graphs below share one instance."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.wte = embedding_table(tensors["transformer.wte.weight"])
        self.audio_embeddings = nn.ModuleList(
            embedding_table(tensors[f"audio_embeddings.{i}.weight"]) for i in range(config.n_vq)
        )
        self.text_lm_head = _linear(tensors["text_lm_head.weight"])
        self.audio_lm_heads = nn.ModuleList(
            _linear(tensors[f"audio_lm_heads.{i}.weight"]) for i in range(config.n_vq)
        )
        self.transformer = _Transformer(config, tensors, "transformer", config.num_layers)
        self.local_transformer = _Transformer(config, tensors, "local_transformer", config.local_layers)

    def embed_rows(self, rows: Tensor) -> Tensor:
        """rows [B, T, 1 + n_vq]: text embedding plus the embeddings of the codes that are not padding."""
        ids = rows.long()
        x: Tensor = self.wte(ids[..., 0])
        for channel, table in enumerate(self.audio_embeddings):
            codes = ids[..., channel + 1]
            real = codes != self.config.audio_pad_id
            embedded = table(torch.where(real, codes, torch.zeros_like(codes)))
            x = x + embedded * real.unsqueeze(2).to(embedded.dtype)
        return x

    def all_audio_logits(self, hidden: Tensor) -> Tensor:
        """[B, 1, E] -> [B, n_vq, V]: every head on the same state, as the cached step does."""
        return torch.stack([head(hidden).squeeze(1) for head in self.audio_lm_heads], dim=1)


class PublishedPrefill(nn.Module):
    def __init__(self, llm: PublishedLlm) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        valid = attention_mask.bool()
        positions = (attention_mask.long().cumsum(1) - 1).masked_fill(~valid, 0)

        def allowed() -> Tensor:
            order = torch.arange(input_ids.shape[1])
            return ((order[None, :] <= order[:, None])[None] & valid[:, None, :]).unsqueeze(1)

        rows_count = valid.unsqueeze(2).to(torch.float32)
        x = self.llm.embed_rows(input_ids) * rows_count
        hidden, caches = self.llm.transformer(x, positions, allowed, None, rows_count)
        return (hidden, *caches)


class PublishedDecodeStep(nn.Module):
    def __init__(self, llm: PublishedLlm) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, input_ids: Tensor, past_valid_lengths: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        hidden, caches = _cached(
            self.llm.transformer, self.llm.embed_rows(input_ids), past_valid_lengths.long(), list(past)
        )
        return (hidden, *caches)


class PublishedLocalDecoder(nn.Module):
    """All 1 + n_vq local positions in one pass over given codes."""

    def __init__(self, llm: PublishedLlm) -> None:
        super().__init__()
        self.llm = llm

    def forward(
        self, global_hidden: Tensor, text_token_id: Tensor, audio_prefix_token_ids: Tensor
    ) -> tuple[Tensor, ...]:
        llm, prefix = self.llm, audio_prefix_token_ids.long()
        inputs = [global_hidden, llm.wte(text_token_id.long())]
        for channel in range(llm.config.n_vq - 1):
            codes = prefix[:, channel]
            real = codes != llm.config.audio_pad_id
            embedded = llm.audio_embeddings[channel](torch.where(real, codes, torch.zeros_like(codes)))
            inputs.append(embedded * real.unsqueeze(1).to(embedded.dtype))
        x = torch.stack(inputs, dim=1)
        order = torch.arange(llm.config.n_vq + 1)
        causal = (order[None, :] <= order[:, None])[None, None]
        hidden, _ = llm.local_transformer(x, order[None], lambda: causal, None, None)
        logits = [head(hidden[:, i + 1 : i + 2])[:, 0] for i, head in enumerate(llm.audio_lm_heads)]
        return llm.text_lm_head(hidden[:, :1])[:, 0], torch.stack(logits, dim=1)


class PublishedLocalCachedStep(nn.Module):
    """One local position; `step_type` says which of the three inputs it reads: hidden, text token, code."""

    def __init__(self, llm: PublishedLlm) -> None:
        super().__init__()
        self.llm = llm

    def forward(
        self,
        global_hidden: Tensor,
        text_token_id: Tensor,
        audio_token_id: Tensor,
        channel_index: Tensor,
        step_type: Tensor,
        past_valid_lengths: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        llm = self.llm
        code, channel, kind = audio_token_id.long(), channel_index.long(), step_type.long()
        audio = torch.zeros_like(global_hidden)
        for index, table in enumerate(llm.audio_embeddings):
            audio = audio + table(code) * (channel == index).unsqueeze(1).to(audio.dtype)
        x = torch.where((kind == 1).unsqueeze(1), llm.wte(text_token_id.long()), global_hidden)
        x = torch.where((kind == 2).unsqueeze(1), audio, x)
        hidden, caches = _cached(llm.local_transformer, x.unsqueeze(1), past_valid_lengths.long(), list(past))
        return (llm.text_lm_head(hidden).squeeze(1), llm.all_audio_logits(hidden), *caches)


class PublishedFixedFrame(nn.Module):
    """One whole frame with explicit uniforms: 1 + n_vq cached local steps, unrolled."""

    def __init__(self, llm: PublishedLlm) -> None:
        super().__init__()
        self.llm = llm

    def forward(
        self, global_hidden: Tensor, repetition_seen_mask: Tensor, assistant_random_u: Tensor, audio_random_u: Tensor
    ) -> tuple[Tensor, ...]:
        llm, config = self.llm, self.llm.config
        hidden, caches = self._step(global_hidden, 0, [])
        logits = llm.text_lm_head(hidden).squeeze(1)
        slot, end = config.audio_assistant_slot_id, config.audio_end_id
        candidates = torch.cat([logits[:, slot : slot + 1], logits[:, end : end + 1]], dim=1)
        goes_on = assistant_random_u[:, None].clamp(0.0, LARGEST_UNIFORM) <= torch.softmax(candidates, 1)[:, :1]
        token = torch.where(goes_on, torch.tensor(slot), torch.tensor(end)).squeeze(1)
        x = llm.wte(token)
        codes: list[Tensor] = []
        for channel, head in enumerate(llm.audio_lm_heads):
            hidden, caches = self._step(x, channel + 1, caches)
            uniform = audio_random_u[:, channel : channel + 1]
            codes.append(_choose(head(hidden).squeeze(1), repetition_seen_mask[:, channel], uniform))
            if channel + 1 < config.n_vq:
                x = llm.audio_embeddings[channel](codes[-1])
        return goes_on.to(torch.int32), torch.stack(codes, 1).to(torch.int32)

    def _step(self, x: Tensor, position: int, caches: Caches) -> tuple[Tensor, Caches]:
        lengths = torch.zeros_like(x[:, 0], dtype=torch.long) + position
        return _cached(self.llm.local_transformer, x.unsqueeze(1), lengths, caches)


def _choose(logits: Tensor, seen: Tensor, uniform: Tensor) -> Tensor:
    """MODEL.md 5.4: penalty, temperature, top-k, top-p, inverse CDF."""
    used = torch.where(logits < 0, logits * PENALTY, logits / PENALTY)
    scores = torch.where(seen > 0, used, logits) / TEMPERATURE
    k = min(TOP_K, logits.shape[1])
    kept, ids = torch.topk(scores, k, dim=1)
    probabilities = torch.softmax(kept, 1)
    inside = (probabilities.cumsum(1) - probabilities) < TOP_P
    cdf = torch.softmax(kept.masked_fill(~inside, float("-inf")), 1).cumsum(1)
    index = (cdf < uniform.clamp(0.0, LARGEST_UNIFORM)).to(torch.int64).sum(1, keepdim=True).clamp(max=k - 1)
    return torch.gather(ids, 1, index).squeeze(1)


def _cached(transformer: nn.Module, x: Tensor, lengths: Tensor, past: Caches) -> tuple[Tensor, Caches]:
    """New rows behind the past. Right only when the past holds exactly `lengths` rows (MODEL.md 5.6)."""
    steps = torch.arange(x.shape[1])
    positions = lengths[:, None] + steps[None]

    def allowed() -> Tensor:
        keys = torch.arange(x.shape[1] + (past[0].shape[1] if past else 0))
        valid = keys[None] < (lengths[:, None] + x.shape[1])
        return (valid[:, None, :] & (keys[None, None, :] <= positions[:, :, None])).unsqueeze(1)

    hidden, caches = transformer(x, positions, allowed, past, None)
    return hidden, caches


class _Transformer(nn.Module):
    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], prefix: str, num_layers: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(_Block(config, tensors, f"{prefix}.h.{i}") for i in range(num_layers))
        self.ln_f = _norm(tensors, f"{prefix}.ln_f", config)

    def forward(
        self, x: Tensor, positions: Tensor, allowed: Mask, past: Caches | None, rows_count: Tensor | None
    ) -> tuple[Tensor, Caches]:
        caches: Caches = []
        for layer, block in enumerate(self.h):
            x, key, value = block(x, positions, allowed, past[2 * layer : 2 * layer + 2] if past else [])
            caches += [key, value]
            if rows_count is not None:
                x = x * rows_count
        x = self.ln_f(x)
        return (x if rows_count is None else x * rows_count), caches


class _Block(nn.Module):
    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self.num_heads, self.head_size = config.num_heads, config.head_size
        self.ln_1, self.ln_2 = _norm(tensors, f"{name}.ln_1", config), _norm(tensors, f"{name}.ln_2", config)
        self.c_attn, self.c_proj, self.fc_in, self.fc_out = (
            _linear(tensors[f"{name}.{part}.weight"], tensors[f"{name}.{part}.bias"])
            for part in ("attn.c_attn", "attn.c_proj", "mlp.fc_in", "mlp.fc_out")
        )
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        self.frequencies = 1.0 / (config.rope_base**exponents)  # no parameter: a Constant in the graph, as published

    def forward(self, x: Tensor, positions: Tensor, allowed: Mask, past: Caches) -> tuple[Tensor, Tensor, Tensor]:
        batch, length = x.shape[:2]
        size = self.num_heads * self.head_size
        q, k, v = (
            part.view(batch, length, self.num_heads, self.head_size)
            for part in self.c_attn(self.ln_1(x)).split(size, dim=2)
        )
        cos, sin = rope_angles(positions, self.frequencies)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        scores = torch.matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1)) * (1.0 / math.sqrt(self.head_size))
        scores = scores.masked_fill(~allowed(), torch.finfo(torch.float32).min)
        context = torch.matmul(torch.softmax(scores, dim=3), v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        x = x + self.c_proj(context.reshape(batch, length, size))
        u = self.fc_in(self.ln_2(x))
        gelu = 0.5 * u * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (u + 0.044715 * torch.pow(u, 3.0))))
        return x + self.fc_out(gelu), k, v


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, D]; neighbours (2j, 2j + 1) share an angle."""
    angles = torch.einsum("bs,d->bsd", positions.to(torch.float32), frequencies)
    cos, sin = (turn.repeat_interleave(2, dim=2).unsqueeze(2) for turn in (angles.cos(), angles.sin()))
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved RoPE: y[2j] = x[2j] cos - x[2j+1] sin, y[2j+1] = x[2j+1] cos + x[2j] sin."""
    even, odd = x[:, :, :, 0::2], x[:, :, :, 1::2]
    turned = torch.cat([-odd.unsqueeze(4), even.unsqueeze(4)], dim=4).view(x.shape)
    return x * cos + turned * sin


def embedding_table(weight: Tensor) -> nn.Embedding:
    """An embedding over a tensor that is there already."""
    table = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    table.weight = nn.Parameter(weight, requires_grad=False)
    return table


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _norm(tensors: Mapping[str, Tensor], name: str, config: ModelConfig) -> nn.LayerNorm:
    layer = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
    layer.weight = nn.Parameter(tensors[f"{name}.weight"], requires_grad=False)
    layer.bias = nn.Parameter(tensors[f"{name}.bias"], requires_grad=False)
    return layer

