"""Our loop beside the official one, in one run: the figures whose ratio counts.

A published ONNX package (or one that `convert-moss write-package` wrote) stands in for the official loop: its own
graphs with the semantics of the official runtime, package_model.py and package_codec.py. Each of its sessions has a
thread pool whose idle threads spin; a third side has that turned off and nothing else (BASELINES.md section 1).

Every side is a process of its own, so that its peak memory is its own; the sides take turns, repeat by repeat, so that
noise meets all of them. First the language model (prompt, then a forced number of frames), then the codec.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.ort import load_onnxruntime
from runtime.backends.select import BackendOptions, open_backend
from runtime.bench import BenchProtocol, Report, fixture_hash, prompt_rows
from runtime.bench_memory import peak_rss_bytes
from runtime.codec import SpeechCodec
from runtime.errors import BenchError, MossError
from runtime.frame_model import FrameModel, Ints
from runtime.manifest import Manifest
from runtime.sampling import draw_uniforms

OURS, STOCK, QUIET = "ours", "official loop", "official loop, spinning off"
DECODE_FRAMES = 150  # of the whole decode
FULL_WINDOW = 130  # frames that a stream has seen before it is timed: the longest window is 125
STREAM_FRAMES = (1, 8)
OPEN_SECONDS, REPEAT_SECONDS = 300, 1800  # a side that is silent for longer has failed
_LLM, _CODEC, _PEAK = "llm", "codec", "peak"


@dataclass(frozen=True, slots=True)
class Side:
    """What one process runs: our artifacts, or a package."""

    name: str
    directory: Path
    options: BackendOptions
    spinning: bool = False  # of the package's sessions


@dataclass(frozen=True, slots=True)
class SideResult:
    """Medians over the repeats, in milliseconds; a frame and a streamed frame are per frame."""

    name: str
    load_seconds: float  # all sessions, language model and codec, from files in the page cache
    milliseconds: dict[str, float]  # prefill, frame, encode, decode_150, stream_1, stream_8
    codes: str  # hash of all generated codes
    llm_peak_rss_bytes: int  # with every session open, before the codec ran
    peak_rss_bytes: int

    @property
    def frames_per_second(self) -> float:
        return 1e3 / self.milliseconds["frame"]


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """The sides, ours first."""

    artifacts: str
    fixture: str
    package: str
    made_up: bool
    threads: int | None
    protocol: BenchProtocol
    sides: tuple[SideResult, ...]
    load_averages: tuple[float, float]

    def ratio(self, other: SideResult, stage: str) -> float:
        """How many times faster ours is."""
        return other.milliseconds[stage] / self.sides[0].milliseconds[stage]

    def to_dict(self) -> dict[str, Any]:
        """As JSON data; `ratios` says how many times better ours is, memory and load included."""
        ours, *others = self.sides
        ratios = {
            o.name: {
                **{stage: self.ratio(o, stage) for stage in ours.milliseconds},
                "load": o.load_seconds / ours.load_seconds,
                "llm_peak_rss": o.llm_peak_rss_bytes / ours.llm_peak_rss_bytes,
                "peak_rss": o.peak_rss_bytes / ours.peak_rss_bytes,
                "same_codes": o.codes == ours.codes,
            }
            for o in others
        }
        return {**dataclasses.asdict(self), "ratios": ratios}


def measure_baseline(
    manifest: Manifest,
    package: Path,
    options: BackendOptions,
    protocol: BenchProtocol,
    report: Report = lambda line: None,
) -> BaselineResult:
    """Run all sides; BenchError names the side that failed."""
    sides = (
        Side(OURS, manifest.directory, options),
        Side(STOCK, package, options, spinning=True),
        Side(QUIET, package, options),
    )
    rows = prompt_rows(manifest.model, protocol)
    before = os.getloadavg()[0]
    with ExitStack() as stack:
        processes: dict[str, _Process] = {}
        for side in sides:  # one after the other: loading takes both cores and fresh memory
            processes[side.name] = process = _Process(side, rows, protocol)
            stack.callback(process.stop)
            process.load_seconds = process.receive(OPEN_SECONDS)
            report(f"{side.name}: loaded in {process.load_seconds:.2f} s")
        for task in (_LLM, _CODEC):
            for number in range(1 + protocol.repeat):  # the first is the warm-up
                for name, process in processes.items():
                    times = process.ask(task)
                    if number:
                        process.keep(times)
                    report(f"{name}: {task} {number or 'warm-up'}: " + ", ".join(
                        f"{stage} {value:.1f} ms" for stage, value in times.items() if stage != "codes"))  # fmt: skip
            for process in processes.values():
                process.peaks.append(process.ask(_PEAK))
        results = tuple(process.result() for process in processes.values())
    return BaselineResult(
        manifest.name, fixture_hash(manifest), str(package), manifest.made_up, options.threads, protocol, results,
        (before, os.getloadavg()[0]),
    )  # fmt: skip


class _Process:
    """One side, seen from the parent."""

    def __init__(self, side: Side, rows: Ints, protocol: BenchProtocol) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, side, rows, protocol), daemon=True)
        self._process.start()
        theirs.close()
        self._name = side.name
        self._kept: dict[str, list[float]] = {}
        self._codes: list[bytes] = []
        self.load_seconds = 0.0
        self.peaks: list[int] = []

    def receive(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise BenchError(f"{self._name}: no answer within {seconds} s")
            answer = self._pipe.recv()
        except EOFError as error:
            raise BenchError(f"{self._name}: its process ended; is there memory for three models?") from error
        if isinstance(answer, MossError):
            raise BenchError(f"{self._name}: {answer}") from answer
        return answer

    def ask(self, task: str) -> Any:
        self._pipe.send(task)
        return self.receive(REPEAT_SECONDS)

    def keep(self, times: Mapping[str, Any]) -> None:
        for name, value in times.items():
            if name == "codes":
                self._codes.append(value)
            else:
                self._kept.setdefault(name, []).append(value)

    def result(self) -> SideResult:
        medians = {name: float(np.median(values)) for name, values in self._kept.items()}
        codes = hashlib.sha256(b"".join(self._codes)).hexdigest()
        return SideResult(self._name, self.load_seconds, medians, codes, self.peaks[0], self.peaks[-1])

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, side: Side, rows: Ints, protocol: BenchProtocol) -> None:
    """The process of one side: load, then one repeat of what is asked for until the parent ends it."""
    try:
        load_onnxruntime()
        _read_through(side.directory)
        start = time.perf_counter()
        model, codec = open_side(side)
        pipe.send(time.perf_counter() - start)
        tasks: dict[str, Callable[[], Any]] = {
            _LLM: lambda: _speak(model, rows, protocol),
            _CODEC: lambda: _code(codec, protocol),
            _PEAK: peak_rss_bytes,
        }
        while True:
            pipe.send(tasks[pipe.recv()]())
    except MossError as error:
        pipe.send(error)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone


def _read_through(directory: Path) -> None:
    """Read every file once: what is measured is loading, not what the page cache happens to hold."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb") as source:
                while source.read(1 << 24):
                    pass


def open_side(side: Side) -> tuple[FrameModel, SpeechCodec]:
    """Every session that speaking needs; of a package every session that the official runtime opens."""
    if side.name != OURS:
        from runtime.onnx_package import open_package
        from runtime.package_codec import PublishedCodec
        from runtime.package_model import PublishedFrameModel
        from runtime.package_speech import describe_package

        package = open_package(side.directory)
        model = PublishedFrameModel(package, side.options.threads, spinning=side.spinning)
        config = describe_package(package, model).codec
        return model, PublishedCodec(package, config, side.options.threads, spinning=side.spinning)
    from runtime.assembly import open_codec, open_frame_model

    manifest = Manifest.load(side.directory)
    backend = open_backend(side.options.name, manifest, options=side.options)
    return open_frame_model(manifest, backend, not side.options.split), open_codec(manifest, backend)


def _speak(model: FrameModel, rows: Ints, protocol: BenchProtocol) -> dict[str, Any]:
    """One prompt and exactly `frames` frames, whatever the stop decision says.

    The codes of a frame that ends the utterance mean nothing, and the official fixed graph computes them from the end
    token: the frame before is repeated in its place, on every side.
    """
    rng = np.random.default_rng(protocol.seed)
    codes = [np.zeros(rows.shape[1] - 1, np.int32)]
    start = time.perf_counter()
    model.prefill(rows)
    prefilled = time.perf_counter()
    for _ in range(protocol.frames):
        frame = model.next_frame(draw_uniforms(rng, rows.shape[1] - 1), protocol.sampling)
        if not frame.go_on:
            model.force_frame(codes[-1])
        codes.append(frame.codes.copy() if frame.go_on else codes[-1])
    done = time.perf_counter()
    return {
        "prefill": 1e3 * (prefilled - start),
        "frame": 1e3 * (done - prefilled) / protocol.frames,
        "codes": np.stack(codes).astype(np.int32).tobytes(),
    }


def _code(codec: SpeechCodec, protocol: BenchProtocol) -> dict[str, float]:
    """Each way through the codec once."""
    config, rng = codec.config, np.random.default_rng(protocol.seed)
    clip = 0.1 * rng.standard_normal((config.num_channels, round(protocol.encode_seconds * config.sample_rate_hz)))
    codes = rng.integers(0, config.codebook_size, (DECODE_FRAMES, config.n_vq), dtype=np.int32)
    found = {
        "encode": _milliseconds(lambda: codec.encode(clip.astype(np.float32))),
        f"decode_{DECODE_FRAMES}": _milliseconds(lambda: codec.decode(codes)),
    }
    for size in STREAM_FRAMES:
        with codec.stream() as stream:
            for first in range(0, FULL_WINDOW, 8):
                stream.push(codes[first : first + 8])
            times = [_milliseconds(functools.partial(stream.push, codes[:size])) for _ in range(5)]
        found[f"stream_{size}"] = float(np.median(times)) / size
    return found


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)
