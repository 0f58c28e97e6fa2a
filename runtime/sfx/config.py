"""The config of MOSS-SoundEffect v1 (`moss_tts_delay`), read from config.json; relatives are named and refused.

The released config.json lacks some special ids, and upstream then fails inside transformers (docs/soundeffect.md). An
id that is missing is taken from the published table and a notice says so; nothing has to be edited by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config import _Fields, read_config_json
from runtime.errors import CheckpointError

FRAME_RATE_HZ = 12.5  # rows per second of sound: 24,000 / 1,920

PUBLISHED_IDS = {
    "pad_token_id": 151643,
    "im_start_token_id": 151644,
    "im_end_token_id": 151645,
    "audio_start_token_id": 151652,
    "audio_end_token_id": 151653,
    "audio_user_slot_token_id": 151654,
    "audio_assistant_gen_slot_token_id": 151656,
    "audio_assistant_delay_slot_token_id": 151662,
}
V2 = (
    "MOSS-SoundEffect v2 is another kind of model (a diffusion transformer with flow matching and a 48 kHz DAC "
    "autoencoder); it would need its own text encoder, DiT, sampler and VAE modules, which are not implemented. "
    "Use MOSS-SoundEffect v1 (model_type moss_tts_delay)"
)
RELATIVES = {
    "moss_tts_nano": "is MOSS-TTS-Nano, a voice model: export it with convert-moss and speak with run-om say",
    "speech_tokenizer": "is the 24 kHz codec; give this directory as --codec and the language model as --checkpoint",
    "moss-audio-tokenizer": "is a codec; give the 24 kHz one as --codec and the language model as --checkpoint",
}


@dataclass(frozen=True, slots=True)
class SfxConfig:
    """A Qwen3 backbone over rows [text id, n_vq codes] and 1 + n_vq heads on the same hidden state."""

    num_layers: int  # L
    hidden_size: int  # E
    num_heads: int  # H
    num_kv_heads: int  # G, key/value heads; H / G query heads share one
    head_size: int  # D
    inner_size: int  # width of the SwiGLU
    rms_norm_eps: float
    rope_base: float
    max_positions: int
    vocab_size: int
    n_vq: int  # Q
    codebook_size: int  # codes per codebook, the pad code not counted
    audio_pad_code: int  # the last row of each code embedding
    pad_id: int
    im_start_id: int
    im_end_id: int
    audio_start_id: int
    audio_end_id: int
    gen_slot_id: int  # this row and the next hold codes
    delay_slot_id: int  # no new frame starts; the delayed codebooks run out
    sample_rate_hz: int
    notices: tuple[str, ...] = ()  # what was not in config.json and was taken from the published table

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            raise CheckpointError(
                f"{self.num_heads} heads of {self.head_size} over {self.num_kv_heads} key/value heads: "
                "expected a multiple and an even size"
            )
        if self.audio_pad_code != self.codebook_size:
            raise CheckpointError(
                f"audio_pad_code {self.audio_pad_code}: expected {self.codebook_size}, the row after the codes"
            )
        for name in ("pad_id", "im_start_id", "im_end_id", "audio_start_id", "audio_end_id", "gen_slot_id",
                     "delay_slot_id"):  # fmt: skip
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise CheckpointError(f"{name} {getattr(self, name)} lies outside the vocabulary of {self.vocab_size}")

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def row_size(self) -> int:
        return 1 + self.n_vq

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "config.json") -> SfxConfig:
        """Read the published layout; CheckpointError names the relative when it is not SoundEffect v1."""
        _refuse_relatives(raw, where)
        top = _Fields(raw, where)
        language = _Fields(top.get("language_config"), f"{where}: language_config")
        for name, only in (("hidden_act", "silu"), ("model_type", "qwen3")):
            language.must_be(name, only)
        for name in ("attention_bias", "tie_word_embeddings", "use_sliding_window", "rope_scaling"):
            if language.raw.get(name):
                raise CheckpointError(f"{language.where}: {name} is {language.raw[name]!r}; only a model without it "
                                      "is implemented")  # fmt: skip
        ids = {name: raw[name] if raw.get(name) is not None else value for name, value in PUBLISHED_IDS.items()}
        missing = [name for name in PUBLISHED_IDS if raw.get(name) is None]
        hidden_size, num_heads = language.integer("hidden_size"), language.integer("num_attention_heads")
        return SfxConfig(
            num_layers=language.integer("num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=language.integer("num_key_value_heads"),
            head_size=language.integer("head_dim"),
            inner_size=language.integer("intermediate_size"),
            rms_norm_eps=language.number("rms_norm_eps"),
            rope_base=_rope_base(language),
            max_positions=language.integer("max_position_embeddings"),
            vocab_size=language.integer("vocab_size"),
            n_vq=top.integer("n_vq"),
            codebook_size=top.integer("audio_vocab_size"),
            audio_pad_code=top.integer("audio_pad_code"),
            pad_id=ids["pad_token_id"],
            im_start_id=ids["im_start_token_id"],
            im_end_id=ids["im_end_token_id"],
            audio_start_id=ids["audio_start_token_id"],
            audio_end_id=ids["audio_end_token_id"],
            gen_slot_id=ids["audio_assistant_gen_slot_token_id"],
            delay_slot_id=ids["audio_assistant_delay_slot_token_id"],
            sample_rate_hz=top.integer("sampling_rate"),
            notices=tuple(f"{where}: {n} is missing; taken from the published table: {ids[n]}" for n in missing),
        )


def read_sfx_config(directory: Path) -> SfxConfig:
    """The config of a checkpoint directory; v2 (a diffusers layout) is recognised even without a config.json."""
    index = directory / "model_index.json"
    if index.is_file():
        try:
            class_name = json.loads(index.read_text(encoding="utf-8")).get("_class_name", "a pipeline")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{index} is not readable JSON ({error}); download it again") from error
        raise CheckpointError(f"{index} describes {class_name}: {V2}")
    return SfxConfig.from_dict(read_config_json(directory), str(directory / "config.json"))


def seconds_to_tokens(seconds: float) -> int:
    """The length hint of the prompt: 12.5 tokens per second, at least one."""
    return max(1, int(seconds * FRAME_RATE_HZ))


def _refuse_relatives(raw: Mapping[str, Any], where: str) -> None:
    model_type = raw.get("model_type")
    if raw.get("_class_name") is not None:
        raise CheckpointError(f"{where} describes {raw['_class_name']}: {V2}")
    if model_type != "moss_tts_delay":
        other = "is not MOSS-SoundEffect v1 (moss_tts_delay); it would need its own modules"
        why = RELATIVES.get(str(model_type), other)
        raise CheckpointError(f"{where}: model_type {model_type!r} {why}")
    language = raw.get("language_config") or {}
    n_vq, shape = raw.get("n_vq"), (language.get("hidden_size"), language.get("num_hidden_layers"))
    relative = None
    if n_vq == 32:
        relative = "MOSS-TTS (32 codebooks), a voice model whose prompt holds a reference clip"
    elif shape == (2048, 28):
        relative = "MOSS-VoiceGenerator (1.7 B), which designs voices"
    if relative is not None:
        raise CheckpointError(
            f"{where}: this is {relative}; it would need its own prompt fields and defaults, which are not "
            "implemented. Use MOSS-SoundEffect v1 (16 codebooks, Qwen3-8B)"
        )


def _rope_base(language: _Fields) -> float:
    """`rope_theta`, or transformers 5's `rope_parameters`."""
    parameters = language.raw.get("rope_parameters")
    if language.raw.get("rope_theta") is None and isinstance(parameters, dict):
        nested = _Fields(parameters, f"{language.where}: rope_parameters")
        if parameters.get("rope_type", "default") != "default":
            nested.must_be("rope_type", "default")
        return nested.number("rope_theta")
    return language.number("rope_theta")
