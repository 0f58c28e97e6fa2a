"""run-om sfx-bench: seconds, RTF, tokens per second and peak memory of one request, repeated."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from runtime.commands.sfx_options import (
    limit_option,
    model_options,
    open_effects,
    prompts_from,
    sampling_from,
    sampling_options,
    text_options,
)

if TYPE_CHECKING:
    from runtime.sfx.bench import SfxBench
    from runtime.sfx.sound_effects import Sound

LABELS = {
    "llm_seconds": "LLM seconds", "codec_seconds": "codec seconds", "total_seconds": "total seconds", "rtf": "RTF",
    "llm_rtf": "RTF of the LLM", "tokens_per_second": "LLM tokens / s",
}  # fmt: skip


@click.command("sfx-bench")
@model_options
@click.option("--prompt", default="Rolling thunder with steady rainfall.", show_default=True)
@text_options
@click.option("--seed", default=0, show_default=True)
@sampling_options
@limit_option
@click.option("--num-warmup", default=1, show_default=True, help="Runs before the measured ones.")
@click.option("--num-iterations", default=3, show_default=True, help="Measured runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sfx_bench(
    prompt: str,
    seed: int,
    max_new_tokens: int | None,
    num_warmup: int,
    num_iterations: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure one request; RTF is wall seconds / audio seconds, below 1 is faster than real time.

    Example: run-om sfx-bench --checkpoint DIR --codec DIR --tokens 125 --num-warmup 1 --num-iterations 3
    """
    from runtime.sfx.bench import measure

    if options["tokens"] is None and options["seconds"] is None:
        options["tokens"] = 125
    [request], sampling = prompts_from([prompt], options), sampling_from(options)
    with open_effects(options) as effects:
        for notice in effects.notices:
            click.echo(f"notice: {notice}", err=True)
        bench = measure(effects, request, seed, sampling, max_new_tokens, num_warmup, num_iterations, _on_run)
    click.echo(json.dumps(dataclasses.asdict(bench)) if as_json else _table(bench))


def _on_run(number: int, sound: Sound) -> None:
    click.echo(f"run {number + 1}: LLM {sound.llm_seconds:.2f} s, codec {sound.codec_seconds:.2f} s", err=True)


def _table(bench: SfxBench) -> str:
    device = "" if bench.peak_device_mb is None else f", device {bench.peak_device_mb:,.0f} MB"
    lines = [
        f"{bench.backend}, seed {bench.seed}: {bench.num_rows} tokens, {bench.audio_seconds:.2f} s of audio; "
        f"{bench.iterations} runs after {bench.warmups} to warm up",
        f"{'':<18}{'median':>10}{'p90':>10}{'mean':>10}",
    ]
    for name, figure in bench.figures.items():
        lines.append(f"{LABELS[name]:<18}{figure.median:>10.3f}{figure.p90:>10.3f}{figure.mean:>10.3f}")
    lines.append(f"peak memory: host {bench.peak_host_mb:,.0f} MB{device}")
    return "\n".join(lines)
