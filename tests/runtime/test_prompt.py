"""Prompt rows against the rows that the published code builds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.config import ModelConfig
from runtime.errors import AudioError, TextError
from runtime.prompt import PromptBuilder, Template
from runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
TOKENIZER = Tokenizer(DATA / "tokenizer" / "tokenizer.model")
ZH, EN = "欢迎关注模思智能，今天天气真好。", "The quick brown fox jumps over the lazy dog."


def read_config(name: str) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((DATA / "nano" / name / "config.json").read_text()))


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(DATA / "prompts" / "prompts.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder(read_config("tiny_llm_a"), TOKENIZER)  # the published ids, vocabulary and codebooks


def audio_part(rows: np.ndarray, pad: int = 1024) -> np.ndarray:
    return rows[rows[:, 1] != pad][:, 1:]


def test_voice_cloning_rows_are_the_published_ones(builder, golden):
    voice = golden["junhao_official_first24_codes"]
    np.testing.assert_array_equal(builder.voice_clone(ZH, voice), golden["voice_clone_zh"])
    np.testing.assert_array_equal(builder.voice_clone(EN, voice[:3]), golden["voice_clone_en"])


def test_fewer_codebooks_are_padded(builder, golden):
    codes = audio_part(golden["voice_clone_nq4"])[:, :4]
    np.testing.assert_array_equal(builder.voice_clone("你好。", codes), golden["voice_clone_nq4"])


def test_continuation_rows_are_the_published_ones(builder, golden):
    np.testing.assert_array_equal(builder.continuation("Hello there."), golden["continuation_text_only"])
    codes = golden["junhao_official_first24_codes"][:5]
    rows = builder.continuation("今天天气真好。", "欢迎关注模思智能。", codes)
    np.testing.assert_array_equal(rows, golden["continuation_with_prompt"])


def test_the_onnx_template_lacks_the_first_row(golden):
    builder = PromptBuilder(read_config("tiny_llm_a"), TOKENIZER, Template.ONNX)
    rows = builder.voice_clone(ZH, golden["junhao_official_first24_codes"])
    np.testing.assert_array_equal(rows, golden["voice_clone_zh_onnx"])


def test_rows_count_as_documented_and_are_int32(builder, golden):
    rows = builder.voice_clone(EN, golden["junhao_official_first24_codes"])
    assert rows.shape == (78 + 24 + len(TOKENIZER.encode(EN)), 17)
    assert rows.dtype == np.int32


class FoldedTokenizer:
    """The published ids folded into a vocabulary of 512, as the golden run of tiny_llm_b does."""

    def encode(self, text: str) -> list[int]:
        return [i if i < 16 else 16 + i % 496 for i in TOKENIZER.encode(text)]

    def encode_template(self, text: str) -> list[int]:
        return [i if i < 16 else 16 + i % 496 for i in TOKENIZER.encode_template(text)]


def test_another_vocabulary_pad_id_and_codebook_size_come_from_the_config(golden):
    builder = PromptBuilder(read_config("tiny_llm_b"), FoldedTokenizer(), Template.ONNX)
    rows = builder.voice_clone(ZH, golden["tiny_b_ref_codes"])
    np.testing.assert_array_equal(rows, golden["tiny_b_request_rows"])


def test_special_ids_come_from_the_config(golden):
    config = replace(read_config("tiny_llm_a"), im_start_id=101, im_end_id=102, audio_start_id=103, audio_end_id=104,
                     audio_user_slot_id=105, audio_assistant_slot_id=106)  # fmt: skip
    builder = PromptBuilder(config, TOKENIZER)
    published = np.array([4, 5, 6, 7, 8, 9])
    for rows, want in (
        (builder.voice_clone(ZH, golden["junhao_official_first24_codes"]), golden["voice_clone_zh"]),
        (builder.continuation("今天天气真好。", "欢迎关注模思智能。", golden["junhao_official_first24_codes"][:5]),
         golden["continuation_with_prompt"]),
    ):  # fmt: skip
        moved = want.copy()
        special = np.isin(want[:, 0], published)
        moved[special, 0] = 97 + want[special, 0]
        np.testing.assert_array_equal(rows, moved)


def test_a_tokenizer_of_another_checkpoint_is_refused():
    with pytest.raises(TextError, match=r"token id 13325 lies outside the model's vocabulary of 512"):
        PromptBuilder(read_config("tiny_llm_b"), TOKENIZER)


def test_a_text_whose_ids_exceed_the_vocabulary_is_refused():
    config = replace(read_config("tiny_llm_a"), vocab_size=14_000)
    with pytest.raises(TextError, match=r"the text '안녕하세요': token id \d+ lies outside"):
        PromptBuilder(config, TOKENIZER).continuation("안녕하세요")


def test_control_tokens_in_the_text_do_not_become_rows(builder, golden):
    rows = builder.voice_clone("Hi <|im_end|><|im_start|>", golden["junhao_official_first24_codes"])
    assert np.count_nonzero(rows[:, 0] == 4) == 2  # the two of the template
    assert np.count_nonzero(rows[:, 0] == 5) == 1


@pytest.mark.parametrize("text", ["", " \n ", "\u200b"])
def test_a_text_without_tokens_is_refused(builder, golden, text):
    with pytest.raises(TextError, match="nothing to speak"):
        builder.voice_clone(text, golden["junhao_official_first24_codes"])


def test_continuation_wants_prompt_text_and_codes_together(builder, golden):
    with pytest.raises(TextError, match="the prompt text without the prompt clip"):
        builder.continuation("Hi.", "Before.")
    with pytest.raises(TextError, match="the prompt clip without the prompt text"):
        builder.continuation("Hi.", prompt_codes=golden["junhao_official_first24_codes"])


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((0, 16), np.int32), r"got \[0, 16\]"),
        (np.zeros((3, 17), np.int32), r"\[frames, 1 to 16\], got \[3, 17\]"),
        (np.zeros((3, 16), np.float32), r"got float32\[3, 16\]"),
        (np.zeros(16, np.int32), r"got int32\[16\]"),
        (np.full((2, 16), 1024), r"frame 0, codebook 0: expected 0 to 1023, got 1024"),
        (np.array([[5, 6], [7, -1]]), r"frame 1, codebook 1: expected 0 to 1023, got -1"),
    ],
)
def test_what_are_not_codes_of_this_model_is_refused(builder, codes, message):
    with pytest.raises(AudioError, match=message):
        builder.voice_clone("Hi.", codes)
