"""How fast a model speaks here: a forced number of frames, every stage timed, each figure with its limit beside it.

    encode a clip | prefill ─ first frame ─ codec ─► first audio ─ … frames, the codec every `codec_frames` … ─► done
                    └────────────── one run: repeated `repeat` times after one shorter run to warm up ──────────┘

The stop decision is computed and ignored, so every run does the same work whatever the weights are. Prompt and clip
are made from a seed. Sessions are timed from outside (bench_sessions.py); what is left of the wall clock is the host's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.assembly import open_codec, open_frame_model
from runtime.backends.base import Backend
from runtime.backends.om import OmBackend
from runtime.backends.select import BackendOptions, open_backend
from runtime.backends.shared import SharedBackend
from runtime.bench_bytes import BANDWIDTH_BYTES, GraphBytes, graph_bytes, read_bandwidth
from runtime.bench_memory import peak_rss_bytes
from runtime.bench_sessions import Calls, TimedBackend, TimedCodec, TimedFrameModel
from runtime.codec import SpeechCodec
from runtime.config import ModelConfig
from runtime.errors import BenchError
from runtime.frame_model import FrameModel, Ints
from runtime.manifest import Manifest
from runtime.sampling import SamplingParams, draw_uniforms

SCHEMA = 2
WARMUP_FRAMES = 10
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchProtocol:
    """What is run. Two results can be compared when their protocols are equal."""

    prompt_rows: int = 150
    frames: int = 100
    repeat: int = 5
    codec_frames: int = 8  # frames per call of the codec, after the first frame, which goes alone
    encode_seconds: float = 3.0
    greedy: bool = False
    seed: int = 0
    cache_lengths: tuple[int, ...] = (128, 512, 1024, 2048)  # where the step is timed on its own; may be empty
    cache_calls: int = 5

    def __post_init__(self) -> None:
        for name in ("prompt_rows", "frames", "repeat", "codec_frames", "cache_calls"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BenchError(f"protocol: {name}: expected a whole number from 1 on, got {value!r}")
        if not isinstance(self.encode_seconds, int | float) or self.encode_seconds < 0.1:
            raise BenchError(f"protocol: encode_seconds: expected 0.1 or more, got {self.encode_seconds!r}")
        lengths = self.cache_lengths
        if not isinstance(lengths, tuple) or any(not isinstance(n, int) or n < 1 for n in lengths):
            raise BenchError(f"protocol: cache_lengths: expected whole numbers from 1 on, got {lengths!r}")
        if not isinstance(self.seed, int) or self.seed < 0 or not isinstance(self.greedy, bool):
            raise BenchError(f"protocol: expected seed from 0 on and greedy true or false, got {self.seed!r} and "
                             f"{self.greedy!r}")  # fmt: skip

    @staticmethod
    def read(path: Path) -> BenchProtocol:
        """A JSON file with any of the fields; the others keep their defaults."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BenchError(f"{path}: expected a JSON file with the protocol ({error})") from error
        names = {f.name for f in dataclasses.fields(BenchProtocol)}
        if not isinstance(data, dict) or set(data) - names:
            raise BenchError(f"{path}: expected an object with fields of {', '.join(sorted(names))}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return BenchProtocol(**values)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams.greedy() if self.greedy else SamplingParams()


@dataclass(frozen=True, slots=True)
class Stage:
    """One graph, or the host, over all measured runs."""

    name: str
    calls: int
    median_ms: float
    p95_ms: float
    share: float  # of the wall clock of encode and run
    limit_ms: float | None = None  # to read the graph's weights once and its cache, at the measured bandwidth

    @staticmethod
    def of(name: str, seconds: list[float], wall: float) -> Stage:
        times = 1e3 * np.asarray(seconds)
        return Stage(
            name, len(times), float(np.median(times)), float(np.percentile(times, 95)), float(times.sum() / 1e3 / wall)
        )


@dataclass(frozen=True, slots=True)
class CachePoint:
    """The median time of a step at one cache length."""

    rows: int
    graph: str
    milliseconds: float
    cache_bytes: int  # that a step must read at this length


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran, and how busy the machine was with other things."""

    cpu: str
    cores: int
    system: str
    python: str
    versions: dict[str, str]
    load_average_before: float
    load_average_after: float


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Everything that was measured; the figures are medians over the runs."""

    schema: int
    artifacts: str
    fixture: str  # one hash of the checkpoint files
    made_up: bool
    weights: str  # float32, or how the CPU build reduced them
    backend: str
    fused: bool
    protocol: BenchProtocol
    codes: str  # one hash of all generated codes: equal settings on equal weights should agree
    threads_asked: int | None
    threads_working: float  # CPU seconds per wall second during the runs
    load_seconds: float
    warmup_seconds: float
    stages: tuple[Stage, ...]
    frames_per_second: float  # frames per second of the frame loop, without prefill and codec
    cpu_ms_per_frame: float  # of the whole run, all threads
    rtf: float  # seconds of prefill, frames and codec per second of audio
    first_audio_ms: float  # prefill, one frame, one codec call
    peak_rss_bytes: int
    bandwidth_bytes_per_second: float
    graph_bytes: tuple[GraphBytes, ...]
    roofline_frames_per_second: float | None
    roofline_share: float | None  # of it reached
    cache_curve: tuple[CachePoint, ...]
    machine: Machine

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class _Run:
    wall: float
    cpu: float
    frames: float  # the frame loop without the codec
    first_audio: float
    codes: Ints


def measure(
    manifest: Manifest,
    options: BackendOptions,
    protocol: BenchProtocol,
    report: Report = lambda line: None,
    bandwidth_bytes: int = BANDWIDTH_BYTES,
) -> BenchResult:
    """Open the model, warm up, run, and put every figure beside its limit; `bandwidth_bytes` are read to find it."""
    _check_capacity(manifest, protocol)
    load_before = os.getloadavg()[0]
    calls = Calls()
    start = time.perf_counter()
    backend = open_backend(options.name, manifest, options=options, report=report)
    fused = not options.split and not isinstance(backend, SharedBackend)  # which runs extend and frame either way
    codec, model = _open(manifest, backend, fused, calls)
    load_seconds = time.perf_counter() - start
    try:
        rows = prompt_rows(manifest.model, protocol)
        start = time.perf_counter()
        short = dataclasses.replace(protocol, frames=min(protocol.frames, WARMUP_FRAMES))
        _encode(codec, manifest, protocol)
        _run(model, codec, rows, short)
        warmup_seconds = time.perf_counter() - start
        report(f"loaded in {load_seconds:.2f} s, warm after {warmup_seconds:.2f} s")
        calls.clear()
        runs, encode_wall, host = [], 0.0, []
        for number in range(protocol.repeat):
            encode_wall += _encode(codec, manifest, protocol)
            before = calls.total
            runs.append(_run(model, codec, rows, protocol))
            host.append((runs[-1].wall - (calls.total - before)) / protocol.frames)
            report(f"run {number + 1}: {protocol.frames / runs[-1].frames:.2f} frames/s")
        peak = peak_rss_bytes()
        stages = _stages(calls, host, sum(r.wall for r in runs) + encode_wall)
        curve = () if isinstance(backend, OmBackend) else _cache_curve(manifest, backend, protocol, fused)
    finally:
        model.close()
        codec.close()
    return _result(manifest, options, fused, protocol, model.backend_name, runs, stages, curve,
                   (load_seconds, warmup_seconds), peak, load_before, bandwidth_bytes)  # fmt: skip


def prompt_rows(model: ModelConfig, protocol: BenchProtocol) -> Ints:
    """Prompt rows [T, 1 + n_vq] from the seed: text rows, then reference codes, then text again."""
    rng = np.random.default_rng(protocol.seed)
    rows = np.full((protocol.prompt_rows, 1 + model.n_vq), model.audio_pad_id, np.int32)
    rows[:, 0] = rng.integers(0, model.vocab_size, protocol.prompt_rows)
    spoken = slice(protocol.prompt_rows // 4, 3 * protocol.prompt_rows // 4)
    rows[spoken, 0] = model.audio_user_slot_id
    rows[spoken, 1:] = rng.integers(0, min(model.codebook_sizes), rows[spoken, 1:].shape)
    return rows


def fixture_hash(manifest: Manifest) -> str:
    """One hash of the checkpoint files; of the weights when the manifest does not say where they came from."""
    files = {role: manifest.source[role]["files"] for role in sorted(manifest.source)} or manifest.data_files
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _check_capacity(manifest: Manifest, protocol: BenchProtocol) -> None:
    limit = manifest.limits["max_positions"]
    needed = protocol.prompt_rows + protocol.frames
    if needed > limit:
        raise BenchError(f"the protocol needs {needed} rows, {manifest.directory} was exported for {limit}")


def _open(manifest: Manifest, backend: Backend, fused: bool, calls: Calls) -> tuple[SpeechCodec, FrameModel]:
    """Codec and frame model with their clocks: around each session, or on a device around each call."""
    if isinstance(backend, OmBackend):  # there they launch by themselves: host and graph cannot be told apart
        codec = TimedCodec(open_codec(manifest, backend), calls)
        return codec, TimedFrameModel(open_frame_model(manifest, backend, fused), calls, fused)
    timed = TimedBackend(backend, calls)
    return open_codec(manifest, timed), open_frame_model(manifest, timed, fused)


def _encode(codec: SpeechCodec, manifest: Manifest, protocol: BenchProtocol) -> float:
    config = manifest.codec
    samples = round(protocol.encode_seconds * config.sample_rate_hz)
    clip = 0.1 * np.random.default_rng(protocol.seed).standard_normal((config.num_channels, samples))
    start = time.perf_counter()
    codec.encode(clip.astype(np.float32))
    return time.perf_counter() - start


def _run(model: FrameModel, codec: SpeechCodec, rows: Ints, protocol: BenchProtocol) -> _Run:
    """One utterance of exactly `frames` frames."""
    rng = np.random.default_rng(protocol.seed)
    n_vq, sampling = rows.shape[1] - 1, protocol.sampling
    codes: list[Ints] = []
    decoded, in_codec, first_audio = 0, 0.0, 0.0
    cpu, start = time.process_time(), time.perf_counter()
    model.prefill(rows)
    prefilled = time.perf_counter()
    with codec.stream() as stream:
        for i in range(protocol.frames):
            codes.append(model.next_frame(draw_uniforms(rng, n_vq), sampling).codes.copy())
            if i == 0 or len(codes) - decoded == protocol.codec_frames or i == protocol.frames - 1:
                before = time.perf_counter()
                stream.push(np.stack(codes[decoded:]))
                decoded = len(codes)
                now = time.perf_counter()
                in_codec += now - before
                first_audio = first_audio or now - start
    done = time.perf_counter()
    return _Run(done - start, time.process_time() - cpu, done - prefilled - in_codec, first_audio, np.stack(codes))


def _stages(calls: Calls, host: list[float], wall: float) -> tuple[Stage, ...]:
    """Every graph, and the host per frame: what the sessions do not account for."""
    stages = [Stage.of(name, seconds, wall) for name, seconds in calls.seconds.items()]
    rest = Stage.of("host per frame", host, wall)
    return (*stages, dataclasses.replace(rest, share=1 - calls.total / wall))


def _cache_curve(manifest: Manifest, backend: Backend, protocol: BenchProtocol, fused: bool) -> tuple[CachePoint, ...]:
    """The step alone, at those of the protocol's cache lengths that the artifacts can take, in turn."""
    lengths = [rows for rows in protocol.cache_lengths if rows <= manifest.limits["max_positions"]]
    if not lengths:
        return ()
    name = "step_frame" if fused else "step"
    graph = manifest.graph(name)
    feeds = {rows: _step_feeds(manifest, name, rows, protocol) for rows in lengths}
    seconds: dict[int, list[float]] = {rows: [] for rows in lengths}
    session = backend.open(graph.spec, manifest.path(graph.file))
    try:
        for _ in range(1 + protocol.cache_calls):
            for rows in lengths:
                start = time.perf_counter()
                session.run(feeds[rows])
                seconds[rows].append(time.perf_counter() - start)
    finally:
        session.close()
    cache = {rows: sum(v.nbytes for k, v in feeds[rows].items() if k.startswith("past_")) for rows in lengths}
    return tuple(CachePoint(rows, name, 1e3 * float(np.median(seconds[rows][1:])), cache[rows]) for rows in lengths)


def _step_feeds(manifest: Manifest, name: str, rows: int, protocol: BenchProtocol) -> dict[str, Any]:
    rng = np.random.default_rng(protocol.seed)
    spec = manifest.graph(name).spec
    feeds: dict[str, Any] = {}
    for tensor in spec.inputs:
        shape = tuple({"B": 1, "C": rows}[axis] if isinstance(axis, str) else axis for axis in tensor.shape)
        past = tensor.name.startswith("past_")
        feeds[tensor.name] = (0.1 * rng.standard_normal(shape) if past else np.zeros(shape)).astype(tensor.dtype)
    feeds["position"][:] = min(rows, manifest.limits["max_positions"] - 1)
    return feeds if name == "step" else {**feeds, **protocol.sampling.feeds()}


def _result(
    manifest: Manifest,
    options: BackendOptions,
    fused: bool,
    protocol: BenchProtocol,
    backend_name: str,
    runs: list[_Run],
    stages: tuple[Stage, ...],
    curve: tuple[CachePoint, ...],
    seconds: tuple[float, float],
    peak: int,
    load_before: float,
    bandwidth_bytes: int,
) -> BenchResult:
    names = ("prefill", "step_frame", "codec_stream") if fused else ("prefill", "step", "frame", "codec_stream")
    middle = protocol.prompt_rows + protocol.frames // 2
    found = tuple(b for b in (graph_bytes(manifest, name, middle, protocol.prompt_rows) for name in names) if b)
    threads = options.threads or os.cpu_count() or 1
    bandwidth = read_bandwidth(threads, bandwidth_bytes)
    limits = {b.graph: 1e3 * (b.weights_distinct + b.cache) / bandwidth for b in found}
    per_frame = sum(b.weights_distinct + b.cache for b in found if b.graph in ("step", "frame", "step_frame"))
    frames_per_second = float(np.median([protocol.frames / r.frames for r in runs]))
    roofline = bandwidth / per_frame if per_frame and options.name != "om" else None
    audio = protocol.frames * manifest.codec.samples_per_frame / manifest.codec.sample_rate_hz
    return BenchResult(
        schema=SCHEMA,
        artifacts=manifest.name,
        fixture=fixture_hash(manifest),
        made_up=manifest.made_up,
        weights=manifest.cpu_weights,
        backend=backend_name,
        fused=fused,
        protocol=protocol,
        codes=hashlib.sha256(b"".join(r.codes.tobytes() for r in runs)).hexdigest(),
        threads_asked=options.threads,
        threads_working=sum(r.cpu for r in runs) / sum(r.wall for r in runs),
        load_seconds=seconds[0],
        warmup_seconds=seconds[1],
        stages=tuple(dataclasses.replace(s, limit_ms=limits.get(s.name)) for s in stages),
        frames_per_second=frames_per_second,
        cpu_ms_per_frame=1e3 * float(np.median([r.cpu for r in runs])) / protocol.frames,
        rtf=float(np.median([r.wall for r in runs])) / audio,
        first_audio_ms=1e3 * float(np.median([r.first_audio for r in runs])),
        peak_rss_bytes=peak,
        bandwidth_bytes_per_second=bandwidth,
        graph_bytes=found,
        roofline_frames_per_second=roofline,
        roofline_share=frames_per_second / roofline if roofline else None,
        cache_curve=curve,
        machine=_machine(manifest, load_before),
    )


def _machine(manifest: Manifest, load_before: float) -> Machine:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return Machine(
        cpu, os.cpu_count() or 1, platform.platform(), platform.python_version(), dict(manifest.versions), load_before,
        os.getloadavg()[0],
    )  # fmt: skip
