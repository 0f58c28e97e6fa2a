"""Tiny checkpoints of MOSS-SoundEffect: the real names, ids, vocabulary and layout, small widths, random weights.

The golden outputs in tests/data/sfx belong to exactly these numbers: RandomState is NumPy's frozen generator, so the
order and shape of every draw below is part of the recipe. Run as a script to try the commands without real weights:

    python tests/sfx/tiny.py checkpoints/sfx-tiny       writes checkpoints/sfx-tiny/model and …/codec
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from runtime.sfx.config import PUBLISHED_IDS

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INNER = 16, 2, 4, 2, 8, 32
VOCABULARY, BOOKS, CODES = 151_936, 16, 1024
PLANTED = 6.0  # hidden channel 0 is this constant, so that lm_heads.0 can carry a bias

CODEC_SIZE, RVQ, CODEC_BOOKS, CODEBOOK_DIM = 24, 16, 32, 8

Tensors = dict[str, np.ndarray]


class Draws:
    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return (self._random.standard_normal(shape) * scale).astype(np.float32)

    def near_one(self, size: int) -> np.ndarray:
        return (1 + self.normal(size, scale=0.1)).astype(np.float32)


def write_language_model(directory: Path) -> None:
    """A model whose runs pass through every state: audio_start wins outside audio, the two slots compete inside."""
    language = {
        "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
        "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    config = {
        "model_type": "moss_tts_delay", "language_config": language, "n_vq": BOOKS, "audio_vocab_size": CODES,
        "audio_pad_code": CODES, "sampling_rate": 24000, **PUBLISHED_IDS,
    }  # fmt: skip
    _write(directory, config, _language_model_tensors(Draws(20260711)))


def _language_model_tensors(draw: Draws) -> Tensors:
    t: Tensors = {}
    embedding = draw.normal(VOCABULARY, HIDDEN, scale=0.5)
    embedding[:, 0] = PLANTED
    t["language_model.embed_tokens.weight"] = embedding
    for layer in range(LAYERS):
        at = f"language_model.layers.{layer}."
        t[at + "self_attn.q_proj.weight"] = draw.normal(HEADS * HEAD_SIZE, HIDDEN, scale=0.35)
        t[at + "self_attn.k_proj.weight"] = draw.normal(KV_HEADS * HEAD_SIZE, HIDDEN, scale=0.35)
        t[at + "self_attn.v_proj.weight"] = draw.normal(KV_HEADS * HEAD_SIZE, HIDDEN, scale=0.35)
        t[at + "self_attn.o_proj.weight"] = _without_channel_0(draw.normal(HIDDEN, HEADS * HEAD_SIZE, scale=0.25))
        t[at + "self_attn.q_norm.weight"] = draw.near_one(HEAD_SIZE)
        t[at + "self_attn.k_norm.weight"] = draw.near_one(HEAD_SIZE)
        t[at + "mlp.gate_proj.weight"] = draw.normal(INNER, HIDDEN, scale=0.3)
        t[at + "mlp.up_proj.weight"] = draw.normal(INNER, HIDDEN, scale=0.3)
        t[at + "mlp.down_proj.weight"] = _without_channel_0(draw.normal(HIDDEN, INNER, scale=0.25))
        t[at + "input_layernorm.weight"] = draw.near_one(HIDDEN)
        t[at + "post_attention_layernorm.weight"] = draw.near_one(HIDDEN)
    t["language_model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for book in range(BOOKS):
        t[f"emb_ext.{book}.weight"] = draw.normal(CODES + 1, HIDDEN, scale=0.3)
        t[f"emb_ext.{book}.weight"][:, 0] = 0
    t["lm_heads.0.weight"] = _text_head(draw)
    for book in range(BOOKS):
        t[f"lm_heads.{book + 1}.weight"] = draw.normal(CODES + 1, HIDDEN, scale=0.8)
    return t


def _without_channel_0(weight: np.ndarray) -> np.ndarray:
    weight[0] = 0
    return weight


def _text_head(draw: Draws) -> np.ndarray:
    head = draw.normal(VOCABULARY, HIDDEN, scale=0.05)
    head[:, 0] = 0
    slots = [PUBLISHED_IDS[f"audio_assistant_{name}_slot_token_id"] for name in ("gen", "delay")]
    head[PUBLISHED_IDS["audio_start_token_id"], 0] = 3.0
    head[PUBLISHED_IDS["im_end_token_id"], 0] = 5.0
    head[slots, 0] = 1.6, 0.75
    for slot in slots:
        head[slot, 1:] = draw.normal(HIDDEN - 1, scale=0.45)
    return head


def write_tokenizer(directory: Path) -> None:
    """GPT-2's 256 byte symbols at their ids, the control tokens and the two role words at Qwen3's; no merges."""
    control = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|audio_start|>": 151652,
               "<|audio_end|>": 151653, "<|audio_user_slot|>": 151654, "<|audio_assistant_gen_slot|>": 151656,
               "<|audio_assistant_delay_slot|>": 151662}  # fmt: skip
    words = {"user": 872, "assistant": 77091}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [0x100 + i for i in range(256 - len(printable))]
    vocabulary = {chr(c): i for i, c in enumerate(printable + others)} | control | words
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": c, "special": c in control, **plain}
                         for c, i in sorted((control | words).items(), key=lambda pair: pair[1])],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")


def write_codec(directory: Path) -> None:
    """The 24 kHz codec: patches 240, 2, 2, 2, 32 codebooks; layer scale 0.5, so that the layers matter."""
    encoder = [_patch(240), _stage(240, 12, 24, 3, 1), _patch(2), _stage(24, 12, 24, 3, 1), _patch(2),
               _stage(24, 20, 24, 3, 1), _patch(2), _stage(40, CODEC_SIZE, 40, 5, 2)]  # fmt: skip
    decoder = [_stage(CODEC_SIZE, 40, 40, 5, 2), _patch(2), _stage(20, 24, 24, 3, 1), _patch(2),
               _stage(12, 24, 24, 3, 1), _patch(2), _stage(12, 240, 24, 3, 1), _patch(240)]  # fmt: skip
    config = {
        "model_type": "speech_tokenizer", "causal_transformer_context_duration": 10, "encoder_kwargs": encoder,
        "decoder_kwargs": decoder, "downsample_rate": 1920, "sample_rate": 24000, "sampling_rate": 24000,
        "quantizer_type": "rlfq",
        "quantizer_kwargs": {"codebook_dim": CODEBOOK_DIM, "codebook_size": CODES, "input_dim": CODEC_SIZE,
                             "num_quantizers": CODEC_BOOKS, "output_dim": CODEC_SIZE, "quantizer_type": "rlfq",
                             "rvq_dim": RVQ},
    }  # fmt: skip
    draw = Draws(424242)
    t = _stages(draw, "encoder", encoder) | _stages(draw, "decoder", decoder)
    _convolution(draw, t, "quantizer.input_proj", RVQ, CODEC_SIZE)
    _convolution(draw, t, "quantizer.output_proj", CODEC_SIZE, RVQ)
    for book in range(CODEC_BOOKS):
        _convolution(draw, t, f"quantizer.quantizers.{book}.in_proj", CODEBOOK_DIM, RVQ)
        _convolution(draw, t, f"quantizer.quantizers.{book}.out_proj", RVQ, CODEBOOK_DIM)
        t[f"quantizer.quantizers.{book}.codebook.weight"] = draw.normal(CODES, CODEBOOK_DIM, scale=0.4)
    _write(directory, config, t)


def _patch(size: int) -> dict[str, Any]:
    return {"module_type": "PatchedPretransform", "patch_size": size}


def _stage(size_in: int, size_out: int, size: int, heads: int, layers: int) -> dict[str, Any]:
    return {
        "module_type": "Transformer", "causal": True, "conv_layout": True, "d_model": size, "dim_feedforward": 2 * size,
        "gating": "none", "input_dimension": size_in, "layer_scale": 0.01, "max_period": 10000, "norm": "layer_norm",
        "num_heads": heads, "num_layers": layers, "output_dimension": size_out, "positional_embedding": "rope",
    }  # fmt: skip


def _stages(draw: Draws, side: str, parts: list[dict[str, Any]]) -> Tensors:
    t: Tensors = {}
    for index, part in enumerate(parts):
        if part["module_type"] != "Transformer":
            continue
        at, size, inner = f"{side}.{index}.", part["d_model"], part["dim_feedforward"]
        size_in, size_out = part["input_dimension"], part["output_dimension"]
        if size_in != size:
            t[at + "input_proj.weight"] = draw.normal(size, size_in, scale=size_in**-0.5)
        for layer in range(part["num_layers"]):
            here = f"{at}transformer.layers.{layer}."
            t[here + "self_attn.out_projs.0.weight"] = draw.normal(size, size, scale=size**-0.5)
            t[here + "self_attn.in_projs.0.weight"] = draw.normal(3 * size, size, scale=1.5 * size**-0.5)
            for norm in ("norm1", "norm2"):
                t[f"{here}{norm}.weight"] = draw.near_one(size)
                t[f"{here}{norm}.bias"] = draw.normal(size, scale=0.1)
            t[here + "linear1.weight"] = draw.normal(inner, size, scale=size**-0.5)
            t[here + "linear2.weight"] = draw.normal(size, inner, scale=inner**-0.5)
            for number in (1, 2):
                t[f"{here}layer_scale_{number}.scale"] = np.full(size, 0.5, np.float32)
        if size_out != size:
            t[at + "output_proj.weight"] = draw.normal(size_out, size, scale=size**-0.5)
    return t


def _convolution(draw: Draws, t: Tensors, name: str, size_out: int, size_in: int) -> None:
    """A 1x1 convolution with weight norm."""
    direction = draw.normal(size_out, size_in, 1, scale=size_in**-0.5)
    t[f"{name}.bias"] = draw.normal(size_out, scale=0.05)
    length = np.linalg.norm(direction.reshape(size_out, -1), axis=1).reshape(size_out, 1, 1)
    t[f"{name}.parametrizations.weight.original0"] = length.astype(np.float32) * np.float32(1.1)
    t[f"{name}.parametrizations.weight.original1"] = direction


def _write(directory: Path, config: dict[str, Any], tensors: Tensors) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write_language_model(Path(sys.argv[1]) / "model")
    write_tokenizer(Path(sys.argv[1]) / "model")
    write_codec(Path(sys.argv[1]) / "codec")
