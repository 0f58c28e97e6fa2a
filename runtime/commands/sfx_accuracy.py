"""run-om sfx-accuracy: a backend of MOSS-SoundEffect against PyTorch float32 on the CPU, stage by stage."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from runtime.commands.sfx_options import (
    model_options,
    open_effects,
    prompts_from,
    sampling_from,
    sampling_options,
    text_options,
)
from runtime.errors import CheckpointError
from runtime.parity import plain_numbers

if TYPE_CHECKING:
    from runtime.sfx.accuracy import Report


@click.command("sfx-accuracy")
@model_options
@click.option("--prompt", default="Rolling thunder with steady rainfall.", show_default=True)
@text_options
@click.option("--seed", default=0, show_default=True)
@sampling_options
@click.option("--max-new-tokens", default=200, show_default=True, help="Rows that are compared at most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def sfx_accuracy(
    context: click.Context, /, prompt: str, seed: int, max_new_tokens: int, as_json: bool, **options: Any
) -> None:
    """Compare a backend with PyTorch float32 on the CPU: hidden states, best candidates, distributions, codec.

    The reference is opened from --checkpoint and --codec; what is compared is the same on --device and --dtype, or
    --artifacts. Both read the rows that the reference generated.

    Exit code: 0 agreement, 1 divergence, 2 nothing was measured.

    Example: run-om sfx-accuracy --checkpoint DIR --codec DIR --device npu --dtype bfloat16
    """
    from runtime.sfx.accuracy import measure_accuracy
    from runtime.sfx.sound_effects import SoundEffects

    checkpoint, codec = options["checkpoint"], options["codec"]
    if checkpoint is None or codec is None:
        raise CheckpointError("expected --checkpoint and --codec: the reference runs from them")
    if options["tokens"] is None and options["seconds"] is None:
        options["tokens"] = 125
    [request], sampling = prompts_from([prompt], options), sampling_from(options)
    if options["artifacts"] is not None:
        options |= {"checkpoint": None, "codec": None}
    report = measure_accuracy(
        lambda: SoundEffects.open(checkpoint, codec, dtype="float32"),
        lambda: open_effects(options),
        request,
        seed,
        sampling,
        max_new_tokens,
    )
    click.echo(json.dumps(_facts(report)) if as_json else _table(report))
    context.exit(report.verdict.exit_code)


def _facts(report: Report) -> dict[str, Any]:
    facts: dict[str, Any] = plain_numbers(dataclasses.asdict(report))
    return facts | {"verdict": report.verdict.value, "exit_code": report.verdict.exit_code}


def _table(report: Report) -> str:
    wide = max(len(s.name) for s in report.stages), max(len(s.verdict.value) for s in report.stages)
    lines = [
        f"{report.other} against {report.reference}: both read {report.num_rows} rows; limits: {report.limits.reason}",
        *(f"{s.name:<{wide[0]}}  {s.verdict.value:<{wide[1]}}  {s.text}" for s in report.stages),
        f"verdict: {report.verdict.value}",
    ]
    return "\n".join(lines)
