"""The global transformer over rows: `prefill` reads the prompt, `step` one more row against the cache, `extend` both.

A row is [text_id, code_0 … code_{Q-1}]; its embedding is wte[text_id] + sum of the code embeddings, a padded code
contributing nothing (MODEL.md section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.config import ModelConfig
from runtime.modules.layers import Block, LayerNorm, attend, attend_behind, attend_split, merge_heads
from runtime.modules.scope import label, scope
from runtime.sampling import MASKED


class GlobalTransformer(nn.Module):
    """State and the three things that graphs do with it: embed, read a prompt, read a row."""

    code_offsets: Tensor
    pad_row: Tensor

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        v, q = config.codebook_size, config.n_vq
        self.wte = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        # [Q * (V + 1), E]: the codebooks one after the other, each followed by a row of zeros for padded codes
        self.audio_table = nn.Parameter(torch.empty(q * (v + 1), config.hidden_size), requires_grad=False)
        self.rope_cos = nn.Parameter(torch.empty(max_positions, config.head_size), requires_grad=False)
        self.rope_sin = nn.Parameter(torch.empty(max_positions, config.head_size), requires_grad=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.register_buffer("pad_row", torch.tensor(v, dtype=torch.int32), persistent=False)
        self.register_buffer("code_offsets", torch.arange(q, dtype=torch.int32) * (v + 1), persistent=False)

    def embed(self, rows: Tensor) -> Tensor:
        """rows int32 [B, T, 1 + Q] -> [B, T, E]."""
        with scope("embed"):
            text = functional.embedding(rows[:, :, 0], self.wte)
            index = torch.minimum(rows[:, :, 1:], self.pad_row) + self.code_offsets
            return text + functional.embedding(index, self.audio_table).sum(2)

    @scope("global")
    def read_rows(
        self,
        rows: Tensor,
        positions: Tensor,
        last: Tensor,
        cache_mask: Tensor | None = None,
        past: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """All rows at once; return hidden [B, E] of the row at position `last`, and key, value [B, H, T, D] per layer.

        With a cache (past key, value [B, H, C, D] per layer) the rows stand behind what it holds. The last block needs
        keys and values of all rows, but everything after them of one row only.
        """
        x = self.embed(rows)
        with scope("masks"):
            cos, sin = self._rope(positions)
            later = positions.unsqueeze(1) > positions.unsqueeze(2)  # [B, T, T]: key behind query
            mask = later.to(torch.float32).unsqueeze(1) * MASKED
            is_last = (positions == last.unsqueeze(1)).to(torch.float32)
            pick = is_last.unsqueeze(1)  # [B, 1, T]: a product with it picks the last row, exactly
            pick_head = pick.unsqueeze(1)
        new: list[Tensor] = []
        for i, block in enumerate(self.layers):
            assert isinstance(block, Block)
            with scope(f"layer_{i:02d}"):
                q, k, v = block.attention.project(block.ln_1(x), cos, sin)
                new += [k, v]
                if i == len(self.layers) - 1:
                    with scope("last_row"):
                        x, q, layer_mask = (
                            torch.matmul(pick, x),
                            torch.matmul(pick_head, q),
                            torch.matmul(pick_head, mask),
                        )
                else:
                    layer_mask = mask
                if cache_mask is None:
                    context = attend(q, k, v, layer_mask)
                else:
                    context = attend_behind(q, past[2 * i], past[2 * i + 1], k, v, cache_mask, layer_mask)
                x = block.finish(x, merge_heads(context))
        return self.ln_f(x.squeeze(1)), new

    @scope("global")
    def read_row(
        self, row: Tensor, position: Tensor, cache_mask: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """One row; return hidden [B, E] and the new key, value [B, H, 1, D] of every layer."""
        x = self.embed(row).squeeze(1)
        with scope("masks"):
            cos, sin = self._rope(position.unsqueeze(1))
        new: list[Tensor] = []
        for i, block in enumerate(self.layers):
            assert isinstance(block, Block)
            with scope(f"layer_{i:02d}"):
                q, k, v = block.attention.project_row(block.ln_1(x), cos, sin)
                new += [k, v]
                context = attend_split(q, past[2 * i], past[2 * i + 1], k, v, cache_mask)
                x = block.finish(x, context.flatten(1))
        return self.ln_f(x), new

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, T, D] of int32 positions [B, T]."""
        cos = label(functional.embedding(positions, self.rope_cos).unsqueeze(1), "cos")
        sin = label(functional.embedding(positions, self.rope_sin).unsqueeze(1), "sin")
        return cos, sin
