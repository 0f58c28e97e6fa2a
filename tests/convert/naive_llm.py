"""The language model written out naively from MODEL.md 3 and 4: no cache, no folding, one row after the other.

An independent reference for tests: it shares no code with runtime/modules. Slow and readable on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig

Array = npt.NDArray[np.float64]
Weights = Mapping[str, Array]
Choose = Callable[[int, Array, list[int]], int]  # (channel, logits, codes seen on it) -> code


def layer_norm(x: Array, w: Weights, name: str, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu_new(u: Array) -> Array:
    return 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))


def linear(x: Array, w: Weights, name: str) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def rope(x: Array, base: float) -> Array:
    """x [heads, T, D]; the pairs are neighbours (2j, 2j+1)."""
    D = x.shape[-1]
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles), np.sin(angles)
    turned = np.empty_like(x)
    turned[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    turned[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
    return turned


def transformer(x: Array, w: Weights, name: str, num_layers: int, config: ModelConfig) -> Array:
    """x [T, E] -> the states after the last norm [T, E]; attention is causal."""
    T, E = x.shape
    future = np.triu(np.ones((T, T), bool), 1)
    for layer in range(num_layers):
        block = f"{name}.h.{layer}"
        qkv = linear(layer_norm(x, w, f"{block}.ln_1", config.layer_norm_eps), w, f"{block}.attn.c_attn")
        q, k, v = (p.reshape(T, config.num_heads, config.head_size).transpose(1, 0, 2) for p in np.split(qkv, 3, -1))
        scores = rope(q, config.rope_base) @ rope(k, config.rope_base).transpose(0, 2, 1) / np.sqrt(config.head_size)
        scores = np.where(future, -np.inf, scores)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (powers / powers.sum(-1, keepdims=True)) @ v
        x = x + linear(mixed.transpose(1, 0, 2).reshape(T, E), w, f"{block}.attn.c_proj")
        inner = gelu_new(linear(layer_norm(x, w, f"{block}.ln_2", config.layer_norm_eps), w, f"{block}.mlp.fc_in"))
        x = x + linear(inner, w, f"{block}.mlp.fc_out")
    return layer_norm(x, w, f"{name}.ln_f", config.layer_norm_eps)


def embed(rows: npt.NDArray[np.integer], w: Weights, config: ModelConfig) -> Array:
    """rows [T, 1 + n_vq] -> [T, E]; a pad code adds nothing."""
    x = w["transformer.wte.weight"][rows[:, 0]]
    for channel in range(config.n_vq):
        codes = rows[:, 1 + channel]
        real = codes != config.audio_pad_id
        x = x + np.where(real[:, None], w[f"audio_embeddings.{channel}.weight"][np.where(real, codes, 0)], 0)
    return x


@dataclass
class Decision:
    """One frame: logits [slot, end], and when it goes on the codes with the raw logits of each channel."""

    hidden: Array
    slot_logits: Array
    codes: list[int]
    code_logits: list[Array]


def generate(
    rows: npt.NDArray[np.integer],
    weights: Mapping[str, npt.NDArray[np.floating]],
    config: ModelConfig,
    choose: Choose,
    go_on: Callable[[Array], bool] = lambda slot_logits: bool(slot_logits[0] >= slot_logits[1]),
    max_frames: int = 100,
) -> list[Decision]:
    """Decode until the end token wins; the last decision of a stopped run has no codes."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    decisions: list[Decision] = []
    seen: list[list[int]] = [[] for _ in range(config.n_vq)]
    while len(decisions) < max_frames:
        hidden = transformer(embed(rows, w, config), w, "transformer", config.num_layers, config)[-1]
        inputs = [hidden]
        z = transformer(np.array(inputs), w, "local_transformer", config.local_layers, config)[-1]
        slot_logits = w["text_lm_head.weight"][[config.audio_assistant_slot_id, config.audio_end_id]] @ z
        decision = Decision(hidden, slot_logits, [], [])
        decisions.append(decision)
        if not go_on(slot_logits):
            break
        inputs.append(w["transformer.wte.weight"][config.audio_assistant_slot_id])
        for channel in range(config.n_vq):
            z = transformer(np.array(inputs), w, "local_transformer", config.local_layers, config)[-1]
            logits = w[f"audio_lm_heads.{channel}.weight"] @ z
            code = choose(channel, logits, seen[channel])
            seen[channel].append(code)
            decision.codes.append(code)
            decision.code_logits.append(logits)
            inputs.append(w[f"audio_embeddings.{channel}.weight"][code])
        row = np.array([[config.audio_assistant_slot_id, *decision.codes]])
        rows = np.concatenate([rows, row])
    return decisions


def greedy(penalty: float = 1.0) -> Choose:
    """The best code after the repetition penalty; the lowest index on ties."""

    def choose(channel: int, logits: Array, seen: list[int]) -> int:
        scores = logits.copy()
        for code in set(seen):
            scores[code] = scores[code] * penalty if scores[code] < 0 else scores[code] / penalty
        return int(scores.argmax())

    return choose
