"""One name for each codec tensor, that of the 48 kHz checkpoint; the 24 kHz checkpoint and older tools use others."""

from __future__ import annotations

import re

# weight_norm as a hook; attention with one projection per step (24 kHz); unnamed feed-forward layers (24 kHz).
_CODEC_RENAMES = (
    (re.compile(r"\.weight_g$"), ".parametrizations.weight.original0"),
    (re.compile(r"\.weight_v$"), ".parametrizations.weight.original1"),
    (re.compile(r"\.self_attn\.in_proj_weight$"), ".self_attn.in_proj.weight"),
    (re.compile(r"\.self_attn\.in_projs\.0\.weight$"), ".self_attn.in_proj.weight"),
    (re.compile(r"\.self_attn\.out_projs\.0\.weight$"), ".self_attn.out_proj.weight"),
    (re.compile(r"\.linear1\.weight$"), ".ffn.0.weight"),
    (re.compile(r"\.linear2\.weight$"), ".ffn.2.weight"),
)


def canonical_codec_name(name: str) -> str:
    """The published name of a tensor that carries another one."""
    for pattern, replacement in _CODEC_RENAMES:
        name = pattern.sub(replacement, name)
    return name
