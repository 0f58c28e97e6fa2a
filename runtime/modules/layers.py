"""Building blocks of the global and the local transformer: a pre-LN GPT-2 block with rotary positions.

    a = LN1(x);  q, k, v = heads(a @ W_qkv + b);  q, k = RoPE(q), RoPE(k)
    x = x + softmax(q k^T + mask) v @ W_proj + b
    x = x + gelu_tanh(LN2(x) @ W_in + b) @ W_out + b

Source: MODEL.md section 3. The weights here are the module's *state*: derived once from the checkpoint by
llm_state.py (linear weights as [in, out], RoPE pairs permuted to halves, 1/sqrt(D) folded into q).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.config import ModelConfig
from runtime.modules.scope import label, scope


class Linear(nn.Module):
    """x @ weight [in, out] + bias [out]."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight) + self.bias


class LayerNorm(nn.Module):
    """LayerNorm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)


class Mlp(nn.Module):
    """Two linears around gelu_new, the tanh form of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc_in = Linear(config.hidden_size, config.inner_size)
        self.fc_out = Linear(config.inner_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc_out(functional.gelu(self.fc_in(x), approximate="tanh"))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """RoPE on pairs laid out as halves: x * [cos, cos] + [x2, x1] * [-sin, sin].

    x is [B, heads, T, 2 * half]; cos and sin are [B or 1, 1, T, 2 * half], the sign already in sin
    (llm_state.rope_tables).
    """
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return x * cos + swapped * sin


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, E]."""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """QKV and output projections; how queries meet keys differs per graph and lies with the caller."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.hidden_size = config.num_heads, config.head_size, config.hidden_size
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    @scope("attention")
    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, E] -> q, k, v [B, H, T, D], q and k rotated. q and k rotate together: one set of nodes for both."""
        heads, size = self.num_heads, self.head_size
        qk, v = torch.split(self.qkv(x), [2 * self.hidden_size, self.hidden_size], dim=-1)
        qk = rotate(torch.unflatten(qk, 2, (2 * heads, size)).transpose(1, 2), cos, sin, size // 2)
        q, k = torch.split(qk, [heads, heads], dim=1)
        return q, k, torch.unflatten(v, 2, (heads, size)).transpose(1, 2)

    @scope("attention")
    def project_row(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, E], one row each -> q, k, v [B, H, 1, D]: reshapes alone, nothing moves."""
        qk, v = torch.split(self.qkv(x), [2 * self.hidden_size, self.hidden_size], dim=-1)
        qk = rotate(torch.unflatten(qk, 1, (2 * self.num_heads, 1, self.head_size)), cos, sin, self.head_size // 2)
        q, k = torch.split(qk, [self.num_heads, self.num_heads], dim=1)
        return q, k, torch.unflatten(v, 1, (self.num_heads, 1, self.head_size))


@scope("attention")
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T + mask) v; the scale is already in q. Returns [B, H, T, D]."""
    scores = label(torch.matmul(q, k.transpose(2, 3)), "scores")
    if mask is not None:
        scores = scores + mask
    return label(torch.matmul(torch.softmax(scores, dim=-1), v), "context")


@scope("attention")
def attend_split(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend to the cache and to the new row with one softmax, and without joining them: the past is read, never moved.

    q, k, v [B, H, 1, D]; past_k, past_v [B, H, C, D]; mask [B, 1, 1, C] covers the unused rows of the cache.
    """
    past_scores = label(torch.matmul(q, past_k.transpose(2, 3)), "past_scores") + mask
    new_score = label((q * k).sum(-1, keepdim=True), "new_score")
    weights = torch.softmax(torch.cat([new_score, past_scores], dim=-1), dim=-1)
    new_part = weights[..., :1] * v
    return label(torch.matmul(weights[..., 1:], past_v) + new_part, "context")


@scope("attention")
def attend_behind(
    q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, past_mask: Tensor, mask: Tensor
) -> Tensor:
    """As attend_split for T new rows: q, k, v [B, H, T, D]; mask [B, 1, T, T] is causality among them.

    The softmax is written out over its two parts: taking joined weights apart again would need T as a value.
    """
    past_scores = label(torch.matmul(q, past_k.transpose(2, 3)), "past_scores") + past_mask
    scores = label(torch.matmul(q, k.transpose(2, 3)), "scores") + mask
    largest = torch.maximum(past_scores.amax(-1, keepdim=True), scores.amax(-1, keepdim=True))
    past_weights, weights = torch.exp(past_scores - largest), torch.exp(scores - largest)
    total = past_weights.sum(-1, keepdim=True) + weights.sum(-1, keepdim=True)
    return label(torch.matmul(past_weights / total, past_v) + torch.matmul(weights / total, v), "context")


class Block(nn.Module):
    """One transformer block; `finish` is everything after attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config)
        self.ln_2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = Mlp(config)

    def finish(self, x: Tensor, context: Tensor) -> Tensor:
        """Add the attention output and the MLP; context and x have the same shape."""
        with scope("attention"):
            x = x + self.attention.proj(context)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out
