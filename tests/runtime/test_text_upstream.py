"""The published preparation and chunking, against what the published code gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime import text_upstream
from runtime.text import TextOptions, TextStyle, plan_text
from runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "text" / "text.json").read_text())
TOKENIZER = Tokenizer(DATA / "tokenizer" / "tokenizer.model")


def count(text: str) -> int:
    return len(TOKENIZER.encode(text))


@pytest.mark.parametrize("case", GOLDEN["language"], ids=lambda c: c["text"] + c["voice"])
def test_the_language_is_upstreams(case):
    assert text_upstream.language(case["text"], case["voice"]) == case["lang"]


@pytest.mark.parametrize("case", GOLDEN["prepare_sentence_text"], ids=lambda c: c["in"][:20])
def test_the_prepared_text_is_upstreams(case):
    assert text_upstream.prepare(case["in"]) == case["torch"]


@pytest.mark.parametrize("case", GOLDEN["chunks"], ids=lambda c: f"{c['text'][:20]}-{c['max_tokens']}")
def test_chunks_and_pauses_are_upstreams(case):
    text, max_tokens = case["text"], case["max_tokens"]
    assert text_upstream.split(text, max_tokens, count) == case["torch_split"]
    chunks = text_upstream.chunks(text, max_tokens, count)
    assert chunks == case["torch_effective"]
    assert [text_upstream.pause_seconds(chunk) for chunk in chunks] == case["pauses_s"]
    if "onnx_effective" in case:
        assert text_upstream.chunks(text, max_tokens, count, strip=True) == case["onnx_effective"]


@pytest.mark.parametrize("case", GOLDEN["chunks"][::5], ids=lambda c: f"{c['text'][:20]}-{c['max_tokens']}")
def test_a_plan_in_upstreams_style_is_upstreams_chunks(case):
    plan = plan_text(case["text"], TOKENIZER, TextOptions(TextStyle.UPSTREAM, case["max_tokens"]))
    assert [segment.text for segment in plan.segments] == case["torch_effective"]
    assert [segment.pause_seconds for segment in plan.segments] == [*case["pauses_s"][:-1], 0.0]


def test_prepared_spaces_do_not_reach_the_model():
    assert TOKENIZER.encode("        Hello.") == TOKENIZER.encode("Hello.")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("x" * 30 + " " + "y" * 30, "x" * 30),
        ("x" * 12 + " " + "y" * 40, "x" * 12),
        ("x" * 11 + " " + "y" * 40, "x" * 11 + " " + "y" * 24),
    ],
)
def test_a_cut_goes_back_to_a_boundary_among_24_characters(text, first):
    assert text_upstream._cut(text, 36, len)[0] == first
