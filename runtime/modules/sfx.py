"""MOSS-SoundEffect's language model in PyTorch: blocks of Qwen3 layers with a fixed-capacity cache, and the heads.

    per layer:  x = x + o(attention(rope(norm_q(q)), rope(norm_k(k)), v));   x = x + down(silu(gate) * up)
    RMSNorm(x, w) = x / sqrt(mean(x * x) + eps) * w

Three float32 islands stay when the weights are bfloat16 or float16: the residual stream with its norms (Qwen3's
residual grows beyond what float16 holds), RoPE, and the softmax. Matrices are stored [in, out]; on the host they are
transposed views of the mapped checkpoint, so nothing is copied. The scale D^-0.5 is folded into the weight of norm_q.

Key/value heads are never repeated: the H / G query heads that share one are laid out as more rows of the same matrix.
Only the scores of past and new rows are joined, for one softmax: the cache is read once and never moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.modules.scope import label, scope
from runtime.sfx.config import SfxConfig

LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LAYER_NORMS = ("norm_1", "norm_2", "norm_q", "norm_k")


class _State(nn.Module):
    """A module whose weights come by name from a mapping, as they are."""

    def __init__(self, names: Sequence[str], state: Mapping[str, Tensor], prefix: str = "") -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(state[prefix + name], requires_grad=False))


class SfxLayer(_State):
    """One Qwen3 layer over R new rows and C cached ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm_1: Tensor
    norm_2: Tensor
    norm_q: Tensor
    norm_k: Tensor

    def __init__(
        self, config: SfxConfig, state: Mapping[str, Tensor], prefix: str = "", num_rows: int | None = None
    ) -> None:
        """`num_rows`: R of a traced layer, which cannot read a shape."""
        super().__init__(LAYER_MATRICES + LAYER_NORMS, state, prefix)
        self.eps, self.num_rows = config.rms_norm_eps, num_rows
        self.kv_heads, self.group, self.head_size = config.num_kv_heads, config.heads_per_kv, config.head_size

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache_mask: Tensor, row_mask: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x float32 [B, R, E], key and value [B, G, C, D] -> x, new key, new value [B, G, R, D]."""
        dtype, num_rows = self.q.dtype, self.num_rows or x.shape[1]
        y = rms_norm(x, self.norm_1, self.eps).to(dtype)
        with scope("attention"):
            query = self._rotated(y @ self.q, self.group, self.norm_q, cos, sin).to(dtype)
            new_key = self._rotated(y @ self.k, 1, self.norm_k, cos, sin).to(dtype)
            new_value = torch.unflatten(y @ self.v, 2, (self.kv_heads, self.head_size)).transpose(1, 2)
            mixed = attention(query, key, value, cache_mask, new_key, new_value, row_mask, num_rows)
            mixed = torch.unflatten(mixed, 2, (self.group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 4)
            x = x + (mixed @ self.o).to(torch.float32)
        with scope("feed_forward"):
            y = rms_norm(x, self.norm_2, self.eps).to(dtype)
            y = functional.silu(y @ self.gate) * (y @ self.up)
            return x + (y @ self.down).to(torch.float32), new_key, new_value

    def _rotated(self, x: Tensor, group: int, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, R, G g D] -> RMSNorm per head -> RoPE on halves -> float32 [B, G, g R, D]."""
        x = torch.unflatten(x, 2, (self.kv_heads, group, self.head_size)).to(torch.float32)
        x = rms_norm(x, weight, self.eps).permute(0, 2, 3, 1, 4)
        half = self.head_size // 2
        swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
        return (x * cos + swapped * sin).flatten(2, 3)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis, in float32."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def attention(
    q: Tensor, key: Tensor, value: Tensor, cache_mask: Tensor, new_key: Tensor, new_value: Tensor, row_mask: Tensor,
    num_rows: int,
) -> Tensor:  # fmt: skip
    """q [B, G, g R, D] against the new rows [B, G, R, D] and the cache [B, G, C, D]: one softmax over both."""
    new = label(q @ new_key.transpose(2, 3), "new_scores").to(torch.float32) + row_mask
    past = label(q @ key.transpose(2, 3), "past_scores").to(torch.float32) + cache_mask
    share = torch.softmax(torch.cat([new, past], dim=-1), dim=-1).to(q.dtype)
    return share[..., :num_rows] @ new_value + share[..., num_rows:] @ value


class SfxBlock(nn.Module):
    """Consecutive layers as one graph; the block that ends the model applies the final norm."""

    def __init__(
        self, config: SfxConfig, state: Mapping[str, Tensor], num_layers: int, ends: bool, num_rows: int
    ) -> None:
        """`state`: layers.0.q … of this block, and norm.weight when it ends the model."""
        super().__init__()
        self.layers = nn.ModuleList(SfxLayer(config, state, f"layers.{i}.", num_rows) for i in range(num_layers))
        self.norm = SfxNorm(config, state, "norm.") if ends else None

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, cache_mask: Tensor, row_mask: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """`past`, and the new rows that come back, are key, value of the first layer, of the second, …"""
        new: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            hidden, key, value = layer(hidden, cos, sin, cache_mask, row_mask, past[2 * i], past[2 * i + 1])
            new += [key, value]
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden, *new


class SfxNorm(_State):
    """The norm behind the last layer."""

    weight: Tensor

    def __init__(self, config: SfxConfig, state: Mapping[str, Tensor], prefix: str = "") -> None:
        super().__init__(("weight",), state, prefix)
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SfxInsideHeads(_State):
    """What can follow inside audio: two slot logits and the codes of all codebooks (the pad code has no column)."""

    slots: Tensor  # [E, 2]
    codes: Tensor  # [E, n_vq V]

    def __init__(self, config: SfxConfig, state: Mapping[str, Tensor]) -> None:
        super().__init__(("slots", "codes"), state)
        self.shape = (config.n_vq, config.codebook_size)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden float32 [B, E] -> slot_logits [B, 2], code_logits [B, n_vq, V]."""
        hidden = hidden.to(self.codes.dtype)
        slots, codes = hidden @ self.slots, hidden @ self.codes
        return slots.to(torch.float32), torch.unflatten(codes, 1, self.shape).to(torch.float32)


class SfxTextHead(_State):
    """The whole text head, for the few rows outside audio."""

    text: Tensor  # [E, vocabulary]

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__(("text",), state)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden float32 [B, E] -> text_logits [B, vocabulary]."""
        return (hidden.to(self.text.dtype) @ self.text).to(torch.float32)
