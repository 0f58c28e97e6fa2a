"""run-om parity: do two backends say the same, and if not, where do they part? Exit 0 yes, 1 no, 2 cannot tell."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from runtime.errors import MossError
from runtime.parity_record import DEFAULT_FRAMES
from runtime.parity_run import SIDE_HELP

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(invoke_without_command=True)
@click.option("--a", "a_spec", help=f"The reference: {SIDE_HELP}")
@click.option("--b", "b_spec", help="What is compared with it.")
@click.option("--artifacts", type=_DIRECTORY, help="artifacts/<name>, of both sides.")
@click.option("--artifacts-a", type=_DIRECTORY)
@click.option("--artifacts-b", type=_DIRECTORY)
@click.option("--split-a", is_flag=True, help="Side a runs step, then frame, instead of step_frame.")
@click.option("--split-b", is_flag=True)
@click.option("--precision-a", help="Which om builds, when several are there (origin, fp16, …).")
@click.option("--precision-b")
@click.option("--text", help="What to speak; a recording brings its own.")
@click.option("--voice", help="Reference clip, which each side encodes, or the name of a stored voice: run-om voice.")
@click.option("--seed", default=0, show_default=True, help="Of the seeded run.")
@click.option(
    "--frames", default=DEFAULT_FRAMES, show_default=True, type=click.IntRange(1), help="At most; 80 ms each."
)
@click.option("--floor", type=_FILE, help="Judge side b by a precision floor: the JSON of run-om precision.")
@click.option("--threads", type=click.IntRange(1), help="Of the CPU backends.")
@click.option("--record", type=_DIRECTORY, help="Only run side a and store it here, to be compared elsewhere.")
@click.option("--report", type=_DIRECTORY, help="Write parity.html, parity.json and parity.md here.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON.")
@click.pass_context
def parity(ctx: click.Context, /, **options: Any) -> None:
    """Compare two backends, stage by stage, on one text.

    Example: run-om parity --a ort --b torch --artifacts artifacts/demo --text "Hello." --voice clip.wav --report out
    """
    if ctx.invoked_subcommand is not None:
        return
    try:
        sys.exit(_record(options) if options["record"] else _compare(options))
    except MossError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


def _side(options: dict[str, Any], which: str) -> Any:
    from runtime.errors import ParityError
    from runtime.parity_run import parse_side

    spec = options[f"{which}_spec"]
    if spec is None:
        raise ParityError(f"--{which} is missing: expected {SIDE_HELP}")
    artifacts = options[f"artifacts_{which}"] or options["artifacts"]
    return parse_side(spec, artifacts, options[f"split_{which}"], options[f"precision_{which}"], options["threads"])


def _plan(options: dict[str, Any]) -> Any:
    from runtime.parity_record import Plan
    from runtime.voices import is_voice_name

    text, voice = options["text"], options["voice"]
    if text is None and voice is None:
        return None
    stored = voice if voice is not None and is_voice_name(voice) else None
    clip = Path(voice) if voice is not None and stored is None else None
    return Plan(text or "", clip, options["seed"], options["frames"], stored_voice=stored)


def _progress(line: str) -> None:
    click.echo(line, err=True)


def _record(options: dict[str, Any]) -> int:
    from runtime.errors import ParityError
    from runtime.parity_record import save
    from runtime.parity_run import run_side, shared_template

    if options["b_spec"] is not None:
        raise ParityError("--record stores one side: give --a and leave --b out")
    plan = _plan(options)
    if plan is None or not plan.text:
        raise ParityError("nothing says what to speak: give --text")
    side = _side(options, "a")
    recording, _ = run_side(side, plan, None, _progress, template=shared_template(side))
    save(recording, options["record"])
    path = options["record"]
    click.echo(f"{path}: recorded on {recording.identity.backend}; to compare: run-om parity --a {path} --b …")
    return 0


def _compare(options: dict[str, Any]) -> int:
    from runtime.parity import compare
    from runtime.parity_floor import floor_limits, read_report
    from runtime.parity_report import to_json, write_report
    from runtime.parity_run import run_sides

    floor = options["floor"]
    limits = None if floor is None else floor_limits(read_report(floor), str(floor))
    a, b, engine = run_sides(_side(options, "a"), _side(options, "b"), _plan(options), _progress)
    found = compare(a, b, limits, engine, str(floor) if floor else None, _command_line(options))
    if options["report"] is not None:
        click.echo(f"report: {write_report(found, options['report'], a, b)}", err=True)
    click.echo(to_json(found) if options["as_json"] else _as_text(found), nl=not options["as_json"])
    return found.verdict.exit_code


def _command_line(options: dict[str, Any]) -> str:
    """The command that gives the same report again."""
    words = ["run-om", "parity"]
    names = {"a_spec": "a", "b_spec": "b"}
    for key, value in options.items():
        if value is None or value is False or key == "as_json":
            continue
        words.append("--" + names.get(key, key).replace("_", "-"))
        words += [] if value is True else [str(value)]
    return shlex.join(words)


def _as_text(found: Any) -> str:
    from runtime.parity_report import headline, notices

    lines = [f"{found.verdict.value}: {headline(found)}", found.text, *(f"note: {n}" for n in notices(found)), ""]
    for entry in (*found.stages, *found.modes):
        lines.append(f"{entry.name:<16} {entry.verdict.value:<17} {entry.text}")
    lines.append(f"{'error growth':<16} {found.growth.verdict.value:<17} {found.growth.text}")
    if found.loss is not None:
        lines.append(f"{'loss':<16} {found.loss.verdict.value:<17} {found.loss.text}")
    if found.cause is not None:
        lines.append(f"cause: {found.cause.text} ({found.cause.evidence})")
    return "\n".join(lines)


@parity.command()
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the changes as JSON.")
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Compare two JSON reports: exit 0 when nothing got worse, 1 when something did, 2 when they cannot be compared.

    Example: run-om parity diff old/parity.json new/parity.json
    """
    import dataclasses

    from runtime.parity_diff import diff_reports
    from runtime.parity_floor import read_report

    try:
        changes = diff_reports(read_report(before), read_report(after))
    except MossError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(c) for c in changes], ensure_ascii=False))
    else:
        lines = [f"{'worse' if c.worse else 'changed'}: {c.what}: {c.before} -> {c.after}" for c in changes]
        click.echo("\n".join(lines) or "nothing changed")
    sys.exit(1 if any(c.worse for c in changes) else 0)
