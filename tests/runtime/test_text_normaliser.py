"""Numbers as words: which rules run, what they may not touch, and what is said when they are not installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from runtime import text_normaliser
from runtime.errors import TextError
from runtime.text_normaliser import NormaliserChoice, language_of, normalise


@pytest.fixture(autouse=True)
def _forget_loaded_grammars():
    text_normaliser._load.cache_clear()
    yield
    text_normaliser._load.cache_clear()


@pytest.fixture
def absent(monkeypatch):
    for name in ("tn", "tn.chinese", "tn.chinese.normalizer", "tn.english", "tn.english.normalizer"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A package with the classes of WeTextProcessing that marks what it was given; returns the keyword arguments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = SimpleNamespace(zh=None, en=None)

    def grammar(language):
        class Normalizer:
            def __init__(self, **kwargs):
                setattr(arguments, language, kwargs)

            def normalize(self, text):
                return f"<{language} {text}>"

        return Normalizer

    for language, name in (("zh", "chinese"), ("en", "english")):
        module = ModuleType(f"tn.{name}.normalizer")
        module.Normalizer = grammar(language)
        for parent in ("tn", f"tn.{name}"):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return arguments


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("今天 5 度", "zh"), ("on 5 May", "en"), ("日本は5度です", "none"), ("오늘 5도", "none"),
        ("5 градусов", "none"), ("mañana a las 5", "none"), ("5", "none"), ("今天update 5", "zh"),
    ],
)  # fmt: skip
def test_the_language_follows_the_script(text, language):
    assert language_of(text) == language


def test_an_absent_package_is_said_when_there_are_numbers(absent):
    got = normalise("It is 5.", NormaliserChoice.AUTO)
    assert (got.text, got.ran) == ("It is 5.", "none")
    assert got.note == "numbers are left to the model: no normaliser is installed (pip install WeTextProcessing)"
    assert normalise("It is five.", NormaliserChoice.AUTO).note == ""
    assert normalise("It is 5.", NormaliserChoice.OFF).note == ""


def test_an_absent_package_that_was_asked_for_is_an_error(absent):
    with pytest.raises(TextError, match=r"normaliser en: WeTextProcessing is not installed; pip install"):
        normalise("It is 5.", NormaliserChoice.EN)


def test_the_rules_of_the_script_run_and_say_so(fake):
    got = normalise("It is 5.", NormaliserChoice.AUTO)
    assert (got.text, got.ran, got.note) == ("<en It is 5.>", "en", "normaliser en changed the text")
    assert normalise("今天5度。", NormaliserChoice.AUTO).text == "<zh 今天5度。>"
    assert normalise("5 градусов", NormaliserChoice.AUTO).ran == "none"
    assert normalise("5 градусов", NormaliserChoice.EN).text == "<en 5 градусов>"


def test_text_without_numbers_is_not_touched(fake):
    assert normalise("啊，你好。", NormaliserChoice.ZH).text == "啊，你好。"


def test_names_and_addresses_are_kept_from_the_rules(fake):
    got = normalise("At 5 see http://a.b/1 or v2.3.1 and a_1@b.c, no 7", NormaliserChoice.EN)
    assert got.text == "<en At 5 see> http://a.b/1 or v2.3.1 and a_1@b.c<en , no 7>"


def test_the_chinese_rules_are_told_to_delete_nothing(fake, tmp_path):
    normalise("今天5度。", NormaliserChoice.ZH)
    off = ("remove_interjections", "remove_erhua", "traditional_to_simple", "full_to_half")
    assert {name: fake.zh[name] for name in off} == dict.fromkeys(off, False)
    assert fake.zh["overwrite_cache"] is True  # the packaged grammar would ignore the arguments
    assert fake.zh["cache_dir"].startswith(str(tmp_path))


def test_the_real_package_reads_numbers_and_keeps_the_rest(monkeypatch, tmp_path):
    pytest.importorskip("tn.chinese.normalizer", reason="WeTextProcessing is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    got = normalise("啊，那個小孩儿说：“2024年5月1日共3.14元”，看v2.3.1。", NormaliserChoice.AUTO)
    assert got.text == "啊，那個小孩儿说：“二零二四年五月一日共三点一四元”，看v2.3.1。"
    got = normalise("He paid $3.14 at http://a.b/1 today.", NormaliserChoice.AUTO)
    assert got.text == "He paid three point one four dollars at http://a.b/1 today."
