"""Write what was recovered as two ordinary checkpoint directories: model and codec, in the published layout.

Each tensor file has the smallest float dtype that holds every number exactly. The origin is recorded after the proof
(convert/import_origin.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convert.checkpoint import MADE_UP_KEY, TOKENIZER_NAME
from convert.expected_tensors import expected_codec_tensors, expected_model_tensors, tied_heads
from convert.import_codec import CodecShape, StageShape
from convert.import_llm import LlmShape
from convert.import_view import Floats
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import CheckpointError
from runtime.manifest import MADE_UP_NOTICE, write_atomically
from runtime.onnx_package import ID_NAMES, OnnxPackage
from runtime.package_model import MAX_ROWS


def write_model(directory: Path, package: OnnxPackage, shape: LlmShape, tensors: Mapping[str, Floats]) -> None:
    """config.json, model.safetensors and the tokenizer of the language model."""
    directory.mkdir(parents=True)
    config = model_config_json(package, shape)
    order = expected_model_tensors(ModelConfig.from_dict(config))
    heads = tied_heads(ModelConfig.from_dict(config))
    tied = all(np.array_equal(tensors[head], tensors[embedding]) for head, embedding in heads.items())
    config["tie_word_embeddings"] = tied
    _save({name: tensors[name] for name in order if not (tied and name in heads)}, directory)
    _write_config(directory, config, package)
    if package.tokenizer is not None:
        write_atomically(directory / TOKENIZER_NAME, package.tokenizer.read_bytes())


def write_codec(directory: Path, package: OnnxPackage, shape: CodecShape, tensors: Mapping[str, Floats]) -> None:
    """config.json and model.safetensors of the codec."""
    directory.mkdir(parents=True)
    config = codec_config_json(package, shape)
    expected = expected_codec_tensors(CodecConfig.from_dict(config))
    _save({name: _codec_tensor(name, tensors) for name in expected}, directory)
    _write_config(directory, config, package)


def model_config_json(package: OnnxPackage, shape: LlmShape) -> dict[str, Any]:
    """config.json of the language model. The graphs hold no position table, so positions are the published limit."""
    gpt2 = {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": shape.hidden_size,
        "n_layer": shape.num_layers, "n_head": shape.num_heads, "n_inner": shape.inner_size, "n_positions": MAX_ROWS,
        "n_ctx": MAX_ROWS, "vocab_size": shape.vocab_size, "layer_norm_epsilon": shape.epsilon,
        "position_embedding_type": "rope", "rope_base": shape.rope_base, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }  # fmt: skip
    ids = package.special_ids
    return {
        "architectures": ["MossTTSNanoForCausalLM"], "model_type": "moss_tts_nano",
        "model_architecture": "global_local_transformer", "dtype": "float32", "n_vq": len(shape.codebook_sizes),
        "audio_codebook_sizes": list(shape.codebook_sizes), "audio_vocab_size": max(shape.codebook_sizes),
        **{theirs: ids[ours] for ours, theirs in ID_NAMES.items()},
        "local_transformer_layers": shape.local_layers, "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size, "max_position_embeddings": MAX_ROWS,
        "audio_tokenizer_sample_rate": package.codec_value("sample_rate", "sampling_rate"), "gpt2_config": gpt2,
    }  # fmt: skip


def codec_config_json(package: OnnxPackage, shape: CodecShape) -> dict[str, Any]:
    """config.json of the codec; CodecConfig checks that stages, patches and rates fit each other."""
    rate = package.codec_value("sample_rate", "sampling_rate")
    channels = package.codec_value("channels", "number_channels")
    samples = shape.decoder_last_patch * math.prod(stage.patch for stage in shape.decoder)
    per_frame, remainder = divmod(samples, channels)
    if remainder:
        raise CheckpointError(f"the decoder makes {samples} samples per frame, which are not {channels} channels")
    tokens_s = float(rate * channels)
    encoder: list[dict[str, Any]] = []
    for stage in shape.encoder:
        tokens_s /= stage.patch
        encoder += _stage_json(stage, tokens_s)
    tokens_s = rate / per_frame
    decoder: list[dict[str, Any]] = []
    for stage in shape.decoder:
        tokens_s *= stage.patch
        decoder += _stage_json(stage, tokens_s)
    quantizer = {
        "quantizer_type": "rlfq", "input_dim": shape.latent_size, "rvq_dim": shape.rvq_size,
        "output_dim": shape.latent_size, "num_quantizers": shape.n_vq, "codebook_size": shape.codebook_size,
        "codebook_dim": shape.codebook_dim,
    }  # fmt: skip
    return {
        "architectures": ["MossAudioTokenizerModel"], "model_type": "moss-audio-tokenizer", "sample_rate": rate,
        "sampling_rate": rate, "downsample_rate": per_frame, "number_channels": channels,
        "enable_channel_interleave": True, "dtype": "float32", "code_dim": shape.latent_size,
        "encoder_kwargs": encoder + _patch_json(shape.encoder_last_patch),
        "decoder_kwargs": decoder + _patch_json(shape.decoder_last_patch),
        "quantizer_type": "rlfq", "quantizer_kwargs": quantizer,
    }  # fmt: skip


def _patch_json(size: int) -> list[dict[str, Any]]:
    return [{"module_type": "PatchedPretransform", "patch_size": size}] if size > 1 else []


def _stage_json(stage: StageShape, tokens_s: float) -> list[dict[str, Any]]:
    transformer = {
        "module_type": "Transformer", "causal": True, "context_duration": stage.context / tokens_s,
        "d_model": stage.model_size, "dim_feedforward": stage.inner_size, "gating": "none",
        "input_dimension": stage.input_size, "max_period": stage.rope.base, "norm": "layer_norm",
        "num_heads": stage.model_size // stage.rope.head_size, "num_layers": stage.num_layers,
        "output_dimension": stage.output_size, "positional_embedding": "rope",
    }  # fmt: skip
    return [*_patch_json(stage.patch), transformer]


def _codec_tensor(name: str, tensors: Mapping[str, Floats]) -> Floats:
    """As a checkpoint stores it: a convolution as the lengths of its rows and the rows, exact to half an ulp."""
    layer, _, part = name.partition(".parametrizations.weight.")
    if not part:
        return tensors[name]
    weight = tensors[f"{layer}.weight"]
    if part == "original1":
        return weight[:, :, None]
    lengths: Floats = np.linalg.norm(weight.astype(np.float64), axis=1).astype(np.float32)
    return lengths[:, None, None]


def _save(tensors: Mapping[str, Floats], directory: Path) -> None:
    import safetensors.torch

    whole = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}
    dtype = smallest_exact_dtype(whole)
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in whole.items()}
    path = directory / "model.safetensors"
    safetensors.torch.save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600


def smallest_exact_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The published language model is bfloat16 inside float32 files."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(t.to(dtype).to(torch.float32), t) for t in tensors.values()):
            return dtype
    return torch.float32


def _write_config(directory: Path, config: Mapping[str, Any], package: OnnxPackage) -> None:
    made_up = {MADE_UP_KEY: MADE_UP_NOTICE} if package.made_up else {}
    write_atomically(directory / "config.json", _json({**made_up, **config}))


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"
