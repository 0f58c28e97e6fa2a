"""A click group whose commands are imported when they are called, so that `--help` needs no heavy package.

Expected failures (MossError) leave as one line on stderr and exit code 1, here and nowhere else.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from runtime.errors import MossError


class LazyGroup(click.Group):
    """`commands_by_name` maps a command to ("module:attribute", one-line help)."""

    def __init__(self, *args: Any, commands_by_name: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, attribute = self._lazy[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MossError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)
