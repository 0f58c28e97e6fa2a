"""The two model configs, frozen, read from config.json. Nothing is guessed: class defaults upstream differ from the
shipped files, so a missing field is an error that names the field (MODEL.md 1.1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError

PUBLISHED_PAD_TOKEN_ID = 3  # often missing from config.json; the published tokenizer's <pad>


def read_config_json(directory: Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory; CheckpointError when it is missing or not JSON."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; expected a checkpoint directory with a config.json") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


class _Fields:
    """Typed access to a config dict; each error names the file, the field, and what was found."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def get(self, name: str) -> Any:
        if self.raw.get(name) is None:
            raise CheckpointError(f"{self.where}: field {name} is missing; add it, or download config.json again")
        return self.raw[name]

    def integer(self, name: str, minimum: int = 1) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise CheckpointError(f"{self.where}: {name}: expected an integer >= {minimum}, got {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"{self.where}: {name}: expected a number above 0, got {value!r}")
        return float(value)

    def must_be(self, name: str, *allowed: Any) -> None:
        value = self.get(name)
        if value not in allowed:
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}; only {' or '.join(map(repr, allowed))} is implemented"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """MOSS-TTS-Nano: the global transformer over rows and the local transformer over the codes of one row."""

    num_layers: int  # L, global blocks
    local_layers: int  # local blocks; 1 in the published model
    hidden_size: int  # E
    num_heads: int  # H
    inner_size: int  # MLP width; n_inner null means 4 E
    layer_norm_eps: float
    rope_base: float
    max_positions: int
    vocab_size: int
    n_vq: int  # Q, codebooks
    codebook_sizes: tuple[int, ...]
    audio_pad_id: int  # a code channel with this id contributes nothing
    pad_id: int
    im_start_id: int
    im_end_id: int
    audio_start_id: int
    audio_end_id: int  # the end token: the utterance is over
    audio_user_slot_id: int
    audio_assistant_slot_id: int  # the slot token: a frame follows
    sample_rate_hz: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.head_size % 2:
            raise CheckpointError(f"hidden size {self.hidden_size} does not split into {self.num_heads} even heads")
        if len(self.codebook_sizes) != self.n_vq:
            raise CheckpointError(f"{len(self.codebook_sizes)} codebook sizes for n_vq = {self.n_vq}")
        if self.audio_pad_id < max(self.codebook_sizes):
            raise CheckpointError(f"audio_pad_token_id {self.audio_pad_id} is a code: {max(self.codebook_sizes)} codes")
        for name in ("pad_id", "im_start_id", "im_end_id", "audio_start_id", "audio_end_id", "audio_user_slot_id",
                     "audio_assistant_slot_id"):  # fmt: skip
            value = getattr(self, name)
            if not 0 <= value < self.vocab_size:
                raise CheckpointError(f"{name} {value} lies outside the vocabulary of {self.vocab_size}")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def codebook_size(self) -> int:
        """V: the largest codebook; smaller ones are padded with unreachable codes in the frame graph."""
        return max(self.codebook_sizes)

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the published layout: audio fields at the top level, the transformer under gpt2_config."""
        top = _Fields(raw, where)
        top.must_be("model_type", "moss_tts_nano")
        gpt2 = _Fields(top.get("gpt2_config"), f"{where}: gpt2_config")
        gpt2.must_be("activation_function", "gelu_new")
        gpt2.must_be("position_embedding_type", "rope")  # "absolute" would add a learned wpe instead
        gpt2.must_be("scale_attn_weights", True)
        gpt2.must_be("scale_attn_by_inverse_layer_idx", False)
        hidden_size = gpt2.integer("n_embd")
        has_pad_id = raw.get("pad_token_id") is not None
        return ModelConfig(
            num_layers=gpt2.integer("n_layer"),
            local_layers=top.integer("local_transformer_layers"),
            hidden_size=hidden_size,
            num_heads=gpt2.integer("n_head"),
            inner_size=gpt2.integer("n_inner") if gpt2.raw.get("n_inner") is not None else 4 * hidden_size,
            layer_norm_eps=gpt2.number("layer_norm_epsilon"),
            rope_base=gpt2.number("rope_base"),
            max_positions=gpt2.integer("n_positions"),
            vocab_size=gpt2.integer("vocab_size"),
            n_vq=top.integer("n_vq"),
            codebook_sizes=tuple(top.get("audio_codebook_sizes")),
            audio_pad_id=top.integer("audio_pad_token_id"),
            pad_id=top.integer("pad_token_id", minimum=0) if has_pad_id else PUBLISHED_PAD_TOKEN_ID,
            im_start_id=top.integer("im_start_token_id", minimum=0),
            im_end_id=top.integer("im_end_token_id", minimum=0),
            audio_start_id=top.integer("audio_start_token_id", minimum=0),
            audio_end_id=top.integer("audio_end_token_id", minimum=0),
            audio_user_slot_id=top.integer("audio_user_slot_token_id", minimum=0),
            audio_assistant_slot_id=top.integer("audio_assistant_slot_token_id", minimum=0),
            sample_rate_hz=top.integer("audio_tokenizer_sample_rate"),
        )


@dataclass(frozen=True, slots=True)
class CodecStage:
    """One transformer stage of the codec, with the patcher that stands before it in upstream's module list.

    A patcher joins `patch_size` tokens to one in the encoder and splits one token in the decoder; 1 when there is none.
    tokens_per_frame and context count tokens of this stage; context is how many keys a query sees, itself included.
    """

    index: int  # of the transformer in upstream's module list; its tensors are called after it
    patch_size: int
    num_layers: int
    input_size: int
    model_size: int
    output_size: int
    num_heads: int
    inner_size: int
    context: int
    tokens_per_frame: int
    rope_base: float

    def __post_init__(self) -> None:
        if self.model_size % self.num_heads or self.head_size % 2:
            raise CheckpointError(f"codec width {self.model_size} does not split into {self.num_heads} even heads")
        if self.context < 1 or self.tokens_per_frame < 1:
            raise CheckpointError(f"codec stage {self.index}: a window of {self.context} tokens cannot hold a query")

    @property
    def head_size(self) -> int:
        return self.model_size // self.num_heads

    @property
    def ring_frames(self) -> int:
        """Frames that the cache ring of one layer holds: the context, rounded up so that no write splits a frame."""
        return -(-self.context // self.tokens_per_frame)


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """MOSS-Audio-Tokenizer: encoder stages, residual quantizer, decoder stages."""

    sample_rate_hz: int
    num_channels: int  # interleaved to one stream L0 R0 L1 R1 … before the first patch
    samples_per_frame: int  # per channel: 3,840 at 48 kHz
    encoder: tuple[CodecStage, ...]
    encoder_last_patch: int  # the patcher behind the last stage; 1 when there is none
    decoder: tuple[CodecStage, ...]
    decoder_last_patch: int
    latent_size: int  # values per frame between quantizer and stages: 768
    rvq_size: int  # width of the residual: 512
    n_vq: int
    codebook_size: int
    codebook_dim: int

    def __post_init__(self) -> None:
        encoder, decoder = self.encoder[-1], self.decoder[-1]
        if encoder.tokens_per_frame != self.encoder_last_patch:
            raise CheckpointError(f"the encoder ends with {encoder.tokens_per_frame} tokens per frame, expected one")
        if decoder.tokens_per_frame * self.decoder_last_patch != self.samples_per_frame * self.num_channels:
            raise CheckpointError(f"the decoder's patches do not give {self.samples_per_frame} samples per frame")
        size = 1
        for stage in self.encoder:
            _check_width(stage, size * stage.patch_size)
            size = stage.output_size
        if size * self.encoder_last_patch != self.latent_size:
            raise CheckpointError(f"the encoder ends with {size * self.encoder_last_patch}, not {self.latent_size}")
        size = self.latent_size
        for stage in self.decoder:
            _check_width(stage, size / stage.patch_size)
            size = stage.output_size
        if size != self.decoder_last_patch:
            raise CheckpointError(f"the decoder ends with {size} values per token, expected {self.decoder_last_patch}")

    @property
    def frame_rate_hz(self) -> float:
        return self.sample_rate_hz / self.samples_per_frame

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "config.json") -> CodecConfig:
        """Read the published layout; explicit decoder_kwargs win over reversed_decoder_kwargs (MODEL.md 1.2)."""
        top = _Fields(raw, where)
        top.must_be("model_type", "moss-audio-tokenizer", "speech_tokenizer")  # 48 kHz; 24 kHz (MOSS-SoundEffect)
        quantizer = _Fields(top.get("quantizer_kwargs"), f"{where}: quantizer_kwargs")
        quantizer.must_be("quantizer_type", "rlfq")
        rate_name = "sampling_rate" if raw.get("sampling_rate") is not None else "sample_rate"
        sample_rate_hz, samples_per_frame = top.integer(rate_name), top.integer("downsample_rate")
        num_channels = top.integer("number_channels") if raw.get("number_channels") is not None else 1
        if num_channels > 1:
            top.must_be("enable_channel_interleave", True)  # channels become one stream L0 R0 L1 R1 …
        stream_rate = sample_rate_hz * num_channels
        default_context_s = float(raw.get("causal_transformer_context_duration") or 10.0)
        encoder, encoder_last = _stages(top, "encoder_kwargs", stream_rate, default_context_s, True)
        decoder, decoder_last = _stages(
            top, "decoder_kwargs", sample_rate_hz / samples_per_frame, default_context_s, False
        )
        return CodecConfig(
            sample_rate_hz=sample_rate_hz,
            num_channels=num_channels,
            samples_per_frame=samples_per_frame,
            encoder=encoder,
            encoder_last_patch=encoder_last,
            decoder=decoder,
            decoder_last_patch=decoder_last,
            latent_size=quantizer.integer("input_dim"),
            rvq_size=quantizer.integer("rvq_dim"),
            n_vq=quantizer.integer("num_quantizers"),
            codebook_size=quantizer.integer("codebook_size"),
            codebook_dim=quantizer.integer("codebook_dim"),
        )


def _stages(
    top: _Fields, field: str, rate_hz: float, default_context_s: float, downwards: bool
) -> tuple[tuple[CodecStage, ...], int]:
    """Pair each patcher with the transformer behind it; return the stages and the patcher that is left over, or 1."""
    frame_rate_hz = _frame_rate(top)
    stages: list[CodecStage] = []
    patch = 0
    for index, item in enumerate(top.get(field)):
        part = _Fields(item, f"{top.where}: {field}[{index}]")
        part.must_be("module_type", "PatchedPretransform", "Transformer")
        if item["module_type"] == "PatchedPretransform":
            if patch:
                raise CheckpointError(f"{part.where}: two patchers in a row")
            patch = part.integer("patch_size")
            rate_hz = rate_hz / patch if downwards else rate_hz * patch
            continue
        for name, allowed in (("norm", "layer_norm"), ("positional_embedding", "rope"), ("gating", "none"),
                              ("causal", True)):  # fmt: skip
            part.must_be(name, allowed)
        context_s = float(item["context_duration"]) if item.get("context_duration") is not None else default_context_s
        if abs(rate_hz / frame_rate_hz - round(rate_hz / frame_rate_hz)) > 1e-9:
            raise CheckpointError(f"{part.where}: {rate_hz} tokens per second do not divide into frames")
        stages.append(
            CodecStage(
                index=index,
                patch_size=patch or 1,
                num_layers=part.integer("num_layers"),
                input_size=part.integer("input_dimension"),
                model_size=part.integer("d_model"),
                output_size=part.integer("output_dimension"),
                num_heads=part.integer("num_heads"),
                inner_size=part.integer("dim_feedforward"),
                context=round(rate_hz * context_s),
                tokens_per_frame=round(rate_hz / frame_rate_hz),
                rope_base=part.number("max_period"),
            )
        )
        patch = 0
    if not stages:
        raise CheckpointError(f"{top.where}: {field}: expected patchers and transformers in turn")
    return tuple(stages), patch or 1


def _check_width(stage: CodecStage, width: float) -> None:
    if stage.input_size != width:
        raise CheckpointError(f"codec stage {stage.index}: input_dimension {stage.input_size}, but it gets {width:g}")


def _frame_rate(top: _Fields) -> float:
    rate_name = "sampling_rate" if top.raw.get("sampling_rate") is not None else "sample_rate"
    return top.integer(rate_name) / top.integer("downsample_rate")
