"""From checkpoint tensors to the state of the transformer modules: every rearrangement of weights, in one place.

All of it is exact algebra on the published weights (MODEL.md sections 2 to 4):

- linear weights [out, in] -> [in, out], so that x @ w needs no transpose
- RoPE rotates neighbours (2j, 2j + 1); permuting the rows of q and k turns the pairs into halves, and q . k stays
- 1 / sqrt(D) goes into q
- the code embeddings become one table with a row of zeros after each codebook, for padded codes
- LayerNorm -> QKV -> RoPE of every possible input of the local transformer's first layer becomes a table
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from runtime.config import ModelConfig

Tensors = Mapping[str, Tensor]


def derive_llm_state(config: ModelConfig, tensors: Tensors, max_positions: int) -> dict[str, Tensor]:
    """The state of `global_` and `local` (names as in modules/llm.py) from canonical checkpoint names, float32."""
    global_state = {
        "wte": tensors["transformer.wte.weight"],
        "audio_table": _audio_table(config, tensors),
        **_rope_state(config, max_positions),
        **_blocks(config, tensors, "transformer", config.num_layers),
    }
    local_blocks = _blocks(config, tensors, "local_transformer", config.local_layers)
    local_rope = _rope_state(config, config.n_vq + 1)
    local_state = {**local_blocks, **local_rope, **_local_tables(config, tensors, local_blocks, local_rope)}
    state = {f"global_.{k}": t for k, t in global_state.items()} | {f"local.{k}": t for k, t in local_state.items()}
    return {name: t.detach().to(torch.float32).contiguous() for name, t in state.items()}


def rope_tables(num_positions: int, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D] in the halves layout: [cos, cos] and [-sin, sin]. Angles in float64."""
    frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], 1).float(), torch.cat([-sin, sin], 1).float()


def _rope_state(config: ModelConfig, num_positions: int) -> dict[str, Tensor]:
    cos, sin = rope_tables(num_positions, config.head_size, config.rope_base)
    return {"rope_cos": cos, "rope_sin": sin}


def _audio_table(config: ModelConfig, tensors: Tensors) -> Tensor:
    parts = []
    for i, size in enumerate(config.codebook_sizes):
        padding = config.codebook_size + 1 - size
        parts.append(functional.pad(tensors[f"audio_embeddings.{i}.weight"].float(), (0, 0, 0, padding)))
    return torch.cat(parts)


def _audio_heads(config: ModelConfig, tensors: Tensors) -> Tensor:
    """[Q, E, V]. Tied to the embeddings or not, a head is a matrix of its own: z @ head then needs no transpose."""
    parts = []
    for i, size in enumerate(config.codebook_sizes):
        head = tensors[f"audio_lm_heads.{i}.weight"].float()
        parts.append(functional.pad(head, (0, 0, 0, config.codebook_size - size)).T)
    return torch.stack(parts)


def _blocks(config: ModelConfig, tensors: Tensors, prefix: str, num_layers: int) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for i in range(num_layers):
        source, target = f"{prefix}.h.{i}", f"layers.{i}"
        for norm in ("ln_1", "ln_2"):
            for part in ("weight", "bias"):
                state[f"{target}.{norm}.{part}"] = tensors[f"{source}.{norm}.{part}"].float()
        for published, ours in (
            ("attn.c_proj", "attention.proj"),
            ("mlp.fc_in", "mlp.fc_in"),
            ("mlp.fc_out", "mlp.fc_out"),
        ):
            state[f"{target}.{ours}.weight"] = tensors[f"{source}.{published}.weight"].float().T
            state[f"{target}.{ours}.bias"] = tensors[f"{source}.{published}.bias"].float()
        weight, bias = tensors[f"{source}.attn.c_attn.weight"].float(), tensors[f"{source}.attn.c_attn.bias"].float()
        order, scale = _qkv_order(config), _qkv_scale(config)
        state[f"{target}.attention.qkv.weight"] = (weight[order] * scale[:, None]).T
        state[f"{target}.attention.qkv.bias"] = bias[order] * scale
    for part in ("weight", "bias"):
        state[f"ln_f.{part}"] = tensors[f"{prefix}.ln_f.{part}"].float()
    return state


def _qkv_order(config: ModelConfig) -> Tensor:
    """Row order of c_attn that turns neighbouring RoPE pairs into halves, for q and k; v stays."""
    d = config.head_size
    head = torch.cat([torch.arange(0, d, 2), torch.arange(1, d, 2)])
    one = torch.cat([h * d + head for h in range(config.num_heads)])
    return torch.cat([one, config.hidden_size + one, 2 * config.hidden_size + torch.arange(config.hidden_size)])


def _qkv_scale(config: ModelConfig) -> Tensor:
    scale = torch.ones(3 * config.hidden_size)
    scale[: config.hidden_size] = 1.0 / math.sqrt(config.head_size)
    return scale


def _local_tables(config: ModelConfig, tensors: Tensors, blocks: Tensors, rope: Tensors) -> dict[str, Tensor]:
    wte = tensors["transformer.wte.weight"].float()
    head = tensors["text_lm_head.weight"].float()
    slot, end = config.audio_assistant_slot_id, config.audio_end_id
    v = config.codebook_size
    slot_qkv = _first_layer_qkv(config, blocks, rope, wte[slot : slot + 1], 1)
    slot_qkv = slot_qkv.reshape(1, 3 * config.num_heads, 1, config.head_size)
    tables = []
    for i in range(config.n_vq - 1):
        embedding = tensors[f"audio_embeddings.{i}.weight"].float()
        padded = functional.pad(embedding, (0, 0, 0, v - len(embedding)))
        tables.append(_first_layer_qkv(config, blocks, rope, padded, i + 2))
    empty = torch.zeros(0, 3 * config.hidden_size)
    return {
        "text_head": head[[slot, end]].T,
        "audio_heads": _audio_heads(config, tensors),
        "slot_row": functional.pad(wte[slot][None, None], (0, 0, 1, 0)),
        "slot_qkv": functional.pad(slot_qkv, (0, 0, 1, 0)),
        "first_qkv": torch.cat(tables) if tables else empty,
    }


def _first_layer_qkv(config: ModelConfig, blocks: Tensors, rope: Tensors, x: Tensor, position: int) -> Tensor:
    """LayerNorm -> QKV -> RoPE at one position, for inputs [N, E] -> [N, 3 E]."""
    x = functional.layer_norm(
        x, (config.hidden_size,), blocks["layers.0.ln_1.weight"], blocks["layers.0.ln_1.bias"], config.layer_norm_eps
    )
    qkv = x @ blocks["layers.0.attention.qkv.weight"] + blocks["layers.0.attention.qkv.bias"]
    heads = qkv.reshape(len(x), 3, config.num_heads, config.head_size)
    qk, half = heads[:, :2], config.head_size // 2
    swapped = torch.cat([qk[..., half:], qk[..., :half]], -1)
    rotated = qk * rope["rope_cos"][position] + swapped * rope["rope_sin"][position]
    return torch.cat([rotated, heads[:, 2:]], 1).reshape(len(x), -1)
