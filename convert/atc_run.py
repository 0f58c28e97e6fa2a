"""Run the ATC jobs of a plan: one process each, in a scratch directory, its whole output kept, the manifest saved
after every .om. An interrupted run therefore loses only what was being compiled; the next one goes on after it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from convert.atc_explain import FAILURE_LINE, SUCCESS_LINE, AtcRun, Context, Explanation, explain, parse_messages
from convert.atc_plan import AtcJob, AtcPlan, Compiler, graph_source
from convert.cann import Host, is_fake_atc, locate, sourced_environment
from op_patches.readiness.loader import load_structure
from op_patches.targets import Target
from runtime.backends.fake_om import is_fake_om
from runtime.errors import AtcError, ManifestError
from runtime.manifest import Manifest, OmBuild, sha256_of, write_atomically

Progress = Callable[[str], None]
RECORD_SUFFIX = ".om.json"  # what the bash script leaves beside each .om; `adopt_builds` takes it into the manifest
_PLOG_LIMIT = 1 << 20
_HEARTBEAT_S = 15.0


@dataclass(frozen=True, slots=True)
class AtcEnvironment:
    """The ATC to run and the environment to run it in."""

    compiler: Compiler
    environ: Mapping[str, str]
    versions: dict[str, str]
    note: str = ""


@dataclass(frozen=True, slots=True)
class JobResult:
    """One finished job: a build, or an explanation of the failure."""

    job: AtcJob
    seconds: float
    build: OmBuild | None
    explanation: Explanation | None

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "name": self.job.name,
            "seconds": round(self.seconds, 3),
            "build": self.build.to_dict() if self.build else None,
            "failure": dataclasses.asdict(self.explanation) if self.explanation else None,
        }


def find_atc(host: Host | None = None) -> AtcEnvironment | None:
    """The ATC on PATH, or the one of an installation whose set_env.sh was not sourced; None without CANN."""
    host = host or Host()
    installation = locate(host)
    environ, note = dict(host.environ), ""
    if host.which("atc") is None:
        if installation is None or installation.set_env is None:
            return None
        environ = sourced_environment(host, installation.set_env)
        note = f"atc is not on PATH; {installation.set_env} was sourced for this run"
    atc = Host(host.root, environ).which("atc")
    if atc is None:
        return None
    cann = (installation.version if installation else None) or "unknown"
    versions = {
        "cann": cann,
        "atc": str(atc.resolve()),
        "host": f"{platform.system()} {platform.machine()}",
        "moss-tts-nano-ascend": metadata.version("moss-tts-nano-ascend"),
    }
    return AtcEnvironment(Compiler(cann, is_fake_atc(atc)), environ, versions, note)


def require_atc(host: Host | None = None) -> AtcEnvironment:
    """`find_atc`, or AtcError that says how to go on without CANN."""
    found = find_atc(host)
    if found is None:
        raise AtcError(
            "atc is not on PATH and no CANN installation was found. On a machine with CANN: source its set_env.sh. "
            "Without one: --dry-run shows the plan, --script build_om.sh writes it as a script for such a machine"
        )
    return found


def run_plan(
    plan: AtcPlan,
    manifest: Manifest,
    environment: AtcEnvironment,
    progress: Progress,
    jobs: int = 1,
    timeout_s: float = 3600.0,
) -> list[JobResult]:
    """Compile what the plan says; the manifest is saved after each .om. Failures are results, not exceptions.

    A failure of the environment ends the run: every other graph would fail in the same way.
    """
    environ = dict(environment.environ)
    if jobs > 1:  # ATC starts 8 compiler processes of its own
        environ.setdefault("TE_PARALLEL_COMPILER", str(max(1, 8 // jobs)))
    results: list[JobResult] = []
    control = _Control()
    with _locked(plan.directory), ThreadPoolExecutor(max_workers=jobs) as pool:
        try:
            futures: list[Future[JobResult]] = [
                pool.submit(_compile, job, plan, environ, environment.versions, timeout_s, progress, control)
                for job in plan.to_compile
            ]
            for future in as_completed(futures):
                try:
                    result = future.result()
                except CancelledError:
                    continue
                results.append(result)
                if result.build is not None:
                    manifest = manifest.with_build(result.build)
                    manifest.save()
        finally:
            control.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    order = {job.name: index for index, job in enumerate(plan.jobs)}
    return sorted(results, key=lambda r: order[r.job.name])


def explain_log(manifest: Manifest, target: Target, log: Path) -> Explanation:
    """Explain a log that another machine made; the graph follows from its name, <graph>-<axes>.atc.log."""
    try:
        output = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise AtcError(f"{log} is not readable ({error.strerror})") from error
    if SUCCESS_LINE in output:
        raise AtcError(f"{log} ends with ATC's success line; there is nothing to explain")
    graph = log.name.split("-", 1)[0]
    source = graph_source(manifest, graph, target)
    ended = FAILURE_LINE in output or parse_messages(output)
    run = AtcRun(255 if ended else 137, 0.0, output, 0, plog=_read_plog(log.with_suffix(".plog")))
    onnx = str(manifest.path(source.file))
    return explain(run, Context(str(manifest.directory), str(target), graph, onnx, str(log), source.nodes))


def adopt_builds(manifest: Manifest) -> list[OmBuild]:
    """Take the .om files that the bash script built into the manifest; those that do not fit are an error."""
    adopted: list[OmBuild] = []
    for path in sorted(manifest.directory.glob(f"om/*/*{RECORD_SUFFIX}")):
        try:
            build = OmBuild.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ManifestError(f"{path} is no record of a build ({error}); run the script again") from error
        exported = manifest.graph(build.graph)
        patched = [p for p in manifest.patched if p.graph == build.graph]
        known = {exported.file: exported.sha256} | {p.file: p.sha256 for p in patched} | manifest.data_files
        stale = [
            file for file, sha256 in build.inputs.items() if not file.startswith("--") and known.get(file) != sha256
        ]
        if stale:
            raise ManifestError(f"{path}: made from another {', '.join(stale)}; write the script again and rerun it")
        build = dataclasses.replace(build, fake=is_fake_om(manifest.check_build(build)))
        if build not in manifest.builds:
            manifest = manifest.with_build(build)
            adopted.append(build)
    if adopted:
        manifest.save()
    return adopted


@dataclass(frozen=True, slots=True)
class _Control:
    """What the workers look at."""

    stop: threading.Event = field(default_factory=threading.Event)  # end what is running
    start_no_more: threading.Event = field(default_factory=threading.Event)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def next_number(self) -> int:
        return next(self.numbers)


def _compile(
    job: AtcJob,
    plan: AtcPlan,
    environ: Mapping[str, str],
    versions: dict[str, str],
    timeout_s: float,
    progress: Progress,
    control: _Control,
) -> JobResult:
    """Run ATC for one job and judge what it left."""
    if control.stop.is_set() or control.start_no_more.is_set():
        raise CancelledError
    shutil.rmtree(job.scratch, ignore_errors=True)  # what an interrupted run left
    plog = job.scratch / "plog"
    plog.mkdir(parents=True)
    for file in job.files:
        write_atomically(file.path, file.content)
    label = f"[{control.next_number()}/{len(plan.to_compile)}] {job.name}"
    progress(f"{label}: compiling, output in {job.log}")
    run = _run(
        job,
        {**environ, "ASCEND_PROCESS_LOG_PATH": str(plog)},
        timeout_s,
        lambda line: progress(f"{label}: {line}"),
        control.stop,
    )
    if run.exit_code is None and not run.timed_out:
        raise CancelledError  # the user stopped the run
    files = sorted(path for path in job.scratch.glob(f"{job.name}*.om") if path.stat().st_size)
    run = AtcRun(run.exit_code, run.seconds, run.output, len(files), run.timed_out, _read_plog(plog))
    if not run.succeeded:
        _keep_plog(plog, job.log.with_suffix(".plog"))
        shutil.rmtree(job.scratch, ignore_errors=True)
        progress(f"{label}: FAILED after {run.seconds:.0f} s")
        explanation = explain(run, _context(job, plan))
        if explanation.stops_all:
            control.start_no_more.set()
        return JobResult(job, run.seconds, None, explanation)
    os.replace(files[0], job.output)  # noqa: PTH105
    shutil.rmtree(job.scratch, ignore_errors=True)
    shutil.rmtree(job.log.with_suffix(".plog"), ignore_errors=True)  # of an earlier failure
    build = OmBuild(
        graph=job.graph,
        axes=job.axes,
        soc_version=plan.target.soc,
        cann=plan.target.cann,
        precision=plan.target.precision,
        file=str(job.output.relative_to(plan.directory)),
        sha256=sha256_of(job.output),
        num_bytes=job.output.stat().st_size,
        argv=job.argv,
        inputs=job.inputs,
        recipe=job.recipe,
        versions=versions,
        log=str(job.log.relative_to(plan.directory)),
        seconds=round(run.seconds, 3),
        fake=is_fake_om(job.output),
    )
    progress(f"{label}: done in {run.seconds:.0f} s")
    return JobResult(job, run.seconds, build, None)


def _run(
    job: AtcJob, environ: Mapping[str, str], timeout_s: float, progress: Progress, stop: threading.Event
) -> AtcRun:
    """Start ATC in its own process group and wait; its output goes to the log as it comes."""
    start = time.monotonic()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("wb") as log:
        try:
            process = subprocess.Popen(
                job.argv,
                cwd=job.scratch,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            log.write(f"{job.argv[0]}: {error}\n".encode())
            return AtcRun(127, 0.0, str(error), 0)
        exit_code, timed_out = _wait(process, start, timeout_s, progress, stop)
    output = job.log.read_text(encoding="utf-8", errors="replace")
    return AtcRun(exit_code, time.monotonic() - start, output, 0, timed_out)


def _wait(
    process: subprocess.Popen[bytes],
    start: float,
    timeout_s: float,
    progress: Progress,
    stop: threading.Event,
) -> tuple[int | None, bool]:
    """Exit status (None when stopped) and whether time ran out; a sign of life now and then."""
    next_sign = start + _HEARTBEAT_S
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.1), False
        now = time.monotonic()
        if stop.is_set() or now - start > timeout_s:
            _end_group(process)
            return None, not stop.is_set()
        if now >= next_sign:
            progress(f"compiling for {now - start:.0f} s")
            next_sign = now + _HEARTBEAT_S


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End ATC and the compiler processes that it started."""
    for sign, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)
            if sign == signal.SIGKILL:
                return
    process.wait()


def _context(job: AtcJob, plan: AtcPlan) -> Context:
    path = plan.directory / job.source
    nodes = {node.name: node.op_type for node in load_structure(path).graph.node}
    return Context(str(plan.directory), str(plan.target), job.graph, str(path), str(job.log), nodes)


def _read_plog(directory: Path) -> str:
    files = sorted(directory.rglob("*.log"))
    return "\n".join(file.read_bytes()[-_PLOG_LIMIT:].decode("utf-8", "replace") for file in files)


def _keep_plog(directory: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    if any(path.is_file() for path in directory.rglob("*")):
        shutil.copytree(directory, place)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One build at a time per artifacts directory; the lock goes with the process, however that ends."""
    lock = directory / "om" / ".lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    file: IO[str]
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AtcError(f"{directory}: another build is running here; wait for it or stop it") from error
        yield
