"""The two config.json files of a made-up checkpoint, in the published layout; tiny and full differ in sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from convert.checkpoint import MADE_UP_KEY
from runtime.manifest import MADE_UP_NOTICE

Size = Literal["tiny", "full"]
PATCHES = (240, 2, 2, 2, 4)  # 3,840 samples of 2 channels per frame, at every size


@dataclass(frozen=True, slots=True)
class Sizes:
    """What tiny makes smaller. The published values are `FULL`."""

    hidden: int
    layers: int
    local_layers: int
    heads: int
    inner: int
    positions: int
    vocab: int
    codebook: int
    codec_width: int
    codec_heads: int
    codec_inner: int
    codec_layers: tuple[int, ...]  # of the encoder's stages; the decoder has the same
    codec_outputs: tuple[int, ...]  # widths behind the encoder's stages
    decoder_output: int
    context_s: tuple[float, ...]
    rvq: int


TINY = Sizes(128, 3, 1, 4, 320, 2048, 512, 64, 16, 2, 32, (1, 1, 1, 2), (12, 12, 12, 6), 24, (0.8, 1.2, 1.6, 2.0), 16)
FULL = Sizes(768, 12, 1, 12, 3072, 32768, 16384, 1024, 256, 4, 1024, (4, 2, 2, 4), (384, 384, 384, 192), 768,
             (4.0, 6.0, 8.0, 10.0), 512)  # fmt: skip
SIZES: dict[Size, Sizes] = {"tiny": TINY, "full": FULL}
N_VQ = 16


def model_config_json(sizes: Sizes) -> dict[str, Any]:
    """config.json of the language model."""
    gpt2 = {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": sizes.hidden, "n_layer": sizes.layers,
        "n_head": sizes.heads, "n_inner": sizes.inner, "n_positions": sizes.positions, "n_ctx": sizes.positions,
        "vocab_size": sizes.vocab, "layer_norm_epsilon": 1e-5, "position_embedding_type": "rope",
        "rope_base": 10000.0, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "pad_token_id": 3,
    }  # fmt: skip
    return {
        MADE_UP_KEY: MADE_UP_NOTICE,
        "architectures": ["MossTTSNanoForCausalLM"], "model_type": "moss_tts_nano",
        "model_architecture": "global_local_transformer", "dtype": "float32", "tie_word_embeddings": True,
        "n_vq": N_VQ, "audio_codebook_sizes": [sizes.codebook] * N_VQ, "audio_vocab_size": sizes.codebook,
        "audio_pad_token_id": sizes.codebook, "pad_token_id": 3, "im_start_token_id": 4, "im_end_token_id": 5,
        "audio_start_token_id": 6, "audio_end_token_id": 7, "audio_user_slot_token_id": 8,
        "audio_assistant_slot_token_id": 9, "local_transformer_layers": sizes.local_layers,
        "hidden_size": sizes.hidden, "vocab_size": sizes.vocab, "max_position_embeddings": sizes.positions,
        "audio_tokenizer_sample_rate": 48000, "audio_tokenizer_type": "moss-audio-tokenizer-nano",
        "tokenizer_class": "MossTTSNanoSentencePieceTokenizer", "gpt2_config": gpt2,
    }  # fmt: skip


def codec_config_json(sizes: Sizes) -> dict[str, Any]:
    """config.json of the codec."""
    latent = sizes.codec_outputs[-1] * PATCHES[-1]
    encoder: list[dict[str, Any]] = []
    width = 1
    for patch, layers, output, context in zip(
        PATCHES[:-1], sizes.codec_layers, sizes.codec_outputs, sizes.context_s, strict=True
    ):
        encoder += [_patcher(patch), _stage(sizes, width * patch, layers, output, context)]
        width = output
    decoder: list[dict[str, Any]] = []
    width = latent
    outputs = (*[sizes.decoder_output] * (len(PATCHES) - 2), PATCHES[0])
    for patch, layers, output, context in zip(
        PATCHES[:0:-1], sizes.codec_layers[::-1], outputs, sizes.context_s[::-1], strict=True
    ):
        decoder += [_patcher(patch), _stage(sizes, width // patch, layers, output, context)]
        width = output
    quantizer = {
        "quantizer_type": "rlfq", "input_dim": latent, "rvq_dim": sizes.rvq, "output_dim": latent,
        "num_quantizers": N_VQ, "codebook_size": sizes.codebook, "codebook_dim": 8, "quantizer_dropout": 1.0,
        "codebook_loss_weight": 1.0, "commitment_loss_weight": 0.25,
    }  # fmt: skip
    return {
        MADE_UP_KEY: MADE_UP_NOTICE,
        "architectures": ["MossAudioTokenizerModel"], "model_type": "moss-audio-tokenizer", "sample_rate": 48000,
        "sampling_rate": 48000, "downsample_rate": 3840, "causal_transformer_context_duration": 10.0,
        "number_channels": 2, "enable_channel_interleave": True, "attention_implementation": "sdpa",
        "compute_dtype": "fp32", "dtype": "float32", "code_dim": latent,
        "encoder_kwargs": [*encoder, _patcher(PATCHES[-1])], "decoder_kwargs": [*decoder, _patcher(PATCHES[0])],
        "quantizer_type": "rlfq", "quantizer_kwargs": quantizer,
    }  # fmt: skip


def _patcher(size: int) -> dict[str, Any]:
    return {"module_type": "PatchedPretransform", "patch_size": size}


def _stage(sizes: Sizes, size_in: int, layers: int, size_out: int, context_s: float) -> dict[str, Any]:
    return {
        "module_type": "Transformer", "causal": True, "context_duration": context_s, "conv_layout": True,
        "d_model": sizes.codec_width, "dim_feedforward": sizes.codec_inner, "gating": "none",
        "input_dimension": size_in, "layer_scale": 0.01, "max_period": 10000, "norm": "layer_norm",
        "num_heads": sizes.codec_heads, "num_layers": layers, "output_dimension": size_out,
        "positional_embedding": "rope",
    }  # fmt: skip
