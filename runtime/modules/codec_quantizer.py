"""The residual quantizer, folded: everything between codes and latents that is affine is one product (MODEL.md 6.3).

Each codebook row carries a 1 behind its values, so that one matrix holds W_q and b_q, and the row behind the last code
is zero: the code `codebook_size` says "this codebook is absent" and adds nothing, its bias included.

    decode   z = sum_q [cb_q[c_q], 1] @ (W_out [W_q, b_q])^T + b_out
    encode   e_q = the 8 values that codebook q sees. Upstream subtracts each chosen row from a 512-wide residual and
             projects that; the projections of all rows onto all later e_q are constants, so only the e_q are kept.
             c_q = argmax_k e_q . cb_q[k] / |cb_q[k]|, which is the nearest row on the unit sphere
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.config import CodecConfig
from runtime.modules.codec_transformer import weight
from runtime.modules.scope import label


class Codebooks(nn.Module):
    """The rows of all codebooks, one table: row k of codebook q lies at q * (codebook_size + 1) + k."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.rows = weight(config.n_vq * (config.codebook_size + 1), config.codebook_dim + 1)

    def forward(self, index: Tensor) -> Tensor:
        return functional.embedding(index, self.rows)


class Dequantizer(nn.Module):
    """Codes [B, Q, F] to latents [B, F, latent_size]."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.out = weight(config.n_vq * (config.codebook_dim + 1), config.latent_size)
        self.bias = weight(config.latent_size)

    def forward(self, codes: Tensor, codebooks: nn.Module) -> Tensor:
        first_rows = torch.arange(self.config.n_vq, dtype=torch.int32) * (self.config.codebook_size + 1)
        rows = codebooks(codes.transpose(1, 2) + first_rows.to(self.out.device))
        return label(rows.flatten(2) @ self.out + self.bias, "latents")


class Quantizer(nn.Module):
    """Latents [B, F, latent_size] to codes [B, Q, F]: the nearest row of each codebook in turn."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        Q, dim, V = config.n_vq, config.codebook_dim, config.codebook_size
        self.project, self.bias = weight(config.latent_size, Q * dim), weight(Q * dim)
        self.directions = weight(Q, dim, V)  # rows of length 1
        self.subtract = weight(Q, dim + 1, Q * dim)  # what a chosen row takes from the projections behind it

    def forward(self, latents: Tensor, codebooks: nn.Module) -> Tensor:
        dim, rows = self.config.codebook_dim, self.config.codebook_size + 1
        projected = label(latents @ self.project + self.bias, "projected")
        codes = []
        for q in range(self.config.n_vq):
            similarity = projected[..., q * dim : (q + 1) * dim] @ self.directions[q]
            code = label(torch.argmax(similarity, -1).to(torch.int32), f"code_{q:02d}")
            codes.append(code)
            if q + 1 < self.config.n_vq:
                projected = projected - codebooks(code + q * rows) @ self.subtract[q]
        return torch.stack(codes, 1)
