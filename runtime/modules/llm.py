"""One module per language-model graph of runtime/graphs.py, with inputs and outputs in the order of its GraphSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from runtime.config import ModelConfig
from runtime.modules.frame_sampler import FrameSampler
from runtime.modules.global_transformer import GlobalTransformer
from runtime.modules.load import load_state
from runtime.modules.local_transformer import LocalTransformer


class Prefill(nn.Module):
    """rows, positions, last -> hidden, key_0, value_0, …"""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.global_ = GlobalTransformer(config, max_positions)

    def forward(self, rows: Tensor, positions: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        hidden, new = self.global_.read_rows(rows, positions, last)
        return (hidden, *new)


class Extend(nn.Module):
    """rows, positions, last, cache_mask, past_key_0, … -> hidden, new_key_0, …"""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.global_ = GlobalTransformer(config, max_positions)

    def forward(
        self, rows: Tensor, positions: Tensor, last: Tensor, cache_mask: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        hidden, new = self.global_.read_rows(rows, positions, last, cache_mask, past)
        return (hidden, *new)


class Step(nn.Module):
    """row, position, cache_mask, past_key_0, … -> hidden, new_key_0, …"""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.global_ = GlobalTransformer(config, max_positions)

    def forward(self, row: Tensor, position: Tensor, cache_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        hidden, new = self.global_.read_row(row, position, cache_mask, list(past))
        return (hidden, *new)


class Frame(nn.Module):
    """hidden, seen, uniforms, settings -> go_on, codes, seen_next, slot_logits, code_logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.local = LocalTransformer(config)
        self.global_ = _AudioTable(config)

    def forward(
        self,
        hidden: Tensor,
        seen: Tensor,
        uniforms: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        penalty: Tensor,
    ) -> tuple[Tensor, ...]:
        sampler = FrameSampler(seen, temperature, top_k, top_p, penalty, self.local.ranks, self.local.shape)
        return self.local.frame(hidden, seen, uniforms, sampler, self.global_.audio_table)


class _AudioTable(nn.Module):
    """The one tensor of the global transformer that `frame` needs, under the name it has there."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.n_vq * (config.codebook_size + 1), config.hidden_size)
        self.audio_table = nn.Parameter(torch.empty(shape), requires_grad=False)


class StepFrame(nn.Module):
    """`step`, then `frame` on its hidden state: one launch per frame."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.global_ = GlobalTransformer(config, max_positions)
        self.local = LocalTransformer(config)
        self.num_past = 2 * config.num_layers

    def forward(self, row: Tensor, position: Tensor, cache_mask: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        past, (seen, uniforms, temperature, top_k, top_p, penalty) = rest[: self.num_past], rest[self.num_past :]
        hidden, new = self.global_.read_row(row, position, cache_mask, list(past))
        sampler = FrameSampler(seen, temperature, top_k, top_p, penalty, self.local.ranks, self.local.shape)
        return (hidden, *new, *self.local.frame(hidden, seen, uniforms, sampler, self.global_.audio_table))


def build_llm_module(name: str, config: ModelConfig, state: Mapping[str, Tensor], max_positions: int) -> nn.Module:
    """The module of one graph with its part of the state; `state` may hold more than the graph needs."""
    builders: dict[str, Callable[[], nn.Module]] = {
        "prefill": lambda: Prefill(config, max_positions),
        "step": lambda: Step(config, max_positions),
        "extend": lambda: Extend(config, max_positions),
        "frame": lambda: Frame(config),
        "step_frame": lambda: StepFrame(config, max_positions),
    }
    return load_state(builders[name](), state)
