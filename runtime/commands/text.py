"""run-om text: what will be spoken for a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from runtime.text import MAX_CHARACTERS, MAX_TOKENS, TextPlan, TextStyle
from runtime.text_normaliser import NormaliserChoice


@click.command()
@click.argument("text", required=False)
@click.option("--text-file", type=click.Path(path_type=Path, dir_okay=False), help="UTF-8 file with the text.")
@click.option("--artifacts", type=click.Path(path_type=Path, file_okay=False), help="Take its tokenizer.")
@click.option("--tokenizer", type=click.Path(path_type=Path, dir_okay=False), help="Or this tokenizer.model.")
@click.option("--max-tokens", default=MAX_TOKENS, show_default=True, help="Per segment; 0 for one segment.")
@click.option(
    "--text-style", default="standard", show_default=True, type=click.Choice([s.value for s in TextStyle]),
    help="upstream: its rules, faults included.",
)  # fmt: skip
@click.option(
    "--normaliser", default="auto", show_default=True, type=click.Choice([c.value for c in NormaliserChoice]),
    help="Numbers as words, with WeTextProcessing.",
)  # fmt: skip
@click.option("--keep-emoji", is_flag=True, help="Leave emoji to the model.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def text(text: str | None, as_json: bool, **options: Any) -> None:
    """Show what will be spoken for TEXT (- reads standard input): segments, token ids, pauses, and every change.

    Example: run-om text --artifacts artifacts/demo 'Dr. Smith paid $3.14.'
    """
    from runtime.text import TextOptions, plan_text
    from runtime.tokenizer import Tokenizer

    plan = plan_text(
        _read(text, options["text_file"]),
        Tokenizer(_tokenizer_path(options["artifacts"], options["tokenizer"])),
        TextOptions(
            TextStyle(options["text_style"]),
            options["max_tokens"],
            NormaliserChoice(options["normaliser"]),
            options["keep_emoji"],
        ),
    )
    click.echo(json.dumps(plan.to_dict(), ensure_ascii=False) if as_json else _as_text(plan))


def _read(text: str | None, path: Path | None) -> str:
    from runtime.errors import TextError

    if (text is None) == (path is None):
        raise TextError("give the text as an argument (- for standard input) or with --text-file: one of them")
    try:
        if path is not None:
            return path.read_text(encoding="utf-8")
        if text == "-":
            return sys.stdin.buffer.read(4 * MAX_CHARACTERS + 1).decode("utf-8")
        return str(text)
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path or 'standard input'}: cannot read the text as UTF-8 ({error})") from error


def _tokenizer_path(artifacts: Path | None, tokenizer: Path | None) -> Path:
    from runtime.errors import TextError
    from runtime.manifest import Manifest
    from runtime.synthesizer import TOKENIZER_NAME

    if (artifacts is None) == (tokenizer is None):
        raise TextError("the tokenizer is needed: give --artifacts or --tokenizer, one of them")
    if tokenizer is not None:
        return tokenizer
    assert artifacts is not None
    manifest = Manifest.load(artifacts)
    return manifest.path(TOKENIZER_NAME)


def _as_text(plan: TextPlan) -> str:
    lines = []
    for number, segment in enumerate(plan.segments, 1):
        ids = " ".join(map(str, segment.token_ids))
        pause = f", then {segment.pause_seconds:.2f} s of silence" if segment.pause_seconds else ""
        lines += [f"{number}. {segment.text}", f"   {len(segment.token_ids)} tokens{pause}: {ids}"]
    count = f"{len(plan.segments)} segment{'s' if len(plan.segments) > 1 else ''}"
    lines.append(f"{count}, {plan.num_tokens} tokens, {len(plan.spoken)} characters, normaliser {plan.normaliser}")
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])
