"""The published code's text preparation and chunking, faults included, for parity runs (`--text-style upstream`).

Rules: MODEL.md 5.7; vectors: tests/data/text. What is wrong with them, and what runtime/text.py does instead, is listed
in docs/text-and-voices.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable

CountTokens = Callable[[str], int]

_CJK = re.compile("[\u3400-\u9fff\u3040-\u30ff\uac00-\ud7af]")
_SENTENCE_ENDS, _CLAUSE_ENDS = ".!?。！？；;", ",，、；;：:"
_CLOSERS = "\"'”’)]}）】》〉」』"
_CUT_WITHIN = 24
_ENGLISH_VOICES = ("Trump", "Ava", "Bella", "Adam", "Nathan")


def language(text: str, voice: str = "") -> str:
    """Which normaliser upstream picks: "zh" for any Han character, "en" for any ASCII letter or an English voice."""
    if re.search("[\u3400-\u9fff]", text):
        return "zh"
    return "en" if re.search("[A-Za-z]", text) or voice in _ENGLISH_VOICES else "zh"


def prepare(text: str) -> str:
    """One line with a sentence end; Latin text gets a capital, and 8 spaces (which the tokenizer drops) when short."""
    text = re.sub(" {2,}", " ", re.sub(r"[\r\n]+", " ", text.strip()))
    if not text:
        return ""
    if _CJK.search(text):
        return text if text[-1] in _SENTENCE_ENDS else text + "。"
    text = text[0].upper() + text[1:]
    if text[-1].isalnum():
        text += "."
    return text if len(text.split()) >= 5 else " " * 8 + text


def split(text: str, max_tokens: int, count: CountTokens) -> list[str]:
    """Prepared text as chunks of at most `max_tokens` tokens; 0 or less turns chunking off."""
    if max_tokens <= 0:
        return [text]
    units: list[str] = []
    for sentence in _split_after(prepare(text), _SENTENCE_ENDS, _CLOSERS):
        if count(sentence) <= max_tokens:
            units.append(sentence)
            continue
        for clause in _split_after(sentence, _CLAUSE_ENDS, ""):
            units += [clause] if count(clause) <= max_tokens else _cut(clause, max_tokens, count)
    return _merge(units, max_tokens, count)


def chunks(text: str, max_tokens: int, count: CountTokens, strip: bool = False) -> list[str]:
    """What upstream speaks: the chunks, or the text as it came if there is only one (the ONNX runtime strips it)."""
    parts = split(text, max_tokens, count)
    return parts if len(parts) > 1 else [text.strip() if strip else text]


def pause_seconds(chunk: str) -> float:
    """Silence after a chunk."""
    return 0.40 if len(chunk.split()) <= 4 else 0.24


def _split_after(text: str, ends: str, closers: str) -> list[str]:
    parts, start = [], 0
    for end in re.finditer(f"[{re.escape(ends)}][{re.escape(closers)}]*" if closers else f"[{re.escape(ends)}]", text):
        parts.append(text[start : end.end()])
        start = end.end()
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _cut(text: str, max_tokens: int, count: CountTokens) -> list[str]:
    """Cut at the longest prefix within the budget, moved back to a boundary among its last 24 characters."""
    parts = []
    while text and count(text) > max_tokens:
        low, high = 1, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if count(text[:middle].strip()) <= max_tokens else (low, middle - 1)
        at = next(
            (
                i + 1
                for i in range(low - 1, max(0, low - _CUT_WITHIN) - 1, -1)
                if text[i] in _SENTENCE_ENDS + _CLAUSE_ENDS + " "
            ),
            low,
        )
        parts.append(text[:at].strip())
        text = text[at:].strip()
    return [*parts, text] if text else parts


def _merge(units: list[str], max_tokens: int, count: CountTokens) -> list[str]:
    merged: list[str] = []
    for unit in units:
        if merged and count(merged[-1]) + count(unit) <= max_tokens:
            glue = "" if _CJK.search(merged[-1]) or _CJK.search(unit) else " "
            merged[-1] += glue + unit
        else:
            merged.append(unit)
    return merged
