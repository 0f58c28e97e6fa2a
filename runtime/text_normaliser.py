"""Numbers, dates and units as words: WeTextProcessing, when it is installed. Optional; it needs pynini.

Two of its habits are turned off or fenced in (seen with 1.2.0):
- by default it deletes 啊 and 呃, turns 小孩儿 into 小孩 and traditional characters into simplified ones; its packaged
  grammar is compiled like that and ignores the arguments, so ours is compiled once into the user's cache directory;
- it reads "http://" as an hour ("小时ttp") and versions as numbers, so names and addresses are kept from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path

from runtime.errors import TextError
from runtime.text_cleanup import NAMES

_INSTALL = "pip install WeTextProcessing"
_KANA_OR_HANGUL = re.compile("[\u3040-\u30ff\uac00-\ud7af]")
_HAN = re.compile("[\u3400-\u9fff]")


class NormaliserChoice(str, Enum):
    AUTO = "auto"  # by script, when the package is installed
    OFF = "off"
    ZH = "zh"
    EN = "en"


@dataclass(frozen=True, slots=True)
class Normalised:
    text: str
    ran: str  # "zh", "en" or "none"
    note: str  # "" when there is nothing to say


def normalise(text: str, choice: NormaliserChoice) -> Normalised:
    """`text` with numbers as words, as far as `choice`, its script and the installation allow."""
    language = choice.value if choice in (NormaliserChoice.ZH, NormaliserChoice.EN) else language_of(text)
    if choice is NormaliserChoice.OFF or not any(c.isdigit() for c in text):
        return Normalised(text, "none", "")
    if language == "none":
        return Normalised(text, "none", "numbers are left to the model: no normaliser for this script")
    try:
        to_words = _load(language)
    except ImportError as error:
        if choice is not NormaliserChoice.AUTO:
            raise TextError(f"normaliser {language}: WeTextProcessing is not installed; {_INSTALL}") from error
        return Normalised(text, "none", f"numbers are left to the model: no normaliser is installed ({_INSTALL})")
    spoken = _outside_names(text, to_words)
    return Normalised(spoken, language, f"normaliser {language} changed the text" if spoken != text else "")


def language_of(text: str) -> str:
    """zh for Han without kana or Hangul, en for letters that are all ASCII, else none.

    Upstream sends kana, Hangul and Cyrillic to the Chinese rules and every Latin text to the English ones.
    """
    if _KANA_OR_HANGUL.search(text):
        return "none"
    if _HAN.search(text):
        return "zh"
    letters = [c for c in text if c.isalpha()]
    return "en" if letters and all(c.isascii() for c in letters) else "none"


def _outside_names(text: str, to_words: Callable[[str], str]) -> str:
    parts, start = [], 0
    for name in NAMES.finditer(text):
        parts += [_apply(text[start : name.start()], to_words), name[0]]
        start = name.end()
    return "".join([*parts, _apply(text[start:], to_words)])


def _apply(part: str, to_words: Callable[[str], str]) -> str:
    """Only parts with digits, and their outer spaces stay: the grammar strips them."""
    core = part.strip()
    if not any(c.isdigit() for c in core):
        return part
    start = part.index(core)
    return part[:start] + to_words(core) + part[start + len(core) :]


@lru_cache(maxsize=2)
def _load(language: str) -> Callable[[str], str]:
    """The grammar's function; ImportError when the package is absent."""
    to_words: Callable[[str], str]
    if language == "en":
        from tn.english.normalizer import Normalizer as English

        to_words = English().normalize
        return to_words
    from tn.chinese.normalizer import Normalizer as Chinese

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moss-tts-nano-ascend" / "wetext-zh"
    cache.mkdir(parents=True, exist_ok=True)
    to_words = Chinese(
        cache_dir=str(cache),
        overwrite_cache=not (cache / "zh_tn_tagger.fst").is_file(),  # about six seconds, once
        remove_interjections=False,
        remove_erhua=False,
        traditional_to_simple=False,
        full_to_half=False,
    ).normalize
    return to_words
