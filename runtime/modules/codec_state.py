"""From the published tensors of a codec checkpoint to the state of the codec modules, once, in float64 where it folds.

- weight norm: W[o] = original0[o] * original1[o] / |original1[o]|
- linear weights are stored [in, out]; layer scale lies in the projection before it, 1/sqrt(D) in q
- RoPE pairs (2j, 2j + 1) of q and k become halves (j, j + D/2); scores stay the same
- patches: upstream orders the values of a patch (value, token), here it is (token, value), so that a patch is a
  plain reshape; the projection beside the patch takes the permutation
- the quantizer: see runtime/modules/codec_quantizer.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.config import CodecConfig, CodecStage
from runtime.errors import CheckpointError
from runtime.modules.codec_transformer import ROPE_TABLE, rope_name

State = dict[str, Tensor]


def derive_codec_state(config: CodecConfig, tensors: Mapping[str, Tensor], with_encoder: bool = True) -> State:
    """The state of all codec modules, float32, from tensors by their published names; the encoder's if wanted."""
    state: State = {}
    encoder = config.encoder if with_encoder else ()
    for stage in (*encoder, *config.decoder):
        state |= _rope_tables(stage)
    for number, stage in enumerate(encoder):
        into = patch_order(stage.patch_size, stage.input_size)
        state |= _stage(stage, "encoder", number, tensors, into, torch.arange(stage.output_size))
    patches_behind = [*(s.patch_size for s in config.decoder[1:]), config.decoder_last_patch]
    for number, (stage, patch) in enumerate(zip(config.decoder, patches_behind, strict=True)):
        out_of = patch_order(patch, stage.output_size)
        state |= _stage(stage, "decoder", number, tensors, torch.arange(stage.input_size), out_of)
    return state | _quantizer(config, tensors)


def patch_order(patch_size: int, size: int) -> Tensor:
    """For each place in our order (token, value), the place in upstream's order (value, token)."""
    return torch.arange(size).view(size // patch_size, patch_size).T.flatten()


def _stage(
    stage: CodecStage, side: str, number: int, tensors: Mapping[str, Tensor], into: Tensor, out_of: Tensor
) -> State:
    theirs, ours = f"{side}.{stage.index}", f"codec_{side}.stages.{number}"
    state = {
        f"{ours}.input_proj": tensors[f"{theirs}.input_proj.weight"].T[into],
        f"{ours}.output_proj": tensors[f"{theirs}.output_proj.weight"].T[:, out_of],
    }
    for layer in range(stage.num_layers):
        state |= _layer(stage, f"{theirs}.transformer.layers.{layer}", f"{ours}.layers.{layer}", tensors)
    return {name: value.to(torch.float32).contiguous() for name, value in state.items()}


def _layer(stage: CodecStage, theirs: str, ours: str, tensors: Mapping[str, Tensor]) -> State:
    H, D = stage.num_heads, stage.head_size
    query, key, value = tensors[f"{theirs}.self_attn.in_proj.weight"].double().chunk(3)
    halves = torch.arange(stage.model_size).view(H, D // 2, 2).transpose(1, 2).flatten()
    scale_1, scale_2 = (tensors[f"{theirs}.layer_scale_{i}.scale"].double() for i in (1, 2))
    return {
        f"{ours}.attention.qkv": torch.cat([query[halves] / math.sqrt(D), key[halves], value]).T,
        f"{ours}.attention.out": tensors[f"{theirs}.self_attn.out_proj.weight"].T.double() * scale_1,
        f"{ours}.feed_forward.up": tensors[f"{theirs}.ffn.0.weight"].T,
        f"{ours}.feed_forward.down": tensors[f"{theirs}.ffn.2.weight"].T.double() * scale_2,
        **{f"{ours}.norm_{i}.{p}": tensors[f"{theirs}.norm{i}.{p}"] for i in (1, 2) for p in ("weight", "bias")},
    }


def _rope_tables(stage: CodecStage) -> State:
    """Angles of a * ROPE_TABLE and of b; the sine that multiplies the first half is negative."""
    D = stage.head_size
    frequency = stage.rope_base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    state = {}
    for table, step in (("coarse", ROPE_TABLE), ("fine", 1)):
        angle = torch.arange(ROPE_TABLE, dtype=torch.float64)[:, None] * step * frequency
        state[f"codec_ropes.{rope_name(stage)}.{table}_cos"] = torch.cat([angle.cos(), angle.cos()], 1).float()
        state[f"codec_ropes.{rope_name(stage)}.{table}_sin"] = torch.cat([-angle.sin(), angle.sin()], 1).float()
    return state


def _quantizer(config: CodecConfig, tensors: Mapping[str, Tensor]) -> State:
    Q, dim, V = config.n_vq, config.codebook_dim, config.codebook_size
    names = [f"quantizer.quantizers.{q}" for q in range(Q)]
    codebooks = torch.stack([tensors[f"{n}.codebook.weight"].double() for n in names])
    inward = [_weight_norm(tensors, f"{n}.in_proj") for n in names]
    outward = [_weight_norm(tensors, f"{n}.out_proj") for n in names]
    (W_in, b_in), (W_out, b_out) = (_weight_norm(tensors, f"quantizer.{n}_proj") for n in ("input", "output"))

    rows = torch.zeros(Q, V + 1, dim + 1, dtype=torch.float64)
    rows[:, :V, :dim], rows[:, :V, dim] = codebooks, 1
    lengths = codebooks.norm(dim=-1, keepdim=True)
    if (lengths < 1e-6).any():
        q, k, _ = (lengths < 1e-6).nonzero()[0].tolist()
        raise CheckpointError(f"codec: row {k} of codebook {q} is zero; it has no direction to be nearest to")
    affine = torch.stack([torch.cat([W, b[:, None]], 1).T for W, b in outward])  # [Q, dim + 1, rvq]
    all_in = torch.cat([W for W, _ in inward])  # [Q * dim, rvq]
    before, behind = patch_order(config.encoder_last_patch, config.latent_size), config.decoder[0].patch_size
    order_out = patch_order(behind, config.latent_size)
    state = {
        "codec_codebooks.rows": rows.flatten(0, 1),
        "codec_dequantizer.out": (affine @ W_out.T).flatten(0, 1)[:, order_out],
        "codec_dequantizer.bias": b_out[order_out],
        "codec_quantizer.project": (all_in @ W_in).T[before],
        "codec_quantizer.bias": all_in @ b_in + torch.cat([b for _, b in inward]),
        "codec_quantizer.directions": (codebooks / lengths).transpose(1, 2),
        "codec_quantizer.subtract": affine @ all_in.T,
    }
    return {name: value.to(torch.float32).contiguous() for name, value in state.items()}


def _weight_norm(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """A 1x1 convolution: weight [out, in] and bias."""
    length = tensors[f"{name}.parametrizations.weight.original0"].double()[:, 0]
    direction = tensors[f"{name}.parametrizations.weight.original1"].double()[:, :, 0]
    return length * direction / direction.norm(dim=1, keepdim=True), tensors[f"{name}.bias"].double()
