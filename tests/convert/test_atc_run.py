"""Running ATC: a real process that behaves as documented, every way it can end, and what the manifest then says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from convert.atc import Buckets
from convert.atc_plan import AtcPlan, plan_atc
from convert.atc_run import AtcEnvironment, JobResult, find_atc, require_atc, run_plan
from convert.cann import Host
from op_patches.targets import Target
from runtime.backends.fake_om import read_fake_om
from runtime.errors import AtcError
from runtime.manifest import Manifest, sha256_of
from tests.fake_cann.artifacts import make_artifacts
from tests.fake_cann.tree import make_tree

TARGET = Target(soc="Ascend910B3")
BUCKETS = Buckets(capacity=32, prefill=(8,), stream_frames=(1,))


@pytest.fixture(scope="module")
def cann(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def environment(cann: Path, tmp_path: Path) -> Callable[..., AtcEnvironment]:
    def make(**variables: str) -> AtcEnvironment:
        path = f"{cann}/bin:{os.environ['PATH']}"
        environ = {"PATH": path, "ASCEND_HOME_PATH": str(cann), "HOME": str(tmp_path), **variables}
        return require_atc(Host(tmp_path, environ))

    return make


def run(
    manifest: Manifest, environment: AtcEnvironment, *graphs: str, timeout_s: float = 60, jobs: int = 1
) -> tuple[AtcPlan, list[JobResult], list[str]]:
    plan = plan_atc(manifest, TARGET, BUCKETS, graphs, compiler=environment.compiler)
    lines: list[str] = []
    return plan, run_plan(plan, manifest, environment, lines.append, jobs, timeout_s), lines


def test_a_build_is_in_its_place_recorded_and_skipped_the_next_time(
    tmp_path: Path, environment: Callable[..., AtcEnvironment]
) -> None:
    manifest = make_artifacts(tmp_path / "artifacts")
    plan, results, lines = run(manifest, environment(), jobs=2)
    assert [r.explanation for r in results] == [None] * 3
    after = Manifest.load(manifest.directory)
    assert [b.graph for b in after.builds] != []
    build = after.builds_of("step", "Ascend910B3", "origin")[0]
    om = read_fake_om(after.check_build(build))
    assert (build.axes, build.versions["cann"], build.fake) == ({"B": 1, "C": 32}, "8.5.0", True)
    assert build.argv == plan.jobs[1].argv
    assert [t.shape for t in om.inputs] == [(1, 1, 8), (1, 32, 8)]
    assert [(t.name, t.shape) for t in om.outputs] == [("step/layer_00/mlp/double:0:hidden", (1, 32, 8))]
    assert (om.soc_version, om.precision, om.options["deterministic"]) == ("Ascend910B3", "origin", "1")
    assert "ATC run success" in after.path(build.log).read_text()
    assert not any((tmp_path / "artifacts/om").rglob("kernel_meta"))
    assert any("step-B1-C32: done" in line for line in lines)
    again = plan_atc(after, TARGET, BUCKETS, compiler=environment().compiler)
    assert {job.state for job in again.jobs} == {"unchanged"}


@pytest.mark.parametrize(
    ("ending", "phase", "code", "words"),
    [
        ("killed", "compiling operators", None, "killed before it gave a verdict"),
        ("crash", "inside ATC", None, "died of a signal"),
        ("no_verdict", "inside ATC", None, "without its success line"),
        ("no_success_line", "inside ATC", None, "without its success line"),
        ("exit1_after_success", "inside ATC", None, "failed with status 255 but left a file, which is not used"),
        ("exit0_no_file", "writing the .om", None, "there is no .om"),
        ("exit0_empty_file", "writing the .om", None, "there is no .om"),
        ("two_files", "writing the .om", None, "2 .om files"),
        ("exit1_with_file", "inside ATC", "E19999", "the file that ATC left is not used"),
        ("no_message", "inside ATC", "E19999", "an inner error"),
        ("inner", "inside ATC", "EZ9999", "an inner error"),
        ("E20001", "compiling operators", "E20001", "failed to compile"),
        ("E12345", "inside ATC", "E12345", "not in our table"),
    ],
)
def test_every_way_to_fail_is_explained_and_leaves_no_om(
    tmp_path: Path, environment: Callable[..., AtcEnvironment], ending: str, phase: str, code: str | None, words: str
) -> None:
    manifest = make_artifacts(tmp_path / "artifacts")
    _, (result,), _ = run(manifest, environment(FAKE_ATC_FAIL=f"step*={ending}"), "step")
    explanation = result.explanation
    assert explanation is not None
    assert (explanation.graph, explanation.phase, explanation.code) == ("step", phase, code), explanation
    assert words in explanation.meaning
    assert not list((tmp_path / "artifacts/om").rglob("*.om"))
    assert Path(explanation.log).read_text().startswith("ATC start working now")
    assert Manifest.load(manifest.directory).builds == ()


def test_an_operator_failure_names_the_onnx_node_and_its_module(
    tmp_path: Path, environment: Callable[..., AtcEnvironment]
) -> None:
    _, (result,), _ = run(make_artifacts(tmp_path / "a"), environment(FAKE_ATC_FAIL="*=EZ3002"), "prefill")
    explanation = result.explanation
    assert explanation is not None
    assert (explanation.node, explanation.op_type) == ("prefill/layer_00/mlp/tanh", "Tanh")
    assert explanation.module == "prefill/layer_00/mlp"
    assert explanation.reason == "asked for by the test."
    assert "convert-moss check" in explanation.next_command


def test_the_op_compilers_python_error_is_found_in_the_plog_and_kept(
    tmp_path: Path, environment: Callable[..., AtcEnvironment]
) -> None:
    _, results, _ = run(make_artifacts(tmp_path / "a"), environment(FAKE_ATC_FAIL="*=numpy2"))
    assert len(results) == 1, "a failure of the environment ends the run"
    explanation = results[0].explanation
    assert explanation is not None and explanation.stops_all
    assert explanation.code == "E20001"
    assert "NumPy 2" in explanation.meaning
    assert explanation.next_command == "python3 -m pip install 'numpy<2'"
    assert list(Path(explanation.log).with_suffix(".plog").rglob("plog-*.log"))


def test_a_missing_python_package_is_named(tmp_path: Path, environment: Callable[..., AtcEnvironment]) -> None:
    _, results, _ = run(make_artifacts(tmp_path / "a"), environment(FAKE_ATC_FAIL="*=missing_module"), "step")
    assert results[0].explanation is not None
    assert "package decorator" in results[0].explanation.meaning


def test_a_hang_is_stopped_after_the_timeout(tmp_path: Path, environment: Callable[..., AtcEnvironment]) -> None:
    manifest = make_artifacts(tmp_path / "a")
    start = time.monotonic()
    _, results, _ = run(manifest, environment(FAKE_ATC_FAIL="step*=hang"), "step", timeout_s=2)
    assert time.monotonic() - start < 20
    assert results[0].explanation is not None
    assert "did not end within 2 s" in results[0].explanation.meaning


def test_an_om_with_a_platform_suffix_is_found_and_renamed(
    tmp_path: Path, environment: Callable[..., AtcEnvironment]
) -> None:
    manifest = make_artifacts(tmp_path / "a")
    _, (result,), _ = run(manifest, environment(FAKE_ATC_FAIL="*=suffix"), "step")
    assert result.build is not None
    assert result.build.file == "om/Ascend910B3-origin/step-B1-C32.om"
    assert sha256_of(manifest.directory / result.build.file) == result.build.sha256


def test_one_failure_does_not_lose_the_other_graphs_and_the_next_run_goes_on(
    tmp_path: Path, environment: Callable[..., AtcEnvironment]
) -> None:
    manifest = make_artifacts(tmp_path / "a")
    _, results, _ = run(manifest, environment(FAKE_ATC_FAIL="step*=E20001"))
    assert [r.build is not None for r in results] == [True, False, True]
    after = Manifest.load(manifest.directory)
    plan = plan_atc(after, TARGET, BUCKETS, compiler=environment().compiler)
    assert [job.name for job in plan.to_compile] == ["step-B1-C32"]


def test_a_run_that_is_interrupted_keeps_what_it_made(tmp_path: Path, cann: Path) -> None:
    manifest = make_artifacts(tmp_path / "a")
    script = f"""
import signal, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script inherit an ignored SIGINT
from pathlib import Path
from tests.convert import test_atc_run as t
from convert.atc_run import require_atc
from runtime.manifest import Manifest
t.run(Manifest.load(Path({str(manifest.directory)!r})), require_atc())
"""
    environ = {"PATH": f"{cann}/bin:{os.environ['PATH']}", "ASCEND_HOME_PATH": str(cann), "HOME": str(tmp_path),
               "FAKE_ATC_FAIL": "step*=hang"}  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", script], env=environ)
    deadline = time.monotonic() + 60
    while not Manifest.load(manifest.directory).builds and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(2)
    process.wait(timeout=30)
    after = Manifest.load(manifest.directory)
    assert [b.graph for b in after.builds] == ["prefill"]
    assert [j.name for j in plan_atc(after, TARGET, BUCKETS).to_compile] == ["step-B1-C32", "codec_stream-B1-F1"]


def test_two_builds_of_the_same_artifacts_are_refused(
    tmp_path: Path, environment: Callable[..., AtcEnvironment]
) -> None:
    manifest = make_artifacts(tmp_path / "a")
    slow = environment(FAKE_ATC_SECONDS="2")
    thread = threading.Thread(target=run, args=(manifest, slow, "step"))
    thread.start()
    deadline = time.monotonic() + 10
    while not (manifest.directory / "om/.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    with pytest.raises(AtcError, match="another build is running"):
        run(manifest, slow, "step")
    thread.join()


def test_set_env_is_sourced_when_atc_is_not_on_path(tmp_path: Path) -> None:
    make_tree(tmp_path, version="8.1.RC1", layout="ascend-toolkit")
    found = find_atc(Host(tmp_path, {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}))
    assert found is not None
    assert found.compiler.cann == "8.1.RC1"
    assert "was sourced for this run" in found.note
    assert found.environ["ASCEND_OPP_PATH"].endswith("ascend-toolkit/latest/opp")


def test_without_cann_the_error_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(AtcError, match="--script"):
        require_atc(Host(tmp_path, {"PATH": str(tmp_path), "HOME": str(tmp_path)}))
