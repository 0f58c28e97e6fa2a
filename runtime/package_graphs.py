"""The graphs of the published ONNX package: file names, input and output names in their order (MODEL.md 5.6, 6.7)."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config import CodecConfig, ModelConfig
from runtime.graphs import attention_layers

MANIFEST_NAME = "browser_poc_manifest.json"
TTS_META_NAME = "tts_browser_onnx_meta.json"
CODEC_META_NAME = "codec_browser_onnx_meta.json"

LLM_FILES = {
    "prefill": "moss_tts_prefill.onnx",
    "decode_step": "moss_tts_decode_step.onnx",
    "local_decoder": "moss_tts_local_decoder.onnx",
    "local_cached_step": "moss_tts_local_cached_step.onnx",
    "local_fixed_sampled_frame": "moss_tts_local_fixed_sampled_frame.onnx",
}
CODEC_FILES = {
    "encode": "moss_audio_tokenizer_encode.onnx",
    "decode_full": "moss_audio_tokenizer_decode_full.onnx",
    "codec_decode_step": "moss_audio_tokenizer_decode_step.onnx",
}
PACKAGE_FILES = LLM_FILES | CODEC_FILES


@dataclass(frozen=True, slots=True)
class PublishedNames:
    """One published graph."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def published_names(model: ModelConfig, codec: CodecConfig) -> dict[str, PublishedNames]:
    """Every published graph of one pair of models."""
    return llm_names(model.num_layers, model.local_layers) | codec_names(
        len(codec.decoder), len(attention_layers(codec.decoder))
    )


def llm_names(num_layers: int, local_layers: int) -> dict[str, PublishedNames]:
    step_in = ("global_hidden", "text_token_id", "audio_token_id", "channel_index", "step_type", "past_valid_lengths")
    interfaces: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "prefill": (("input_ids", "attention_mask"), ("global_hidden", *cache_names("present", num_layers))),
        "decode_step": (
            ("input_ids", "past_valid_lengths", *cache_names("past", num_layers)),
            ("global_hidden", *cache_names("present", num_layers)),
        ),
        "local_decoder": (
            ("global_hidden", "text_token_id", "audio_prefix_token_ids"),
            ("text_logits", "audio_logits"),
        ),
        "local_cached_step": (
            (*step_in, *cache_names("local_past", local_layers)),
            ("text_logits", "audio_logits", *cache_names("local_present", local_layers)),
        ),
        "local_fixed_sampled_frame": (
            ("global_hidden", "repetition_seen_mask", "assistant_random_u", "audio_random_u"),
            ("should_continue", "frame_token_ids"),
        ),
    }
    return {graph: PublishedNames(LLM_FILES[graph], *names) for graph, names in interfaces.items()}


def codec_names(num_stages: int, num_layers: int) -> dict[str, PublishedNames]:
    states = [pair for i in range(num_layers) for pair in codec_state_names(i).values()]
    interfaces: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "encode": (("waveform", "input_lengths"), ("audio_codes", "audio_code_lengths")),
        "decode_full": (("audio_codes", "audio_code_lengths"), ("audio", "audio_lengths")),
        "codec_decode_step": (
            (
                "audio_codes",
                "audio_code_lengths",
                *(f"transformer_offset_{i}" for i in range(num_stages)),
                *(name_in for name_in, _ in states),
            ),
            (
                "audio",
                "audio_lengths",
                *(f"transformer_offset_out_{i}" for i in range(num_stages)),
                *(name_out for _, name_out in states),
            ),
        ),
    }
    return {graph: PublishedNames(CODEC_FILES[graph], *names) for graph, names in interfaces.items()}


def cache_names(prefix: str, num_layers: int) -> tuple[str, ...]:
    """key_0, value_0, key_1, … behind `prefix`."""
    return tuple(f"{prefix}_{kind}_{i}" for i in range(num_layers) for kind in ("key", "value"))


def codec_state_names(layer: int) -> dict[str, tuple[str, str]]:
    """What one attention layer of the streaming decoder keeps: kind -> (input name, output name), in their order."""
    kinds = {"offset": "attn_offset", "cached_keys": "attn_cached_keys", "cached_values": "attn_cached_values",
             "cached_positions": "attn_cached_positions"}  # fmt: skip
    return {kind: (f"{stem}_{layer}", f"{stem}_out_{layer}") for kind, stem in kinds.items()}
