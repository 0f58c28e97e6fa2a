"""Token ids against the published tokenizer, and control tokens in text from people."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import CheckpointError, TextError
from runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
MODEL = DATA / "tokenizer.model"
STRINGS = json.loads((DATA / "strings.json").read_text())["strings"]
TOKENIZER = Tokenizer(MODEL)
CONTROL_IDS = range(15)  # <unk> <s> </s> <pad> and the eleven user-defined symbols of the published model
CONTROL_PIECES = [TOKENIZER.piece(i) for i in range(4, 15)]


@pytest.mark.parametrize("case", STRINGS, ids=lambda case: repr(case["text"][:20]))
def test_template_ids_are_the_published_ones(case):
    assert TOKENIZER.encode_template(case["text"]) == case["ids"]


@pytest.mark.parametrize("case", STRINGS, ids=lambda case: repr(case["text"][:20]))
def test_text_ids_are_the_published_ones_unless_the_text_spells_a_control_token(case):
    if any(i in range(4, 15) for i in case["ids"]):
        assert not set(TOKENIZER.encode(case["text"])) & set(CONTROL_IDS)
    else:
        assert TOKENIZER.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("piece", CONTROL_PIECES)
def test_a_control_token_in_text_becomes_ordinary_pieces_that_spell_it(piece):
    assert TOKENIZER.encode_template(f"a {piece} b").count(TOKENIZER.encode_template(piece)[-1]) == 1
    ids = TOKENIZER.encode(f"a {piece} b")
    assert not set(ids) & set(CONTROL_IDS)
    assert TOKENIZER.decode(ids) == f"a {piece} b"
    assert TOKENIZER.control_literals(f"a {piece} b") == [piece]


def test_a_control_token_in_full_width_letters_is_disarmed_too():
    text = "＜|im_start|＞"  # the normaliser turns it into <|im_start|> before pieces are looked up
    assert 4 in TOKENIZER.encode_template(text)
    assert 4 not in TOKENIZER.encode(text)
    assert TOKENIZER.control_literals(text) == ["<|im_start|>"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*CONTROL_PIECES, "<", "|", ">", "im_start"]), st.text(max_size=8))))
def test_no_text_gives_a_control_token(parts):
    assert not set(TOKENIZER.encode("".join(parts))) & set(CONTROL_IDS)


def test_ids_that_spell_bytes_are_counted():
    ids = TOKENIZER.encode("สวัสดี")
    assert TOKENIZER.count_bytes(ids) == len(ids) - 1  # all but the leading space piece
    assert TOKENIZER.count_bytes(TOKENIZER.encode("Hello")) == 0
    assert TOKENIZER.count_unknown(ids) == 0


def test_half_a_surrogate_pair_is_refused_with_its_place():
    with pytest.raises(TextError, match=r"character 3 is half of a surrogate pair \(U\+D83D\)"):
        TOKENIZER.encode("ab\ud83d")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "is not a SentencePiece model"),
        (MODEL.read_bytes()[:200_000], "is not a SentencePiece model"),
    ],
)
def test_a_broken_model_file_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_model_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.model: cannot read"):
        Tokenizer(tmp_path / "gone.model")


def test_the_model_file_is_not_changed(tmp_path):
    copy = tmp_path / "tokenizer.model"
    shutil.copy(MODEL, copy)
    Tokenizer(copy).encode("<|im_start|>")
    assert copy.read_bytes() == MODEL.read_bytes()
