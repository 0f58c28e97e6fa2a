"""The config of MOSS-SoundEffect: published ids, notices, and the relatives that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import CheckpointError
from runtime.sfx.config import PUBLISHED_IDS, SfxConfig, read_sfx_config, seconds_to_tokens


def test_a_missing_id_is_taken_from_the_published_table_with_a_notice(raw_config: dict[str, Any]) -> None:
    for name in ("pad_token_id", "im_start_token_id", "im_end_token_id"):
        del raw_config[name]
    config = SfxConfig.from_dict(raw_config)
    assert (config.pad_id, config.im_start_id, config.im_end_id) == (151643, 151644, 151645)
    assert len(config.notices) == 3 and "im_end_token_id is missing" in config.notices[2]


def test_an_id_in_the_config_wins_over_the_table(raw_config: dict[str, Any]) -> None:
    raw_config["audio_start_token_id"] = 7
    config = SfxConfig.from_dict(raw_config)
    assert config.audio_start_id == 7 and config.notices == ()


def test_the_table_holds_the_ids_that_upstream_uses(raw_config: dict[str, Any]) -> None:
    assert {name: raw_config[name] for name in PUBLISHED_IDS} == PUBLISHED_IDS


def test_rope_theta_is_also_found_in_rope_parameters(raw_config: dict[str, Any]) -> None:
    del raw_config["language_config"]["rope_theta"]
    raw_config["language_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert SfxConfig.from_dict(raw_config).rope_base == 5e5
    raw_config["language_config"]["rope_parameters"]["rope_type"] = "yarn"
    with pytest.raises(CheckpointError, match="yarn"):
        SfxConfig.from_dict(raw_config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_vq": 32}, r"MOSS-TTS \(32 codebooks\)"),
        ({"model_type": "moss_tts_nano"}, "run-om say"),
        ({"model_type": "speech_tokenizer"}, "--codec"),
        ({"model_type": "moss_tts_local"}, "own modules"),
        ({"_class_name": "WanTransformer3DModel"}, "MOSS-SoundEffect v2"),
        ({"audio_pad_code": 1000}, "audio_pad_code"),
        ({"n_vq": None}, "n_vq is missing"),
    ],
)
def test_other_models_are_named_and_refused(raw_config: dict[str, Any], change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        SfxConfig.from_dict(raw_config | change)


def test_the_voice_generator_is_known_by_its_size(raw_config: dict[str, Any]) -> None:
    raw_config["language_config"] |= {"hidden_size": 2048, "num_hidden_layers": 28}
    with pytest.raises(CheckpointError, match="VoiceGenerator"):
        SfxConfig.from_dict(raw_config)


@pytest.mark.parametrize("field", ["tie_word_embeddings", "attention_bias", "rope_scaling"])
def test_a_backbone_with_other_mathematics_is_refused(raw_config: dict[str, Any], field: str) -> None:
    raw_config["language_config"][field] = True
    with pytest.raises(CheckpointError, match=field):
        SfxConfig.from_dict(raw_config)


def test_version_two_is_recognised_by_its_pipeline_index(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "MossSoundEffectPipeline"}))
    with pytest.raises(CheckpointError, match=r"v2 .* diffusion transformer"):
        read_sfx_config(tmp_path)


def test_ten_seconds_are_125_tokens_and_a_blink_is_one() -> None:
    assert seconds_to_tokens(10) == 125
    assert seconds_to_tokens(0.01) == 1
