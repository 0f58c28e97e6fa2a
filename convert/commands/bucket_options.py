"""The options that say which static graphs are compiled, for `atc` and `build`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from op_patches.targets import Target

F = TypeVar("F", bound=Callable[..., Any])
PRECISIONS = {"origin": "origin", "fp16": "fp16", "mixed": "mixed_float16", "mixed-bf16": "mixed_bfloat16"}


def chosen_target(target: str, precision: str | None) -> Target:
    """The target, with the precision that --precision gives instead."""
    from op_patches.targets import Target

    chosen = Target.parse(target)
    return chosen if precision is None else dataclasses.replace(chosen, precision=PRECISIONS[precision])


def split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: expected numbers with commas between them, such as 128,256") from error


def target_options(command: F) -> F:
    """--target, --precision, --keep-fp32."""
    for option in (
        click.option(
            "--keep-fp32", type=click.Path(path_type=Path, dir_okay=False), help="Nodes that stay float32, one a line."
        ),
        click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Instead of the target's precision."),
        click.option(
            "--target",
            default="910B4",
            show_default=True,
            help="cann=8.5,soc=Ascend910B4,precision=origin, a preset (910B1 … 910B4, A3, 310P3), or a TOML file.",
        ),
    ):
        command = option(command)
    return command


def bucket_options(command: F) -> F:
    """--graphs and the sizes; the frames of the codec are 80 ms each."""
    for name, default, text in reversed(
        (
            ("prefill", "128,256,512", "Prompt rows, one .om each."),
            ("encode-frames", "128,256", "Frames of the reference clip, one .om each."),
            ("decode-frames", "128", "Frames decoded at once, one .om each."),
            ("stream-frames", "1,8", "Frames per streamed chunk, one .om each."),
        )
    ):
        command = click.option(f"--{name}", callback=_sizes, default=default, show_default=True, help=text)(command)
    capacity = click.option("--capacity", default=1024, show_default=True, help="Rows of the KV cache.")
    batch = click.option("--batch", default=1, show_default=True, help="Requests per launch.")
    graphs = click.option("--graphs", default="", help="Only these, with commas between them; default: all exported.")
    return graphs(capacity(batch(command)))


def run_options(command: F) -> F:
    """--jobs, --timeout-minutes, --force."""
    for option in (
        click.option("--force", is_flag=True, help="Compile even what is unchanged."),
        click.option("--timeout-minutes", default=60.0, show_default=True, help="Per graph."),
        click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="ATC processes at a time."),
    ):
        command = option(command)
    return command
