"""The options that say which backend runs, the same for every command that runs graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from runtime.backends.select import BACKEND_NAMES, PROVIDERS, BackendOptions

if TYPE_CHECKING:
    from runtime.backends.base import Backend
    from runtime.manifest import Manifest

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--backend", "backend_name", default="ort", show_default=True, type=click.Choice(BACKEND_NAMES)),
    click.option("--device", help="om: 0, 1, …; torch: cpu or npu:0."),
    click.option("--provider", default="cpu", show_default=True, type=click.Choice(PROVIDERS), help="Of ort."),
    click.option("--simulate", is_flag=True, help="om on the pyACL simulator: runs what the fake atc compiled."),
    click.option("--split-step", is_flag=True, help="Two launches per frame, step and frame, instead of step_frame."),
    click.option("--device-graphs", is_flag=True, help="ort: run the graphs that ATC compiles, with a copy of the "
                 "weights each, instead of extend and frame."),
    click.option("--precision", help="om: which builds, when several are there (origin, fp16, …)."),
    click.option("--threads", type=click.IntRange(1), help="Threads of the CPU backends."),
)


def backend_options(command: Command) -> Command:
    """Give a command the backend options; it receives them as one argument, `backend: BackendOptions`."""

    @functools.wraps(command)
    def with_options(*args: Any, **values: Any) -> Any:
        backend = BackendOptions(
            name=values.pop("backend_name"),
            device=values.pop("device"),
            threads=values.pop("threads"),
            provider=values.pop("provider"),
            simulate=values.pop("simulate"),
            split=values.pop("split_step"),
            device_graphs=values.pop("device_graphs"),
            precision=values.pop("precision"),
        )
        return command(*args, backend=backend, **values)

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options  # type: ignore[return-value]  # a decorated command is called like the command


def open_chosen(manifest: Manifest, backend: BackendOptions) -> Backend:
    """Open the backend; what a person must know about the choice goes to stderr."""
    from runtime.backends.select import open_backend

    return open_backend(backend.name, manifest, options=backend, report=lambda line: click.echo(line, err=True))
