"""Sampling as part of the graph: the torch twin of runtime/sampling.py, driven by uniform numbers.

Every operation here is one that CANN has an AICore kernel for (ATC_ONNX_ACCEPTANCE.md section 5): comparisons of
floats, Where on float branches, TopK with a constant k, and indices as int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.modules.scope import label, scope
from runtime.sampling import MASKED


class FrameSampler:
    """The settings of one frame, prepared once for all its decisions."""

    def __init__(
        self,
        seen: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        penalty: Tensor,
        ranks: Tensor,
        shape: tuple[int, int],
    ) -> None:
        """seen [B, Q, V]; temperature, top_k, top_p [B, 2]; penalty [B]; ranks int32 [K]; shape (Q, V)."""
        num_codebooks, num_codes = shape
        with scope("settings"):
            self.k = len(ranks)
            self.slot_temperature, self.temperature = temperature[:, :1], temperature[:, 1:]
            self.slot_top_p, self.top_p = top_p[:, :1], top_p[:, 1:]
            self.slot_top_k = top_k[:, :1]
            self.rank_mask = (ranks >= top_k[:, 1:]).to(torch.float32) * MASKED  # [B, K]
            r = penalty.unsqueeze(1).unsqueeze(2)
            divisor = torch.where(seen > 0.0, r, 1.0).flatten(1)  # x / 1 and x * 1 are exact
            self.divisors = torch.split(divisor, [num_codes] * num_codebooks, dim=1)  # [B, V] per codebook

    def decide_slot(self, logits: Tensor, u: Tensor) -> Tensor:
        """logits [B, 2] = [slot, end], u [B, 1] -> go_on int32 [B]."""
        scores = logits / self.slot_temperature
        p_slot = torch.softmax(scores, dim=-1)[:, :1]
        p_best = torch.maximum(p_slot, 1.0 - p_slot)
        best_alone = torch.logical_or(self.slot_top_k <= 1, p_best >= self.slot_top_p).to(torch.float32)
        slot_is_best = (scores[:, :1] >= scores[:, 1:]).to(torch.float32)
        drawn = (u <= p_slot).to(torch.float32)
        go_on = best_alone * slot_is_best + (1.0 - best_alone) * drawn
        return go_on.to(torch.int32).squeeze(1)

    def choose_code(self, logits: Tensor, codebook: int, u: Tensor) -> Tensor:
        """logits [B, V], u [B, 1] -> code int32 [B, 1]."""
        divisor = self.divisors[codebook]
        scores = label(torch.where(logits < 0.0, logits * divisor, logits / divisor) / self.temperature, "scores")
        best, ids = torch.topk(scores, self.k, dim=-1)
        best = best + self.rank_mask
        p = torch.softmax(best, dim=-1)
        before = torch.cumsum(p, dim=-1) - p
        kept = torch.where(before < self.top_p, best, MASKED)
        cdf = torch.cumsum(torch.softmax(kept, dim=-1), dim=-1)
        reached = torch.minimum(u, cdf.amax(-1, keepdim=True))  # rounding may leave the whole sum below u
        # summed as floats: 310P has no AICore kernel that sums integers
        index = (cdf < reached).to(torch.float32).sum(-1, keepdim=True).long()
        return label(torch.gather(ids, 1, index).to(torch.int32), "code")
