"""Names and shapes of every tensor of a checkpoint, derived from its config (MODEL.md 2.1, 2.2). No size is assumed.

Canonical names are the published ones; the prefixes of training tools are mapped to them here, other names of the
codec in runtime/modules/codec_names.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.config import CodecConfig, CodecStage, ModelConfig

Shape = tuple[int, ...]

# Prefixes that tools put before every name: DistributedDataParallel, PEFT, torch.compile.
TOOL_PREFIXES = ("module.", "base_model.model.", "_orig_mod.")
STRAY_TENSOR = "local_transformer.wte.weight"  # upstream has no such table (Identity); some files carry one


def expected_model_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape in published order, the tied heads included."""
    E = config.hidden_size
    shapes: dict[str, Shape] = {"transformer.wte.weight": (config.vocab_size, E)}
    for layer in range(config.num_layers):
        shapes |= _model_block(f"transformer.h.{layer}", config)
    shapes |= _norm("transformer.ln_f", E)
    shapes |= {f"audio_embeddings.{i}.weight": (size, E) for i, size in enumerate(config.codebook_sizes)}
    for layer in range(config.local_layers):
        shapes |= _model_block(f"local_transformer.h.{layer}", config)
    shapes |= _norm("local_transformer.ln_f", E)
    shapes |= {head: shapes[embedding] for head, embedding in tied_heads(config).items()}
    return shapes


def tied_heads(config: ModelConfig) -> dict[str, str]:
    """Head -> the embedding that it is tied to (no biases)."""
    heads = {f"audio_lm_heads.{i}.weight": f"audio_embeddings.{i}.weight" for i in range(config.n_vq)}
    return {"text_lm_head.weight": "transformer.wte.weight"} | heads


def expected_codec_tensors(config: CodecConfig) -> dict[str, Shape]:
    """Name -> shape in published order."""
    shapes: dict[str, Shape] = {}
    for side, stages in (("encoder", config.encoder), ("decoder", config.decoder)):
        for stage in stages:
            shapes |= _codec_stage(f"{side}.{stage.index}", stage)
        if side == "encoder":
            shapes |= _quantizer(config)
    return shapes


def uniform_prefix(names: Iterable[str]) -> str:
    """The tool prefix that every name carries, such as "module.base_model.model."; "" when there is none."""
    rest, prefix = list(names), ""
    while rest:
        found = next((p for p in TOOL_PREFIXES if all(n.startswith(p) for n in rest)), None)
        if found is None:
            break
        prefix += found
        rest = [n.removeprefix(found) for n in rest]
    return prefix


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _model_block(name: str, config: ModelConfig) -> dict[str, Shape]:
    E, inner = config.hidden_size, config.inner_size
    linear = {"attn.c_attn": (3 * E, E), "attn.c_proj": (E, E), "mlp.fc_in": (inner, E), "mlp.fc_out": (E, inner)}
    shapes = _norm(f"{name}.ln_1", E) | _norm(f"{name}.ln_2", E)
    for part, shape in linear.items():
        shapes |= {f"{name}.{part}.weight": shape, f"{name}.{part}.bias": shape[:1]}
    return shapes


def _codec_stage(name: str, stage: CodecStage) -> dict[str, Shape]:
    M, inner = stage.model_size, stage.inner_size
    shapes: dict[str, Shape] = {
        f"{name}.input_proj.weight": (M, stage.input_size),
        f"{name}.output_proj.weight": (stage.output_size, M),
    }
    for layer in range(stage.num_layers):
        block = f"{name}.transformer.layers.{layer}"
        shapes |= {
            f"{block}.self_attn.in_proj.weight": (3 * M, M),
            f"{block}.self_attn.out_proj.weight": (M, M),
            **_norm(f"{block}.norm1", M),
            **_norm(f"{block}.norm2", M),
            f"{block}.ffn.0.weight": (inner, M),
            f"{block}.ffn.2.weight": (M, inner),
            f"{block}.layer_scale_1.scale": (M,),
            f"{block}.layer_scale_2.scale": (M,),
        }
    return shapes


def _quantizer(config: CodecConfig) -> dict[str, Shape]:
    latent, width, dim = config.latent_size, config.rvq_size, config.codebook_dim
    shapes = _weight_norm("quantizer.input_proj", width, latent) | _weight_norm("quantizer.output_proj", latent, width)
    for q in range(config.n_vq):
        name = f"quantizer.quantizers.{q}"
        shapes |= _weight_norm(f"{name}.in_proj", dim, width) | _weight_norm(f"{name}.out_proj", width, dim)
        shapes[f"{name}.codebook.weight"] = (config.codebook_size, dim)
    return shapes


def _weight_norm(name: str, size_out: int, size_in: int) -> dict[str, Shape]:
    """A 1x1 convolution under weight normalisation: W[o] = original0[o] * original1[o] / |original1[o]|."""
    return {
        f"{name}.bias": (size_out,),
        f"{name}.parametrizations.weight.original0": (size_out, 1, 1),
        f"{name}.parametrizations.weight.original1": (size_out, size_in, 1),
    }
