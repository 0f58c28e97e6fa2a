"""run-om bench: how fast a model speaks here, and how far that is from what the hardware allows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from runtime.backends.select import BackendOptions
from runtime.commands.backend_options import backend_options


class BenchGroup(click.Group):
    """`bench ARTIFACTS` measures; `bench diff A B` compares."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure artifacts, or compare two results.

    \b
    run-om bench ARTIFACTS --backend ort --threads 1 --out a.json
    run-om bench diff a.json b.json
    """


@bench.command()
@click.argument("artifacts", type=click.Path(path_type=Path, file_okay=False))
@backend_options
@click.option("--protocol", "protocol_file", type=click.Path(path_type=Path, dir_okay=False),
              help="JSON file with any of: prompt_rows, frames, repeat, codec_frames, encode_seconds, greedy, seed, "
              "cache_lengths, cache_calls.")  # fmt: skip
@click.option("--frames", type=click.IntRange(1), help="Frames per run, whatever the stop decision says.  [default: "
              "100]")  # fmt: skip
@click.option("--repeat", type=click.IntRange(1), help="Measured runs.  [default: 5]")
@click.option("--greedy", is_flag=True, help="Best code every time, instead of sampling.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write OUT (JSON) and a page beside it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run(
    artifacts: Path,
    backend: BackendOptions,
    protocol_file: Path | None,
    out: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Measure ARTIFACTS: every stage, frames/s, RTF, first audio, memory, and the limit that bandwidth sets."""
    from runtime.bench import BenchProtocol, measure
    from runtime.bench_report import as_html, as_text
    from runtime.errors import BenchError
    from runtime.manifest import Manifest, write_atomically

    if out is not None and out.suffix != ".json":
        raise BenchError(f"--out {out}: expected a name that ends in .json; the page goes beside it as .html")
    protocol = BenchProtocol.read(protocol_file) if protocol_file else BenchProtocol()
    protocol = dataclasses.replace(protocol, **{k: v for k, v in changes.items() if v})
    manifest = Manifest.load(artifacts)
    result = measure(manifest, backend, protocol, report=lambda line: click.echo(line, err=True))
    data = json.dumps(result.to_dict(), indent=1) + "\n"
    if out is not None:
        write_atomically(out, data)
        write_atomically(out.with_suffix(".html"), as_html(result))
    click.echo(data if as_json else as_text(result))


@bench.command()
@click.argument("a", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("b", type=click.Path(path_type=Path, dir_okay=False))
def diff(a: Path, b: Path) -> None:
    """Compare two results of the same fixture and protocol."""
    from runtime.bench_diff import diff as compare
    from runtime.bench_diff import read_result

    click.echo(compare(read_result(a), read_result(b)))
