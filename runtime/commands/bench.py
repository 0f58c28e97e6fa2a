"""run-om bench: how fast a model speaks here, how far that is from what the hardware allows, what a device may do."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.backends.select import BackendOptions
from runtime.commands.backend_options import backend_options
from runtime.errors import BenchError

if TYPE_CHECKING:
    from runtime.bench import BenchProtocol
    from runtime.manifest import Manifest


class BenchGroup(click.Group):
    """`bench ARTIFACTS` measures; `bench diff A B` compares; `bench --plan ARTIFACTS` predicts."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--plan" in args:
            args = ["plan", *(arg for arg in args if arg != "--plan")]
        elif args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure artifacts, compare two results, or predict a device that is not here.

    \b
    run-om bench ARTIFACTS --backend ort --threads 1 --out a.json
    run-om bench diff a.json b.json
    run-om bench --plan ARTIFACTS --target 910B4,precision=fp16
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
@click.option("--batch", type=click.IntRange(2), help="Measure this many utterances per launch against one.")
@click.option("--baseline", type=click.Path(path_type=Path, file_okay=False),
              help="Measure beside the official loop on this published ONNX package (a stand-in: convert-moss "
              "write-package).")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write OUT (JSON) and a page beside it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run(
    artifacts: Path,
    backend: BackendOptions,
    protocol_file: Path | None,
    batch: int | None,
    baseline: Path | None,
    out: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Measure ARTIFACTS: every stage, frames/s, RTF, first audio, memory, and the limit that bandwidth sets."""
    from runtime.bench import BenchProtocol, measure
    from runtime.bench_report import as_html, as_text
    from runtime.manifest import Manifest

    if out is not None and out.suffix != ".json":
        raise BenchError(f"--out {out}: expected a name that ends in .json; the page goes beside it as .html")
    protocol = BenchProtocol.read(protocol_file) if protocol_file else BenchProtocol()
    protocol = dataclasses.replace(protocol, **{k: v for k, v in changes.items() if v})
    manifest = Manifest.load(artifacts)
    if batch is not None:
        click.echo(_batch(manifest, backend, batch, protocol, as_json))
        return
    report = functools.partial(click.echo, err=True)
    if baseline is not None:
        _baseline(manifest, backend, baseline, protocol, out, as_json)
        return
    result = measure(manifest, backend, protocol, report=report)
    _show(result.to_dict(), as_text(result), as_html(result), out, as_json)


def _show(data: dict[str, Any], text: str, html: str, out: Path | None, as_json: bool) -> None:
    """Write the files that were asked for, and print."""
    from runtime.manifest import write_atomically

    printed = json.dumps(data, indent=1) + "\n"
    if out is not None:
        write_atomically(out, printed)
        write_atomically(out.with_suffix(".html"), html)
    click.echo(printed if as_json else text)


def _baseline(
    manifest: Manifest, backend: BackendOptions, package: Path, protocol: BenchProtocol, out: Path | None, as_json: bool
) -> None:
    from runtime.bench_baseline import measure_baseline
    from runtime.bench_baseline_report import as_html, as_text

    if backend.name != "ort" or backend.provider != "cpu":
        raise BenchError(f"--baseline compares loops on ONNX Runtime and the CPU, not on {backend.name}")
    result = measure_baseline(manifest, package, backend, protocol, functools.partial(click.echo, err=True))
    _show(result.to_dict(), as_text(result), as_html(result), out, as_json)


def _batch(manifest: Manifest, backend: BackendOptions, batch: int, protocol: BenchProtocol, as_json: bool) -> str:
    from runtime.bench_batch import measure_batch
    from runtime.commands.backend_options import open_chosen

    if backend.name not in ("ort", "torch"):
        raise BenchError(
            f"--batch runs on ort and torch; {backend.name} runs what was compiled, one utterance at a time"
        )
    results = measure_batch(manifest, open_chosen(manifest, backend), batch, protocol)
    if as_json:
        return json.dumps([dataclasses.asdict(r) for r in results])
    lines = [
        f"B = {r.batch}: {r.frames_per_second:.2f} frames/s together, {r.cpu_ms_per_frame:.2f} ms of CPU per frame, "
        f"{'codes as alone' if r.same_codes else 'codes DIFFER from those alone'}"
        for r in results
    ]
    one, many = results
    lines.append(f"throughput x {many.frames_per_second / one.frames_per_second:.2f}, by CPU time x "
                 f"{one.cpu_ms_per_frame / many.cpu_ms_per_frame:.2f}")  # fmt: skip
    return "\n".join(lines)


@bench.command()
@click.argument("a", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("b", type=click.Path(path_type=Path, dir_okay=False))
def diff(a: Path, b: Path) -> None:
    """Compare two results of the same fixture and protocol."""
    from runtime.bench_diff import diff as compare
    from runtime.bench_diff import read_result

    click.echo(compare(read_result(a), read_result(b)))


@bench.command()
@click.argument("artifacts", type=click.Path(path_type=Path, file_okay=False))
@click.option("--target", default="910B4,precision=fp16", show_default=True, help="As of convert-moss check.")
@click.option("--savings", is_flag=True, help="Also each exact saving taken back: kernels before and after.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(artifacts: Path, target: str, savings: bool, as_json: bool) -> None:
    """Predict kernels, bytes and time of ARTIFACTS on a device, per graph and per frame, with every assumption stated.

    Also written `run-om bench --plan ARTIFACTS`. It lowers the graphs for the target first, which takes the packages
    of the extra `convert`.
    """
    try:
        from convert.bench_plan import as_text, plan_speed
        from op_patches.targets import Target
    except ModuleNotFoundError as error:
        raise BenchError(
            f"a prediction lowers graphs, which needs {error.name}; run: pip install 'moss-tts-nano-ascend[convert]'"
        ) from error
    from runtime.manifest import Manifest

    manifest = Manifest.load(artifacts)
    manifest.require_float32("a device")
    found = plan_speed(manifest, Target.parse(target), with_savings=savings)
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else as_text(found))
