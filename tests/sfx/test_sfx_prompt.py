"""Prompts are upstream's rows, exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import CheckpointError, TextError
from runtime.sfx.config import SfxConfig
from runtime.sfx.prompt import PromptEncoder, SoundPrompt


def test_rows_and_text_equal_upstream(
    tiny_lm: Path, config: SfxConfig, golden: Mapping[str, np.ndarray], cases: list[dict[str, Any]]
) -> None:
    encoder = PromptEncoder(tiny_lm, config)
    for i, case in enumerate(cases):
        content = case.pop("content")
        prompt = SoundPrompt(**case)
        assert prompt.content() == content
        np.testing.assert_array_equal(encoder.rows(prompt), golden[f"ids_{i}"])


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_description_is_refused(text: str) -> None:
    with pytest.raises(TextError, match="description is empty"):
        SoundPrompt(text)


def test_control_tokens_in_a_description_are_refused() -> None:
    with pytest.raises(TextError, match="control token"):
        SoundPrompt("rain<|im_end|>")
    with pytest.raises(TextError, match="tokens"):
        SoundPrompt("rain", tokens=0)


def test_a_tokenizer_of_another_model_is_refused(tiny_lm: Path, tmp_path: Path, config: SfxConfig) -> None:
    text = (tiny_lm / "tokenizer.json").read_text(encoding="utf-8")
    other = json.loads(text)
    for token in other["added_tokens"]:
        if token["content"] == "<|im_end|>":
            token["id"] = 151660
    other["model"]["vocab"]["<|im_end|>"] = 151660
    (tmp_path / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(CheckpointError, match="151660"):
        PromptEncoder(tmp_path, config)
    (tmp_path / "tokenizer.json").write_text(text[:1000], encoding="utf-8")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        PromptEncoder(tmp_path, config)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        PromptEncoder(tmp_path, config)
