"""Many utterances from a JSONL file: one result or one error per line, and one bad line never stops the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import MossError, TextError

FIELDS = {"id": str, "text": str, "voice": str, "reference_text": str, "seed": int}
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
RESULTS_NAME = "results.jsonl"


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One line: what to say, with which voice, into <id>.wav."""

    id: str
    text: str
    voice: str | None = None
    reference_text: str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """How many lines there were."""

    spoken: int
    failed: int


def parse_line(line: str) -> BatchItem:
    """One line of the file; TextError says what is wrong with it."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise TextError(f"not JSON ({error})") from error
    if not isinstance(data, dict):
        raise TextError(f"expected an object with {', '.join(FIELDS)}, got {type(data).__name__}")
    for name, value in data.items():
        if name not in FIELDS:
            raise TextError(f"unknown field {name!r}; fields: {', '.join(FIELDS)}")
        if not isinstance(value, FIELDS[name]) or isinstance(value, bool):
            raise TextError(f"{name}: expected {FIELDS[name].__name__}, got {type(value).__name__}")
    for name in ("id", "text"):
        if name not in data:
            raise TextError(f"field {name!r} is missing")
    if data.get("seed", 0) < 0:
        raise TextError(f"seed: expected 0 or more, got {data['seed']}")
    if not _ID.fullmatch(data["id"]):
        raise TextError(f"id {data['id']!r}: expected letters, digits, '_', '-' and '.', it becomes a file name")
    return BatchItem(**data)


def run_batch(
    source: Path,
    out: Path,
    suffix: str,
    speak: Callable[[BatchItem, Path], dict[str, Any]],
    report: Callable[[str], None],
) -> BatchSummary:
    """Speak every line of `source` into `out`; write out/results.jsonl as lines are done."""
    out.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    spoken = failed = 0
    with (out / RESULTS_NAME).open("w", encoding="utf-8") as results:
        for number, line in _lines(source):
            record: dict[str, Any] = {"line": number}
            try:
                item = parse_line(line)
                record["id"] = item.id
                if item.id in seen:
                    raise TextError(f"id {item.id!r} was used by a line before")
                seen.add(item.id)
                record |= speak(item, out / f"{item.id}{suffix}")
                spoken += 1
                report(f"line {number}: {item.id}: {record['audio_seconds']} s of audio")
            except MossError as error:
                record["error"] = str(error)
                failed += 1
                report(f"line {number}: error: {error}")
            results.write(json.dumps(record, ensure_ascii=False) + "\n")
            results.flush()
    return BatchSummary(spoken, failed)


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{source}: cannot read it as UTF-8 ({error})") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, line
