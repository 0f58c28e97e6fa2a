"""Text -> segments that the model can speak one after another, with a note on every change.

    text ─ clean ─ numbers as words ─ clean ─► spoken text ─ sentences ─ clauses ─ cuts ─ merge ─► segments

A segment is a slice of the spoken text of at most `max_tokens` tokens; the slices put together are the spoken text, and
that is checked: nothing is lost between the two. Sentence ends, the budget, greedy merging and pauses are upstream's;
`TextStyle.UPSTREAM` is upstream's code path with its faults, for parity. docs/text-and-voices.md lists the differences.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Protocol

from runtime import text_upstream
from runtime.errors import TextError
from runtime.text_cleanup import CJK_LETTERS, CLOSERS, PROTECTED, clean, is_cjk, is_speakable
from runtime.text_normaliser import NormaliserChoice, normalise

MAX_TOKENS = 75  # what upstream's command line, web application and ONNX runtime use
MIN_TOKENS = 8  # one character may take seven tokens
MAX_CHARACTERS = 1_000_000
_CUT_WITHIN = 24  # characters that a cut may move back to a space, as upstream
_PAUSE_SHORT_S, _PAUSE_S, _SHORT_WORDS = 0.40, 0.24, 4

_ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "jr",
        "sr",
        "vs",
        "etc",
        "e.g",
        "i.e",
        "cf",
        "no",
        "vol",
        "fig",
        "gen",
        "col",
    ]
)
# Marks of scripts with spaces end a sentence before a space, the end, or a CJK letter; the others always.
_SENTENCE_END = re.compile(
    rf"(?:[.!?;…؟۔։]+[{re.escape(CLOSERS)}]*(?=\s|$|[{CJK_LETTERS}])|[。！？；।॥።]+[.!?;{re.escape(CLOSERS)}]*)\s*"
)
_CLAUSE_END = re.compile(rf"(?:[,;:،؛—]+[{re.escape(CLOSERS)}]*(?=\s|$|[{CJK_LETTERS}])|[，、：；]+)\s*")


class TextStyle(str, Enum):
    STANDARD = "standard"
    UPSTREAM = "upstream"


class TokenCounter(Protocol):
    """What planning needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def control_literals(self, text: str) -> list[str]: ...
    def count_bytes(self, ids: list[int]) -> int: ...
    def count_unknown(self, ids: list[int]) -> int: ...


@dataclass(frozen=True, slots=True)
class TextOptions:
    style: TextStyle = TextStyle.STANDARD
    max_tokens: int = MAX_TOKENS  # per segment; 0 makes one segment of everything
    normaliser: NormaliserChoice = NormaliserChoice.AUTO
    keep_emoji: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0 or (self.style is TextStyle.STANDARD and 0 < self.max_tokens < MIN_TOKENS):
            raise TextError(
                f"max tokens per segment: expected 0 (no limit) or at least {MIN_TOKENS}, got {self.max_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """What one generation speaks."""

    text: str
    token_ids: tuple[int, ...]
    pause_seconds: float  # silence after it; 0 for the last


@dataclass(frozen=True, slots=True)
class TextPlan:
    """What will be spoken, and what was changed on the way there."""

    spoken: str
    segments: tuple[Segment, ...]
    normaliser: str  # which one ran: zh, en or none
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {**asdict(self), "num_tokens": self.num_tokens, "num_characters": len(self.spoken)}


def plan_text(text: str, tokenizer: TokenCounter, options: TextOptions | None = None) -> TextPlan:
    """Plan what is spoken for `text`; TextError when there is nothing to speak."""
    options = options or TextOptions()
    if len(text) > MAX_CHARACTERS:
        raise TextError(f"the text has {len(text)} characters, the limit is {MAX_CHARACTERS}; split it into files")

    def count(part: str) -> int:
        return len(tokenizer.encode(part))

    ran = "none"
    notes: list[str] = []
    if options.style is TextStyle.UPSTREAM:
        spoken = text
        parts = text_upstream.chunks(text, options.max_tokens, count)
        pauses = [text_upstream.pause_seconds(part) for part in parts]
    else:
        spoken, ran, notes = _spoken_text(text, options)
        slices = segment(spoken, options.max_tokens, count) if spoken else []
        check_coverage(spoken, slices)
        parts = [part.strip() for part in slices if is_speakable(part)]
        if len(parts) < len(slices):
            notes.append(f"left out {len(slices) - len(parts)} segments of punctuation alone")
        pauses = [pause_seconds(part) for part in parts]
    if not any(is_speakable(part) for part in parts):
        raise TextError(f"the text {text[:40]!r} has nothing to speak: no letter, number or symbol is left of it")
    ids = [tuple(tokenizer.encode(part)) for part in parts]
    notes += _token_notes(text, [i for part in ids for i in part], tokenizer)
    segments = tuple(map(Segment, parts, ids, [*pauses[:-1], 0.0]))
    return TextPlan(spoken, segments, ran, tuple(notes))


def segment(spoken: str, max_tokens: int, count: Callable[[str], int]) -> list[str]:
    """`spoken` as consecutive slices, outer spaces included, of at most `max_tokens` tokens each."""
    if max_tokens <= 0:
        return [spoken]
    units: list[str] = []
    for sentence in _sentences(spoken):
        if count(sentence) <= max_tokens:
            units.append(sentence)
            continue
        for clause in _split_after(sentence, _CLAUSE_END):
            units += [clause] if count(clause) <= max_tokens else _cut(clause, max_tokens, count)
    return _merge(units, max_tokens, count)


def check_coverage(spoken: str, slices: Iterable[str]) -> None:
    """TextError unless the slices put together are the spoken text."""
    joined = "".join(slices)
    if joined != spoken:
        at = next(
            (i for i, (a, b) in enumerate(zip(joined, spoken, strict=False)) if a != b), min(len(joined), len(spoken))
        )
        raise TextError(
            f"segmentation lost or changed text at character {at + 1}: expected {spoken[at : at + 20]!r}, "
            f"got {joined[at : at + 20]!r}; please report this text"
        )


def pause_seconds(part: str) -> float:
    """Silence after a segment: longer after at most four words. Two CJK characters count as a word.

    Upstream counts what spaces separate, so that every Chinese segment is one word.
    """
    others = sum(any(map(str.isalnum, word)) for word in re.sub(f"[{CJK_LETTERS}]", " ", part).split())
    return _PAUSE_SHORT_S if others + sum(map(is_cjk, part)) / 2 <= _SHORT_WORDS else _PAUSE_S


def _spoken_text(text: str, options: TextOptions) -> tuple[str, str, list[str]]:
    """The spoken text, the normaliser that ran, and notes."""
    cleaned = clean(text, options.keep_emoji)
    normalised = normalise(cleaned.text, options.normaliser)
    notes = [*cleaned.notes, normalised.note] if normalised.note else list(cleaned.notes)
    return clean(normalised.text, options.keep_emoji).text, normalised.ran, notes


def _token_notes(text: str, ids: list[int], tokenizer: TokenCounter) -> list[str]:
    notes = []
    if literals := tokenizer.control_literals(text):
        notes.append(f"read as ordinary text, not as control tokens: {', '.join(literals)}")
    if unknown := tokenizer.count_unknown(ids):
        notes.append(f"{unknown} tokens are unknown to the model and will not be spoken")
    num_bytes = tokenizer.count_bytes(ids)
    if num_bytes > len(ids) / 4:
        notes.append(f"{num_bytes} of {len(ids)} tokens spell single bytes: the model hardly knows this script")
    return notes


def _sentences(text: str) -> list[str]:
    return _split_after(text, _SENTENCE_END, _is_abbreviation)


def _split_after(
    text: str, end: re.Pattern[str], is_no_end: Callable[[str, re.Match[str]], bool] | None = None
) -> list[str]:
    parts, start = [], 0
    for match in end.finditer(text):
        if is_no_end is None or not is_no_end(text, match):
            parts.append(text[start : match.end()])
            start = match.end()
    return [*parts, text[start:]] if start < len(text) else parts


def _is_abbreviation(text: str, end: re.Match[str]) -> bool:
    """Whether the dot belongs to "Dr.", "e.g." or an initial ("J. Smith")."""
    if not end[0].startswith(".") or end[0][1:2] == ".":
        return False
    word = re.search(r"[A-Za-z.]*$", text[max(0, end.start() - 12) : end.start()])
    before, after = (word[0] if word else ""), text[end.end() : end.end() + 1]
    return before.lower() in _ABBREVIATIONS or (len(before) == 1 and before.isupper() and after.isupper())


def _cut(text: str, max_tokens: int, count: Callable[[str], int]) -> list[str]:
    """Cut a clause into parts of about equal size, so that the last one is no fragment (upstream leaves such).

    A cut goes back to a space, never into a name, a number or a combined character if it can be helped.
    """
    parts: list[str] = []
    left = count(text)
    while left > max_tokens or (left := count(text)) > max_tokens:
        target = math.ceil(left / math.ceil(left / max_tokens))
        at = _cut_position(text, _longest_prefix(text, target, count))
        parts.append(text[:at])
        left -= count(text[:at])
        text = text[at:]
        if not text:
            return parts
    return [*parts, text]


def _longest_prefix(text: str, max_tokens: int, count: Callable[[str], int]) -> int:
    """Length of the longest prefix within the budget; doubles first, so the cost does not grow with the text."""
    low, high = 0, max_tokens
    while high < len(text) and count(text[:high]) <= max_tokens:
        low, high = high, 2 * high
    high = min(high, len(text))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(text[:middle]) <= max_tokens else (low, middle - 1)
    return low


def _cut_position(text: str, limit: int) -> int:
    """The best place to cut at or before `limit`, at least one character in."""
    limit = max(1, limit)
    space = text.rfind(" ", max(0, limit - _CUT_WITHIN), limit + 1)
    if space > 0:
        return space + 1
    for name in PROTECTED.finditer(text, 0, min(len(text), limit + 200)):
        if name.start() < limit < name.end() and name.start() > 0:
            return name.start()
    at = limit
    while at > 1 and at < len(text) and _continues(text[at - 1], text[at]):
        at -= 1
    return at if at > 1 or limit == 1 else limit


def _continues(before: str, after: str) -> bool:
    """Whether the two characters must stay together: a mark on its letter, a joined character, a Latin word."""
    joined = unicodedata.category(after)[0] == "M" or "\u200c" in (before, after) or "\u200d" in (before, after)
    return joined or (before.isascii() and after.isascii() and before.isalnum() and after.isalnum())


def _merge(units: list[str], max_tokens: int, count: Callable[[str], int]) -> list[str]:
    """Join neighbours while their token counts add up to the budget, and together keep it.

    The whole may have more tokens than its parts: pieces differ after a cut inside a word. Upstream does not look.
    """
    merged: list[str] = []
    size = 0
    for unit in units:
        unit_size = count(unit)
        if merged and size + unit_size <= max_tokens and (joined := count(merged[-1] + unit)) <= max_tokens:
            merged[-1] += unit
            size = joined
        else:
            merged.append(unit)
            size = unit_size
    return merged
