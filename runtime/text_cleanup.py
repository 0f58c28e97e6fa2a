"""What people paste -> one line that can be spoken. Letters and digits are never changed; each removal is a note.

    characters   control, bidirectional, zero-width, unassigned and private ones go, emoji too (unless kept)
    lines        Markdown markers go; each line gets a sentence end if it has none, in its own script
    marks        arrows and dashes become commas, ellipses stops, brackets quotes; repeated marks become one
    spaces       one between words, none between CJK characters, one between CJK and Latin

URLs, e-mail addresses, @names, #tags, file names, versions, numbers, dates and times are left as they are.
What upstream does differently is in docs/text-and-voices.md.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

CJK_LETTERS = (
    "\u3005\u3007\u3040-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_CJK = re.compile(f"[{CJK_LETTERS}]")
_INDIC = re.compile("[\u0900-\u0b7f]")  # the scripts that end a sentence with a danda
CLOSERS = "\"'”’»)]}）】》〉」』"
# Emoji and pictographs: dingbats, geometric shapes, symbols; with variation selectors, keycaps and skin tones.
_EMOJI = re.compile("[\u20e3\u231a-\u23ff\u25aa-\u25fe\u2600-\u27bf\u2b05-\u2b55\ufe00-\ufe0f\U0001f000-\U0001faff]")
_NEWLINES = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_VISIBLE_FORMAT = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f"  # category Cf, but printed
_JOINERS = "\u200c\u200d"  # meaningful between letters: Persian, Hindi, …

# Each alternative is linear in the length of the text: no long word makes it slow.
_NAMES = rf"""(?x:
      (?:https?|ftp)://[^\s，。！？；、（）《》“”"<>{CJK_LETTERS}]*[^\s，。！？；、（）《》“”"<>{CJK_LETTERS}.,;:!?)\]}}']
    | (?<![A-Za-z0-9_.])www\.[A-Za-z0-9_./?&=%+~-]*[A-Za-z0-9_/]
    | (?<![A-Za-z0-9_.+-])[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+
    | (?<![A-Za-z0-9_])[@\#][A-Za-z0-9_]+
    | (?<![A-Za-z0-9_])[ur]/[A-Za-z0-9_]+
    | (?<![A-Za-z0-9_.])(?=[\d_.]*[A-Za-z])[A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)+
)"""
_PROTECTED = _NAMES + r"|(?<![\d.])\d+(?:[.,:/–-]\d+)+"
NAMES = re.compile(
    _NAMES
)  # URLs, addresses, file names, versions with a letter: no normaliser may read them as numbers
PROTECTED = re.compile(_PROTECTED)  # names, and numbers with marks inside: left as they are, and never a place to split


@dataclass(frozen=True, slots=True)
class Cleaned:
    text: str
    notes: tuple[str, ...]


def clean(text: str, keep_emoji: bool = False) -> Cleaned:
    """One line of speakable text, and what was removed on the way. Lines of punctuation alone go: "" may be left."""
    visible, notes = _visible(text, keep_emoji)
    lines = [
        tidy
        for line in filter(None, _unwrap(visible.split("\n")))
        if is_speakable(tidy := _tidy(_without_markdown(line)))
    ]
    return Cleaned(_join([with_sentence_end(line) for line in lines]), tuple(notes))


def with_sentence_end(line: str) -> str:
    """The line with a full stop of its own script, unless it ends in punctuation."""
    core = line.rstrip(CLOSERS)
    if not core or (unicodedata.category(core[-1])[0] not in "LMNS" and core[-1] not in "%‰"):
        return line
    script = next((c for c in reversed(core) if unicodedata.category(c)[0] == "L"), "")
    return line + ("。" if _CJK.match(script) else "।" if _INDIC.match(script) else ".")


def is_cjk(character: str) -> bool:
    """Han or kana: scripts that are written without spaces. Hangul is written with them."""
    return bool(_CJK.match(character))


def is_speakable(text: str) -> bool:
    """Whether there is a letter, a number or a symbol; punctuation alone gives the model nothing to say."""
    return any(unicodedata.category(c)[0] in "LNS" for c in text)


def _visible(text: str, keep_emoji: bool) -> tuple[str, list[str]]:
    kept: list[str] = []
    emoji: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    for i, c in enumerate(text):
        category = unicodedata.category(c)
        if c in _NEWLINES:
            kept.append("\n")
        elif c == "\t" or category == "Zs":
            kept.append(" ")
        elif _EMOJI.match(c) and not (keep_emoji and category in ("So", "Sk")):
            emoji[c] += 1
        elif category[0] == "C" or c == "\ufffd":
            between_letters = 0 < i < len(text) - 1 and all(
                unicodedata.category(n)[0] in "LM" for n in (text[i - 1], text[i + 1])
            )
            if c in _VISIBLE_FORMAT or (c in _JOINERS and between_letters):
                kept.append(c)
            else:
                removed[c] += 1
        else:
            if c in ".,!?;:" and i and _EMOJI.match(text[i - 1]) and kept[-1:] == [" "]:
                kept.pop()  # "all 🙂!" has no space before the mark once the emoji is gone
            kept.append(c)
    notes = []
    if removed:
        notes.append("removed control, invisible or unassigned characters: " + _listed(removed))
    if emoji:
        notes.append("removed emoji and pictographs: " + _listed(emoji))
    return "".join(kept), notes


def _listed(characters: Counter[str]) -> str:
    """`U+200B ZERO WIDTH SPACE (3), …`; at most eight kinds by name."""
    names = [
        f"U+{ord(c):04X} {unicodedata.name(c, 'without a name')}" + (f" ({n})" if n > 1 else "")
        for c, n in characters.most_common(8)
    ]
    more = len(characters) - len(names)
    return ", ".join(names) + (f", and {more} other kinds" if more else "")


def _unwrap(lines: list[str]) -> list[str]:
    """Join a line to the one before when it starts with a lower-case letter: it was broken for width, not meaning."""
    groups: list[list[str]] = []
    for line in map(str.strip, lines):
        if groups and groups[-1][-1] and line[:1].islower():
            groups[-1].append(line)
        else:
            groups.append([line])
    return [" ".join(group) for group in groups]


def _without_markdown(line: str) -> str:
    line = line.strip()
    if re.fullmatch(r"([-*_=~`])\1{2,}\w*", line):  # a rule, an underlined heading, a fence
        return ""
    line = re.sub(r"^(?:#{1,6} +|(?:> ?)+|[-*+•] +)+", "", line)
    line = re.sub(r"!?\[([^\[\]]*)\]\(([^\s()]+)\)", r"\1 \2", line)
    line = re.sub(r"(?<![\w*])(\*{1,3})(?=\S)([^*]+?)(?<=\S)\1(?![\w*])", r"\2", line)
    line = re.sub(r"(?<!\w)(_{1,3})(?=\S)([^_]+?)(?<=\S)\1(?!\w|\.\w)", r"\2", line)
    return re.sub(r"`+([^`]+)`+", r"\1", line)


def _tidy(line: str) -> str:
    for pattern, replacement in _RULES:
        line = _substitute(pattern, replacement, line)
    return line.strip()


def _substitute(pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str], line: str) -> str:
    return pattern.sub(lambda match: match[0] if match["keep"] else replacement(match), line)


def _rule(pattern: str) -> re.Pattern[str]:
    return re.compile(f"(?P<keep>{_PROTECTED})|{pattern}")


def _mark(wide: str, narrow: str) -> Callable[[re.Match[str]], str]:
    """A punctuation mark in the script of the letter before it; nothing where there is a mark or an end already."""

    def replacement(match: re.Match[str]) -> str:
        before = match.string[max(0, match.start() - 40) : match.start()]
        after = match.string[match.end() : match.end() + 1]
        if not before or not after:
            return ""
        if unicodedata.category(before[-1]) == "Po" or unicodedata.category(after[0]) == "Po":
            return " "
        letter = next((c for c in reversed(before) if c.isalnum()), "")
        return wide if is_cjk(letter) else narrow

    return replacement


# In this order: marks first, then spaces, which the marks change.
_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (_rule(r"\s*(?:[-=]+>|<-+|<=+(?=\s)|[←→↔⇐⇒⇔➜➔])\s*"), _mark("，", ", ")),
    (_rule(r"\s*(?:\.{3,}|…+|。{2,}|．{2,})\s*"), _mark("。", ". ")),
    (_rule(r"\s*(?:[—―]+|-{2,}|(?<=[^\d]\s)[–-](?=\s))\s*"), _mark("，", ", ")),
    (_rule(r"[【】「」『』〔〕\[\]{}]"), lambda m: '"'),
    (_rule(r"(?:^|(?<=[。！？!?]))《(?P<title>[^》]*)》(?=$|[。！？!?，,])"), lambda m: m["title"]),
    (_rule(r"(?<=[A-Za-z0-9])_+(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])_+(?=\w)|(?<=\w)_+(?=[A-Za-z0-9])"), lambda m: " "),
    (_rule(r"(?P<mark>[!?！？,，。;；:：、~～])(?:\s*(?P=mark))+"), lambda m: m["mark"]),
    (_rule(r"\s{2,}"), lambda m: " "),
    (
        _rule(rf"(?<=[{CJK_LETTERS}，。！？；：、]) (?=[{CJK_LETTERS}，。！？；：、\d])|(?<=\d) (?=[{CJK_LETTERS}])"),
        lambda m: "",
    ),
    (_rule(r" (?=[，。！？；：、]|[.,](?:\s|$))|(?<=[，。！？；：、]) "), lambda m: ""),
    (
        re.compile(rf"(?P<keep>(?!))|(?<=[{CJK_LETTERS}])(?=\.?[A-Za-z])|(?<=[A-Za-z])(?=[{CJK_LETTERS}])"),
        lambda m: " ",
    ),
)


def _join(lines: list[str]) -> str:
    """Sentences one after another: a space between them, unless a full-width mark stands there."""
    spaced = (line if line[-1] in "。！？；：，、" else line + " " for line in lines)
    return "".join(spaced).rstrip()
