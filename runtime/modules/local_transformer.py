"""The local transformer: from one hidden state to the decision and the Q codes of one frame (MODEL.md section 4).

    position 0      input: hidden                      -> slot decision
    position 1      input: wte[slot]                   -> code 0
    position i + 2  input: embedding of code i         -> code i + 1

Unrolled, with the work that cannot matter left out; all of it is exact algebra, so codes stay the same:

- Positions 0 and 1 have no choice between them: one pass of two rows.
- Only two rows of the text head are compared: [slot, end].
- The first layer sees only Q x V + 1 different inputs behind position 0, each at a fixed position: LayerNorm -> QKV ->
  RoPE of them is a table (`first_qkv`, `slot_qkv`) built once by llm_state.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.config import ModelConfig
from runtime.modules.frame_sampler import FrameSampler
from runtime.modules.layers import Block, LayerNorm, attend, merge_heads
from runtime.modules.scope import label, scope
from runtime.sampling import MASKED, TOP_K_MAX

Cache = list[tuple[Tensor, Tensor]]


class LocalTransformer(nn.Module):
    """State and the unrolled pass over the positions of one frame."""

    ranks: Tensor
    code_ids: Tensor
    two_row_mask: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.shape = (config.n_vq, config.codebook_size)
        e, v, q, positions = config.hidden_size, config.codebook_size, config.n_vq, config.n_vq + 1
        self.layers = nn.ModuleList(Block(config) for _ in range(config.local_layers))
        self.ln_f = LayerNorm(e, config.layer_norm_eps)
        self.text_head = _parameter(e, 2)  # columns of the text head: slot, end
        self.audio_heads = _parameter(q, e, v)
        self.slot_row = _parameter(1, 2, e)  # row 0 zeros, row 1 the embedding of the slot token
        self.slot_qkv = _parameter(1, 3 * config.num_heads, 2, config.head_size)  # row 0 zeros, row 1 at position 1
        self.first_qkv = _parameter((q - 1) * v, 3 * e)  # code c of codebook i at position i + 2
        self.rope_cos = _parameter(positions, config.head_size)
        self.rope_sin = _parameter(positions, config.head_size)
        causal = torch.tensor([[0.0, MASKED], [0.0, 0.0]])
        self.register_buffer("two_row_mask", causal[None, None], persistent=False)
        self.register_buffer("ranks", torch.arange(min(TOP_K_MAX, v), dtype=torch.int32), persistent=False)
        self.register_buffer("code_ids", torch.arange(v, dtype=torch.int32), persistent=False)

    @scope("local")
    def frame(
        self, hidden: Tensor, seen: Tensor, uniforms: Tensor, sampler: FrameSampler, audio_table: Tensor
    ) -> tuple[Tensor, ...]:
        """hidden [B, E] -> go_on [B], codes [B, Q], seen_next, slot_logits [B, 2], code_logits [B, Q, V].

        `audio_table` is the global transformer's.
        """
        q, v = self.config.n_vq, self.config.codebook_size
        with scope("position_00_01"):
            z0, z1, cache = self._first_two(hidden)
            slot_logits = label(torch.matmul(z0, self.text_head), "slot_logits")
            draws = torch.split(uniforms, [1] * (q + 1), dim=1)
            go_on = sampler.decide_slot(slot_logits, draws[0])
        codes: list[Tensor] = []
        logits: list[Tensor] = []
        z = z1
        for i in range(q):
            if i:
                with scope(f"position_{i + 1:02d}"):
                    table = audio_table[(i - 1) * (v + 1) : (i - 1) * (v + 1) + v]
                    z = self._next(codes[-1], i, table, cache)
            with scope(f"code_{i:02d}"):
                scores = self._cut(label(torch.matmul(z, self.audio_heads[i]), "logits"), i)  # [B, V]
                codes.append(sampler.choose_code(scores, i, draws[i + 1]))
                logits.append(scores)
        with scope("frame"):
            all_codes = torch.cat(codes, dim=1)
            chosen = (all_codes.unsqueeze(2) == self.code_ids).to(torch.float32)
            seen_next = torch.maximum(seen, chosen)
            return go_on, all_codes, seen_next, slot_logits, torch.stack(logits, dim=1)

    def _first_two(self, hidden: Tensor) -> tuple[Tensor, Tensor, Cache]:
        """Positions 0 and 1 in one pass: the hidden state, and the embedding of the slot token."""
        heads, size = self.config.num_heads, self.config.head_size
        x = functional.pad(hidden.unsqueeze(1), (0, 0, 0, 1)) + self.slot_row
        cache: Cache = []
        for i, block in enumerate(self.layers):
            assert isinstance(block, Block)
            with scope(f"layer_{i:02d}"):
                if i == 0:  # RoPE at position 0 changes nothing; position 1 comes from the table
                    qkv = torch.unflatten(block.attention.qkv(block.ln_1(hidden)), 1, (3 * heads, 1, size))
                    qkv = functional.pad(qkv, (0, 0, 0, 1)) + self.slot_qkv
                    q, k, v = torch.split(qkv, [heads, heads, heads], dim=1)
                else:
                    q, k, v = block.attention.project(block.ln_1(x), self.rope_cos[:2], self.rope_sin[:2])
                cache.append((k, v))
                x = block.finish(x, merge_heads(attend(q, k, v, self.two_row_mask)))
        z = self.ln_f(x)
        return z[:, 0], z[:, 1], cache

    def _next(self, code: Tensor, i: int, table: Tensor, cache: Cache) -> Tensor:
        """Position i + 1: read code [B, 1] of codebook i - 1; extend the cache; return z [B, E]."""
        heads, size, v = self.config.num_heads, self.config.head_size, self.config.codebook_size
        code = code.squeeze(1)
        x = functional.embedding(code, table)
        for layer, block in enumerate(self.layers):
            assert isinstance(block, Block)
            with scope(f"layer_{layer:02d}"):
                if layer == 0:
                    first = functional.embedding(code, self.first_qkv[(i - 1) * v : i * v])
                    q, k, value = torch.split(
                        torch.unflatten(first, 1, (3 * heads, 1, size)), [heads, heads, heads], dim=1
                    )
                else:
                    at = slice(i + 1, i + 2)
                    q, k, value = block.attention.project_row(block.ln_1(x), self.rope_cos[at], self.rope_sin[at])
                keys = torch.cat([cache[layer][0], k], dim=2)
                values = torch.cat([cache[layer][1], value], dim=2)
                cache[layer] = (keys, values)
                x = block.finish(x, attend(q, keys, values, None).flatten(1))
        z: Tensor = self.ln_f(x)
        return z

    def _cut(self, scores: Tensor, codebook: int) -> Tensor:
        """Make the codes that a smaller codebook does not have unreachable."""
        missing = self.config.codebook_size - self.config.codebook_sizes[codebook]
        if not missing:
            return scores
        mask = torch.zeros(self.config.codebook_size, device=self.rope_cos.device)
        mask[-missing:] = MASKED
        return scores + mask


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
