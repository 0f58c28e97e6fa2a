"""How MOSS-SoundEffect is cut: the options that sfx-export and sfx-plan share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from runtime.sfx.graphs import DTYPES, SfxPlan

F = TypeVar("F", bound=Callable[..., Any])
_DEFAULTS = SfxPlan()


def plan_options(command: F) -> F:
    """--dtype, --layers-per-block, --rows, --capacity, --codec-frames: the fields of SfxPlan."""
    options = (
        click.option("--dtype", type=click.Choice(DTYPES), default=_DEFAULTS.dtype, show_default=True,
                     help="Of the matrices and the cache; residual, norms, RoPE and softmax stay float32."),
        click.option("--layers-per-block", default=_DEFAULTS.layers_per_block, show_default=True),
        click.option("--rows", default=_DEFAULTS.rows, show_default=True, help="Rows per launch."),
        click.option("--capacity", default=_DEFAULTS.capacity, show_default=True,
                     help="Rows of prompt (about 200) and sound (12.5 per second and 18)."),
        click.option("--codec-frames", default=_DEFAULTS.codec_frames, show_default=True,
                     help="Frames per launch of the codec; 100 are upstream's 8 s."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command
