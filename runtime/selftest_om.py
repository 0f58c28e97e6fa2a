"""The steps of `run-om selftest --backend om`; docs/on-device.md says what each one decides."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.om import OmBackend, OmModel
from runtime.backends.om_device import OmStream, Releases
from runtime.backends.om_rows import prove_2d_copy
from runtime.backends.select import BackendOptions, open_backend
from runtime.compare import Tolerance, compare_tensors
from runtime.errors import BackendError, BackendUnavailableError, MossError, ParityError
from runtime.frame_model import Frame, FrameModel, HostFrameModel
from runtime.graphs import DEVICE_GRAPHS
from runtime.manifest import Manifest
from runtime.om_frame_model import OmFrameModel, open_om_frame_model
from runtime.sampling import MASKED, SamplingParams, draw_uniforms
from runtime.selftest import NotMeasured, Outcome, SelfTestReport, Step, describe_environment, run_steps
from runtime.spec import Array, GraphSpec

# J 3: what a float32 build with HF32 off should reach against ONNX Runtime on the CPU.
DEVICE_FLOAT32 = Tolerance(1e-4, 1e-4, "float32 build against ONNX Runtime on the CPU, section J 3")
REAL_TIME_FRAMES_PER_SECOND = 12.5
PROMPT_ROWS, NUM_FRAMES, TIMED_FRAMES = 24, 20, 100
Answer = tuple[str, dict[str, Any]]


def run_selftest(
    manifest: Manifest,
    options: BackendOptions,
    report: Callable[[Outcome], None],
    say: Callable[[str], None],
    only: Sequence[str] = (),
) -> SelfTestReport:
    """Run every step on one device, or only some (and `device`, which they stand on).

    Steps whose ground is missing are not measured and say why.
    """
    bench = _Bench(manifest, options, say)
    steps = bench.steps()
    unknown = set(only) - {step.name for step in steps}
    if unknown:
        raise BackendError(f"no step {', '.join(sorted(unknown))}; steps: {', '.join(step.name for step in steps)}")
    try:
        outcomes = run_steps([s for s in steps if not only or s.name in (*only, "device")], report)
        simulated = options.simulate or (bench.backend is not None and bench.backend.device.acl.simulated)
        environment = describe_environment()
        if bench.backend is not None:
            device = bench.backend.device
            environment |= {"device": f"{bench.backend.name} {device.soc}", "CANN": device.cann}
    finally:
        bench.close()
    title = "Self-test of the OM backend" + (" (simulated)" if simulated else "")
    return SelfTestReport(title, simulated, environment, outcomes)


@dataclass
class _Bench:
    """What the steps share: the backend once it is open, the frame model once it is loaded."""

    manifest: Manifest
    options: BackendOptions
    say: Callable[[str], None]
    backend: OmBackend | None = None
    model: OmFrameModel | None = None
    compared: dict[str, float] = field(default_factory=dict)

    def steps(self) -> list[Step]:
        return [
            Step("cann", "Is CANN complete for this SoC? (J 2, 9, 10)", self.cann),
            Step("atc-exit", "Does atc fail loudly: exit status and verdict line? (J 8)", self.atc_exit),
            Step("atc-precheck", "Does atc --mode=3 answer, and in which form? (J 1)", self.atc_precheck),
            Step("device", "Does the device open, and is it what was compiled for?", self.device),
            Step("copy-2d", "Do 2-D copies on the device put bytes where they belong? (C.6a)", self.copy_2d),
            Step("stream-order", "Are copies and launches of one stream done in order? (J 6)", self.stream_order),
            Step("load", "What do the files take in time and memory, all at once? (J 7)", self.load),
            Step("interface", "Are names, order and sizes what the manifest says? (J 4)", self.interface),
            Step("aliasing", "May an output lie over an input? (J 5)", self.aliasing),
            Step("graphs", "Does every graph equal ONNX Runtime on the CPU? (J 3)", self.graphs),
            Step("repeat", "Do repeated runs give the same bits?", self.repeat),
            Step("codes", "Are the codes of the frame loop those of ONNX Runtime?", self.codes),
            Step("thread", "Does the frame loop work from another thread?", self.thread),
            Step("traffic", "What moves per frame?", self.traffic),
            Step("memory", "Does device memory stay the same over many frames?", self.memory),
            Step("speed", "How many frames per second; 12.5 is real time?", self.speed),
        ]

    def close(self) -> None:
        """Free what the steps opened; a failure here is told, since the report is already made."""
        for part in (self.model, self.backend):
            if part is not None:
                try:
                    part.close()
                except BackendError as error:
                    self.say(f"while closing: {error}")

    # -- CANN and atc

    def cann(self) -> Answer:
        result = _our_command("convert.cli", "doctor", "--cann", "--json")
        if result.returncode == 3:
            raise NotMeasured("convert-moss doctor --cann: no CANN on this machine")
        if result.returncode not in (0, 1) or not result.stdout.startswith("{"):
            raise BackendError(f"convert-moss doctor --cann exits {result.returncode}: {_last_line(result)}")
        figures = json.loads(result.stdout)
        faults = [f"{f['topic']}: {f['message']}" for f in figures["findings"] if f["severity"] == "fault"]
        if faults:
            raise BackendError("; ".join(faults))
        return f"convert-moss doctor --cann: {len(figures['findings'])} findings, no fault", figures

    def atc_exit(self) -> Answer:
        """A SoC that does not exist: atc must exit non-zero and say so on stdout."""
        result, output = self._atc("--soc_version=Ascend000")
        if result == 0 or "ATC run failed" not in output:
            raise BackendError(f"atc with a bad SoC: exit {result}, verdict line {'ATC run failed' in output}")
        return f"bad SoC: exit {result}, verdict on stdout", {"exit": result, "output": output[-2000:]}

    def atc_precheck(self) -> Answer:
        soc = self.manifest.builds[0].soc_version if self.manifest.builds else ""
        if not soc:
            raise NotMeasured("the manifest lists no build, so no SoC to ask for")
        with tempfile.TemporaryDirectory() as scratch:
            answer = Path(scratch) / "check_result.json"
            result, output = self._atc(f"--soc_version={soc}", "--mode=3", f"--check_report={answer}")
            if not answer.is_file():
                raise NotMeasured(f"atc --mode=3 exits {result} and writes no report; its output is in the figures")
            keys = list(json.loads(answer.read_text(encoding="utf-8")))
        return f"exit {result}, report with {', '.join(map(str, keys))}", {"keys": keys, "output": output[-2000:]}

    def _atc(self, *options: str) -> tuple[int, str]:
        """Run atc on the smallest graph, in a scratch directory, since it litters."""
        atc = shutil.which("atc")
        if atc is None:
            raise NotMeasured("atc is not on PATH; source set_env.sh of CANN")
        graph = min(self.manifest.graphs.values(), key=lambda g: g.num_nodes)
        with tempfile.TemporaryDirectory() as scratch:
            model = f"--model={self.manifest.path(graph.file).resolve()}"
            command = [atc, "--framework=5", model, f"--output={scratch}/out", *options]
            result = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=600)
        return result.returncode, result.stdout

    # -- device

    def device(self) -> Answer:
        backend = open_backend("om", self.manifest, options=self.options, report=self.say)
        assert isinstance(backend, OmBackend)
        self.backend = backend
        device = backend.device
        free, total = device.acl.memory_info()
        figures = {"soc": device.soc, "cann": device.cann, "free_bytes": free, "total_bytes": total}
        return f"{device.soc}, CANN {device.cann}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free", figures

    def _open(self) -> OmBackend:
        if self.backend is None:
            raise NotMeasured("the device did not open")
        return self.backend

    def copy_2d(self) -> Answer:
        reason = prove_2d_copy(self._open().device)
        if reason:
            soc = self._open().device.soc
            if soc.startswith("Ascend310"):
                return f"none on {soc}, as documented; single rows are copied ({reason})", {"works": False}
            raise BackendError(f"2-D copies should work on {soc}: {reason}; single rows are copied instead")
        return "work: new rows are written by one copy", {"works": True}

    def stream_order(self) -> Answer:
        device, rounds = self._open().device, 200
        releases = Releases()
        try:
            stream = OmStream(device, releases)
            host = device.malloc_host(8 * rounds, releases)
            first, second = device.malloc(64, releases), device.malloc(64, releases)
            releases.add(stream.drain)
            values = np.arange(rounds, dtype=np.int32)
            host.data[: 4 * rounds].view(np.int32)[:] = values
            for i in range(rounds):  # each value goes through both buffers before the next one overwrites them
                stream.upload(first, host, 4, offset=4 * i)
                stream.copy(second, first, 4)
                stream.download(host, second, 4, offset=4 * (rounds + i))
            stream.synchronize()
            got = host.data[4 * rounds :].view(np.int32).copy()
        finally:
            releases.abandon()
        wrong = int((got != values).sum())
        if wrong:
            raise BackendError(f"{wrong} of {rounds} values overtook each other: copies of one stream are not in order")
        return f"{rounds} chains of three copies, all in order", {"rounds": rounds}

    # -- files

    def load(self) -> Answer:
        backend = self._open()
        figures: dict[str, Any] = {}
        releases = Releases()
        try:
            for name in DEVICE_GRAPHS:
                if not any(build.graph == name for build in self.manifest.builds):
                    continue
                for spec, path in backend.compiled(name):
                    figures[path.name] = self._load_one(spec, path, releases)
        finally:
            releases.abandon()
        total = sum(f["taken_bytes"] for f in figures.values())
        seconds = sum(f["seconds"] for f in figures.values())
        return f"{len(figures)} files in one context: {seconds:.2f} s, {total / 1e6:.1f} MB", figures

    def _load_one(self, spec: GraphSpec, path: Path, releases: Releases) -> dict[str, Any]:
        device = self._open().device
        before, _ = device.acl.memory_info()
        start = time.perf_counter()
        model = OmModel(device, spec, path, releases)
        seconds = time.perf_counter() - start
        after, _ = device.acl.memory_info()
        return {
            "seconds": round(seconds, 3),
            "predicted_bytes": model.device_bytes,
            "taken_bytes": before - after,
            "inputs_in_order": model.order("input"),
            "outputs_in_order": model.order("output"),
        }

    def interface(self) -> Answer:
        backend, names = self._open(), []
        for name in DEVICE_GRAPHS:
            if any(build.graph == name for build in self.manifest.builds):
                for spec, path in backend.compiled(name):
                    backend.open(spec, path).close()  # SpecMismatchError says what differs
                    names.append(path.name)
        return f"{len(names)} files agree with the manifest", {"files": names}

    def aliasing(self) -> Answer:
        raise NotMeasured("not relied on: the seen-table has two buffers, the cache takes copies of new rows")

    def graphs(self) -> Answer:
        backend, reference = self._open(), self._reference()
        differences: dict[str, dict[str, float]] = {}
        failed = []
        for name in DEVICE_GRAPHS:
            if not any(build.graph == name for build in self.manifest.builds):
                continue
            graph = self.manifest.graph(name)
            with reference.open(graph.spec, self.manifest.path(graph.file)) as expected:
                for spec, path in backend.compiled(name):
                    feeds = plausible_feeds(spec)
                    with backend.open(spec, path) as session:
                        found = session.run(feeds)
                    want = expected.run(feeds)
                    results = [compare_tensors(n, want[n], found[n], DEVICE_FLOAT32) for n in want]
                    differences[path.name] = {r.name: r.max_abs for r in results}
                    failed += [f"{path.name}: {r.name}: {r.reason}" for r in results if not r.passed]
        if failed:
            raise ParityError("; ".join(failed[:5]) + (f" and {len(failed) - 5} more" if len(failed) > 5 else ""))
        worst = max((d for by_name in differences.values() for d in by_name.values()), default=0.0)
        return f"{len(differences)} files, largest difference {worst:.2e}", differences

    def _reference(self) -> Any:
        try:
            return open_backend("ort", self.manifest, report=self.say)
        except BackendUnavailableError as error:
            raise NotMeasured(f"no reference: {error}") from error

    def repeat(self) -> Answer:
        backend, files = self._open(), 0
        for name in DEVICE_GRAPHS:
            if any(build.graph == name for build in self.manifest.builds):
                for spec, path in backend.compiled(name):
                    feeds = plausible_feeds(spec)
                    with backend.open(spec, path) as session:
                        runs = [session.run(feeds) for _ in range(3)]
                    files += 1
                    for other in runs[1:]:
                        for output, value in runs[0].items():
                            if value.tobytes() != other[output].tobytes():
                                raise BackendError(
                                    f"{path.name}: {output} differs between runs; was --deterministic on?"
                                )
        return f"{files} files, three runs each, the same bits", {"files": files}

    # -- frame loop

    def _frame_model(self) -> OmFrameModel:
        if self.model is None:
            self.model = open_om_frame_model(self.manifest, self._open())
        return self.model

    def _rows(self) -> Array:
        """A made-up prompt: any ids do, since the other side reads the same."""
        config, rng = self.manifest.model, np.random.default_rng(0)
        rows = np.full((PROMPT_ROWS, 1 + config.n_vq), config.audio_pad_id, np.int32)
        rows[:, 0] = rng.integers(10, config.vocab_size, PROMPT_ROWS)
        rows[-8:, 0] = config.audio_user_slot_id
        rows[-8:, 1:] = rng.integers(0, min(config.codebook_sizes), (8, config.n_vq))
        return rows

    def _frames(self, model: FrameModel, sampling: SamplingParams) -> list[Frame]:
        rng = np.random.default_rng(1)
        model.prefill(self._rows())
        n_vq = self.manifest.model.n_vq
        return [model.next_frame(draw_uniforms(rng, n_vq), sampling, keep_logits=True) for _ in range(NUM_FRAMES)]

    def codes(self) -> Answer:
        model = self._frame_model()
        host = HostFrameModel(self.manifest, self._reference())
        worst, counted = 0.0, 0
        try:
            for name, sampling in (("greedy", SamplingParams.greedy(1.2)), ("seeded", SamplingParams())):
                pairs = zip(self._frames(model, sampling), self._frames(host, sampling), strict=True)
                for index, (a, b) in enumerate(pairs):
                    if a.go_on != b.go_on or not np.array_equal(a.codes, b.codes):
                        raise ParityError(f"{name}: frame {index} differs: {a.codes.tolist()}, not {b.codes.tolist()}")
                    assert a.code_logits is not None and b.code_logits is not None  # keep_logits
                    worst = max(worst, float(np.abs(a.code_logits - b.code_logits).max()))
                    counted += a.codes.size
        finally:
            host.close()
        figures = {"codes": counted, "max_abs_code_logits": worst}
        return f"{counted} codes identical, greedy and seeded; logits differ by {worst:.2e} at most", figures

    def thread(self) -> Answer:
        model, sampling = self._frame_model(), SamplingParams()
        expected = [frame.codes.tolist() for frame in self._frames(model, sampling)]
        found: list[Any] = []

        def work() -> None:
            try:
                found.append([frame.codes.tolist() for frame in self._frames(model, sampling)])
            except MossError as error:
                found.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        if found != [expected]:
            raise BackendError(f"another thread got something else: {found[0] if found else 'nothing'}")
        return "the same codes from another thread", {}

    def traffic(self) -> Answer:
        self._frames(self._frame_model(), SamplingParams())
        self._frame_model().prefill(self._rows())
        uniforms = draw_uniforms(np.random.default_rng(2), self.manifest.model.n_vq)
        for _ in range(3):
            self._frame_model().next_frame(uniforms, SamplingParams())
        stats = self._frame_model().stats
        return f"{stats.frame}", {"lines": stats.lines()}

    def _run_frames(self, count: int) -> list[float]:
        """Seconds of each stepping frame; a new utterance starts when the cache is full."""
        model, rng, sampling = self._frame_model(), np.random.default_rng(3), SamplingParams()
        seconds: list[float] = []
        left = 0
        while len(seconds) < count:
            if left == 0:
                model.prefill(self._rows())
                model.next_frame(draw_uniforms(rng, self.manifest.model.n_vq), sampling)
                left = model.capacity - PROMPT_ROWS
            start = time.perf_counter()
            model.next_frame(draw_uniforms(rng, self.manifest.model.n_vq), sampling)
            seconds.append(time.perf_counter() - start)
            left -= 1
        return seconds

    def memory(self) -> Answer:
        acl = self._open().device.acl
        self._run_frames(10)
        before, _ = acl.memory_info()
        self._run_frames(3 * TIMED_FRAMES)
        after, _ = acl.memory_info()
        if after < before:
            raise BackendError(f"{before - after:,} bytes of device memory are gone after {3 * TIMED_FRAMES} frames")
        return f"unchanged after {3 * TIMED_FRAMES} frames", {"free_bytes": after}

    def speed(self) -> Answer:
        if self._open().device.acl.simulated:
            raise NotMeasured("simulated: times say nothing about a device")
        self._run_frames(10)
        seconds = np.array(self._run_frames(TIMED_FRAMES))
        median, p95 = float(np.median(seconds)), float(np.percentile(seconds, 95))
        figures = {"median_ms": 1e3 * median, "p95_ms": 1e3 * p95, "frames_per_second": 1 / median}
        if 1 / median < REAL_TIME_FRAMES_PER_SECOND:
            raise BackendError(f"{1 / median:.1f} frames/s is slower than real time ({REAL_TIME_FRAMES_PER_SECOND})")
        return f"{1 / median:.1f} frames/s, median {1e3 * median:.2f} ms, p95 {1e3 * p95:.2f} ms", figures


def plausible_feeds(spec: GraphSpec) -> dict[str, Array]:
    """Seeded feeds of a bound graph: positions that grow, small ids, half of the cache masked."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for tensor in spec.inputs:
        shape = tensor.bound_shape
        value: Any
        if tensor.name.startswith(("positions", "past_positions")):
            value = np.broadcast_to(np.arange(shape[-1]), shape)
            value = value + 2**10 if tensor.name == "positions" and spec.name == "codec_stream" else value
        elif tensor.name in _FIXED_FEEDS:
            value = np.broadcast_to(np.asarray(_FIXED_FEEDS[tensor.name]), shape)
        elif tensor.name == "cache_mask":
            value = np.where(np.arange(shape[-1]) < max(shape[-1] // 2, 1), 0.0, MASKED) + np.zeros(shape)
        elif tensor.name == "position":
            cache = next(t.bound_shape[-1] for t in spec.inputs if t.name == "cache_mask")
            value = np.full(shape, max(cache // 2, 1))
        elif tensor.name == "seen":
            value = (rng.random(shape) < 0.1).astype(np.float32)
        elif tensor.dtype == "int32":
            value = rng.integers(0, 8, shape)
        else:
            value = 0.5 * rng.standard_normal(shape) if tensor.name != "uniforms" else rng.random(shape)
        feeds[tensor.name] = np.ascontiguousarray(value, dtype=tensor.dtype)
    if spec.name == "prefill":
        feeds["last"] = np.full(feeds["last"].shape, feeds["rows"].shape[1] - 1, np.int32)
    return feeds


_FIXED_FEEDS = {name: value[0] for name, value in SamplingParams().feeds().items()}


def _our_command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of another package, in a process of its own: runtime imports nothing above it."""
    code = f"from {module} import cli; cli()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = (result.stdout + result.stderr).strip().splitlines()
    return lines[-1] if lines else "no output"
