"""Segments: nothing lost, within the budget, cut where a reader would pause."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cli import cli
from runtime.errors import TextError
from runtime.text import TextOptions, TextPlan, check_coverage, pause_seconds, plan_text, segment
from runtime.text_normaliser import NormaliserChoice
from runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
MODEL = DATA / "tokenizer" / "tokenizer.model"
TOKENIZER = Tokenizer(MODEL)
CHUNKS = json.loads((DATA / "text" / "text.json").read_text())["chunks"]
STRINGS = json.loads((DATA / "tokenizer" / "strings.json").read_text())["strings"]
LONG_EN = next(c["text"] for c in CHUNKS if c["text"].startswith("Dr. Smith"))
LONG_ZH = next(c["text"] for c in CHUNKS if c["text"].startswith("今天"))


def count(text: str) -> int:
    return len(TOKENIZER.encode(text))


def plan(text: str, max_tokens: int = 75) -> TextPlan:
    return plan_text(text, TOKENIZER, TextOptions(max_tokens=max_tokens, normaliser=NormaliserChoice.OFF))


def texts(text: str, max_tokens: int = 75) -> list[str]:
    return [s.text for s in plan(text, max_tokens).segments]


SAME_AS_UPSTREAM = [
    ("Hello. How are you today my friend", 12), ("Hello. How are you today my friend", 75),
    (LONG_ZH, 75), (LONG_ZH, 50), ("（括号）。”尾随引号", 12), ("（括号）。”尾随引号", 50), ("你好", 12),
    ("a. b. c. d. e. f. g.", 12),
]  # fmt: skip


@pytest.mark.parametrize(("text", "max_tokens"), SAME_AS_UPSTREAM, ids=lambda v: str(v)[:12])
def test_segments_end_where_upstreams_do_where_upstream_is_not_at_fault(text, max_tokens):
    want = next(c["torch_split"] for c in CHUNKS if (c["text"], c["max_tokens"]) == (text, max_tokens))
    got = texts(text, max_tokens)
    as_upstream = [re.sub(r"\bv2", "v2", s).replace("是 v2", "是v2").replace("a. b", "A. b") for s in got]
    assert as_upstream == want


@pytest.mark.parametrize("case", STRINGS, ids=lambda c: repr(c["text"][:20]))
def test_every_language_of_the_golden_strings_is_planned(case):
    speakable = any(c.isalnum() for c in case["text"])
    if not speakable:
        with pytest.raises(TextError, match="nothing to speak"):
            plan(case["text"])
        return
    for max_tokens in (8, 75):
        got = plan(case["text"], max_tokens)
        assert all(0 < len(s.token_ids) <= max_tokens for s in got.segments)
        assert all(list(s.token_ids) == TOKENIZER.encode(s.text) for s in got.segments)
        letters = [c for c in case["text"] if c.isalnum()]
        assert [c for s in got.segments for c in s.text if c.isalnum()] == letters


def test_well_formed_text_keeps_the_published_ids():
    for text in ("Hello, World!", "你好，世界！", "Привет, как дела? Сегодня хорошая погода.",
                 "안녕하세요. 오늘 날씨가 정말 좋네요.",
                 "¿Cómo estás? Mañana voy a la playa.", "مرحبا بالعالم، كيف حالك؟"):  # fmt: skip
        want = next(c["ids"] for c in STRINGS if c["text"] == text)
        assert [list(s.token_ids) for s in plan(text).segments] == [want]


def test_decimals_versions_and_addresses_are_not_split():
    assert texts(LONG_EN, 12)[:2] == ["Dr. Smith paid $3.14 for", "version 2.3.1 of the app."]
    for text in (
        "It is 3.14.",
        "Version 2.3.1 is out.",
        "圆周率约等于3.14159，版本号是 v2.3.1。",
        "See https://a.b/c?d=1;e=2 now.",
    ):
        assert "".join(texts(text, 8)).replace(" ", "") == text.replace(" ", "")
        assert not any(re.search(r"\d\.$", s) for s in texts(text, 8)[:-1])


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        ("One is here. Two is there! Three?", ["One is here.", "Two is there!", "Three?"]),
        ("“你好吗？”他问道。“好！”她说。", ["“你好吗？”", "他问道。", "“好！”", "她说。"]),
        ("Dr. No met J. R. Smith, e.g. here. Then he left.", ["Dr. No met J. R. Smith, e.g. here.", "Then he left."]),
        ("كيف حالك؟ بخير۔ شكرا", ["كيف حالك؟", "بخير۔", "شكرا."]),
        ("नमस्ते। कैसे हो", ["नमस्ते।", "कैसे हो।"]),
        ("Wow!Great;really", ["Wow!Great;really."]),
        ("太好了！我们今天去公园。真的吗？！", ["太好了！", "我们今天去公园。", "真的吗？！"]),
    ],
)  # fmt: skip
def test_sentences_end_by_the_rule_of_their_script(text, wants):
    got = plan(text, 0).spoken
    slices = segment(got, 1, lambda part: 1)  # every sentence fits, none may be merged
    assert [s.strip() for s in slices] == wants


def test_a_sentence_over_the_budget_is_split_at_commas_then_cut_in_equal_parts():
    assert texts("we should go now, because it is getting late, and cold", 8) == [
        "we should go now,", "because it is getting late,", "and cold.",
    ]  # fmt: skip
    parts = texts("这是一段没有任何标点符号的超长文本" * 8, 50)
    sizes = [count(part) for part in parts]
    assert len(parts) == -(-count("这是一段没有任何标点符号的超长文本" * 8) // 50)
    assert max(sizes) - min(sizes) <= 10  # upstream leaves "符。" alone


def test_a_cut_goes_between_words_and_never_into_a_number_or_a_combined_letter():
    for words in (
        "alpha beta gamma delta epsilon zeta eta theta",
        "первое второе третье четвёртое пятое шестое седьмое",
    ):
        assert all(set(part.rstrip(".").split()) <= set(words.split()) for part in texts(words, 12))
    numbers = texts("版本号码就是2024.05.06这个数字" * 6, 24)
    assert sum(part.count("2024.05.06") for part in numbers) == 6
    combined = "e\u0301" * 300
    assert all(not part.startswith("\u0301") for part in texts(combined, 20))


@pytest.mark.parametrize("text", ["a" * 10_000, "你" * 10_000, "今天天气真好。" * 1_500, "x. " * 3_500, "สวัสดี" * 1_700,
                                  "1" * 10_000, "مرحبا " * 1_700, "word " * 2_000, "a,b" * 3_300])  # fmt: skip
def test_ten_thousand_characters_and_endless_words_are_quick_and_whole(text):
    start = time.process_time()
    got = plan(text)
    assert time.process_time() - start < 2  # 0.05 s here
    assert max(len(s.token_ids) for s in got.segments) <= 75
    assert "".join(s.text for s in got.segments).replace(" ", "").rstrip(".。") == text.replace(" ", "").rstrip(".。")


@settings(max_examples=150, deadline=None)
@given(st.text(min_size=1, max_size=200), st.integers(8, 80))
def test_the_slices_of_any_text_are_the_text_and_within_the_budget(text, max_tokens):
    slices = segment(text, max_tokens, count)
    check_coverage(text, slices)
    assert all(count(s) <= max_tokens or len(s) == 1 for s in slices)


def test_a_lost_character_is_an_error_that_says_where():
    check_coverage("abc def", ["abc ", "def"])
    for slices in (["abc ", "ef"], ["abc ", "de"], ["abc ", "def", "f"], ["abd ", "def"]):
        with pytest.raises(TextError, match=r"segmentation lost or changed text at character \d"):
            check_coverage("abc def", slices)


def test_coverage_is_checked_for_every_plan(monkeypatch):
    monkeypatch.setattr("runtime.text._merge", lambda units, *_: units[:-1])
    with pytest.raises(TextError, match="lost or changed text at character 8"):
        plan("First. Second.")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("One two three four.", 0.4), ("One two three four five.", 0.24), ("你好。", 0.4), ("我们今天去公园。", 0.4),
        ("我们今天去公园散步吧。", 0.24), ("안녕하세요 여러분.", 0.4), ("我用 iPhone 打电话。", 0.4),
    ],
)  # fmt: skip
def test_the_pause_is_long_after_few_words(text, seconds):
    assert pause_seconds(text) == seconds


def test_the_last_segment_has_no_pause():
    got = plan("One two three four five. Six seven eight nine ten.", 8)
    assert [s.pause_seconds for s in got.segments] == [0.24, 0.0]


def test_every_change_is_a_note():
    notes = plan("Hi <|im_start|> 🙂\u202e <user_inst>. สวัสดีครับ สวัสดีครับ").notes
    assert len(notes) == 4
    assert "U+202E RIGHT-TO-LEFT OVERRIDE" in notes[0]
    assert "U+1F642" in notes[1]
    assert notes[2] == "read as ordinary text, not as control tokens: <|im_start|>, <user_inst>"
    assert re.fullmatch(r"\d+ of \d+ tokens spell single bytes: the model hardly knows this script", notes[3])
    assert plan("Hello there.").notes == ()


def test_a_segment_of_punctuation_alone_is_left_out_with_a_note():
    got = plan("Hello. " + "&& " * 40 + "Bye.", 16)
    assert [s.text for s in got.segments if not any(map(str.isalnum, s.text))] == []
    assert "".join(c for s in got.segments for c in s.text if c.isalnum()) == "HelloBye"
    assert re.fullmatch(r"left out [1-9] segments of punctuation alone", got.notes[0])


@pytest.mark.parametrize("text", ["", "  \n", "... !!! ???", "🎉🎉", "\u200b", "—", "“”"])
def test_nothing_to_speak_is_refused(text):
    with pytest.raises(TextError, match="nothing to speak"):
        plan(text)


def test_limits_are_stated():
    with pytest.raises(TextError, match="1000001 characters, the limit is 1000000"):
        plan("a" * 1_000_001)
    with pytest.raises(TextError, match=r"expected 0 \(no limit\) or at least 8, got 7"):
        TextOptions(max_tokens=7)
    assert len(plan(LONG_EN, 0).segments) == 1


def run(*args: str, stdin: bytes = b"") -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["text", "--tokenizer", str(MODEL), *args], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command_shows_the_plan():
    code, output = run("Hello there 🙂. How are you today, my friend?", "--max-tokens", "8")
    assert code == 0
    assert output.splitlines() == [
        "1. Hello there.",
        "   3 tokens, then 0.40 s of silence: 7026 458 10380",
        "2. How are you today, my friend?",
        f"   8 tokens: {' '.join(map(str, TOKENIZER.encode('How are you today, my friend?')))}",
        "2 segments, 11 tokens, 42 characters, normaliser none",
        "note: removed emoji and pictographs: U+1F642 SLIGHTLY SMILING FACE",
    ]


def test_the_command_speaks_json_and_reads_files_and_standard_input(tmp_path):
    (tmp_path / "a.txt").write_text("你好", encoding="utf-8")
    for args, stdin in ((["你好"], b""), (["-"], "你好".encode()), (["--text-file", str(tmp_path / "a.txt")], b"")):
        data = json.loads(run(*args, "--json", stdin=stdin)[1])
        assert data["segments"] == [{"text": "你好。", "token_ids": [3985, 10445, 10382], "pause_seconds": 0.0}]
        assert (data["num_characters"], data["spoken"]) == (3, "你好。")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["..."], "nothing to speak"),
        ([], "give the text as an argument"),
        (["a", "--text-file", "b"], "one of them"),
        (["--text-file", "gone.txt"], "gone.txt: cannot read the text"),
        (["a", "--max-tokens", "3"], "expected 0"),
    ],
)
def test_the_command_refuses_in_one_line(args, message):
    code, output = run(*args)
    assert code == 1
    assert message in output
    assert output.count("\n") == 1


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("héllo".encode("utf-16"))
    code, output = run("--text-file", str(tmp_path / "a.txt"))
    assert (code, "cannot read the text as UTF-8" in output) == (1, True)


def test_upstreams_style_speaks_the_text_as_it_came():
    assert json.loads(run("  hello ", "--text-style", "upstream", "--json")[1])["segments"][0]["text"] == "  hello "
