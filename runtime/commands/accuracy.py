"""run-om accuracy: how many codes of two backends agree over a list of texts. Exit codes as of run-om parity."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from runtime.errors import MossError
from runtime.parity_record import DEFAULT_FRAMES
from runtime.parity_run import SIDE_HELP

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--a", "a_spec", default="ort", show_default=True, help=f"The reference: {SIDE_HELP}")
@click.option("--b", "b_spec", required=True, help="What is compared with it.")
@click.option("--artifacts", type=_DIRECTORY, help="artifacts/<name>, of both sides.")
@click.option("--artifacts-a", type=_DIRECTORY)
@click.option("--artifacts-b", type=_DIRECTORY)
@click.option("--voice", type=_FILE, help="Reference clip; each side encodes it.")
@click.option("--texts", type=_FILE, help="UTF-8 file, one text a line, instead of the built-in list.")
@click.option("--frames", default=DEFAULT_FRAMES, show_default=True, type=click.IntRange(1), help="At most, per text.")
@click.option("--floor", type=_FILE, help="Judge side b by a precision floor: the JSON of run-om precision.")
@click.option("--threads", type=click.IntRange(1), help="Of the CPU backends.")
@click.option("--out", type=_FILE, help="Write the table as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def accuracy(out: Path | None, as_json: bool, **options: Any) -> None:
    """Speak a list of texts on two backends, greedy, and count the codes that agree.

    Example: run-om accuracy --a ort --b om --artifacts artifacts/demo --voice clip.wav --out accuracy.json
    """
    from runtime.accuracy import accuracy_lines
    from runtime.manifest import write_atomically

    try:
        found = _measure(options)
    except MossError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    data = json.dumps(found.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if out is not None:
        write_atomically(out, data)
    click.echo(data if as_json else "\n".join(accuracy_lines(found)), nl=not as_json)
    sys.exit(found.verdict.exit_code)


def _measure(options: dict[str, Any]) -> Any:
    from runtime.accuracy import TEXTS, measure_accuracy
    from runtime.parity_floor import floor_limits, read_report
    from runtime.parity_run import open_side, parse_side, shared_template

    def report(line: str) -> None:
        click.echo(line, err=True)

    texts = TEXTS if options["texts"] is None else _read_texts(options["texts"])
    floor = options["floor"]
    limits = None if floor is None else floor_limits(read_report(floor), str(floor))
    sides = [
        parse_side(options[f"{x}_spec"], options[f"artifacts_{x}"] or options["artifacts"], threads=options["threads"])
        for x in ("a", "b")
    ]
    template = shared_template(*sides)
    with open_side(sides[0], report, template) as a, open_side(sides[1], report, template) as b:
        return measure_accuracy(a, b, texts, options["voice"], options["frames"], limits, report)


def _read_texts(path: Path) -> tuple[str, ...]:
    from runtime.errors import TextError

    try:
        texts = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path}: cannot read the texts as UTF-8 ({error})") from error
    if not texts:
        raise TextError(f"{path} holds no text; give one a line")
    return texts
