"""The bash script that builds on a machine without Python packages: run for real, against the fake atc."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from convert.atc import Buckets
from convert.atc_keep import KeepList
from convert.atc_plan import plan_atc
from convert.atc_run import adopt_builds
from convert.atc_script import write_script
from op_patches.targets import Target
from runtime.backends.fake_om import is_fake_om, read_fake_om
from runtime.errors import AtcError, ManifestError
from runtime.manifest import Manifest
from tests.fake_cann.artifacts import make_artifacts
from tests.fake_cann.tree import make_tree

TARGET = Target(soc="Ascend910B3")
BUCKETS = Buckets(capacity=32, prefill=(8,), stream_frames=(1,))


@pytest.fixture(scope="module")
def cann(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("machine"))


def scripted(
    directory: Path, target: Target = TARGET, keep: KeepList | None = None, graphs: tuple[str, ...] = ()
) -> Path:
    """Artifacts with a script beside them, moved to another place as if copied to another machine."""
    manifest = make_artifacts(directory / "host/artifacts")
    script = directory / "host/build_om.sh"
    write_script(plan_atc(manifest, target, BUCKETS, graphs, keep), script)
    shutil.move(directory / "host", directory / "box")
    return directory / "box/build_om.sh"


def run(script: Path, cann: Path | None, **variables: str) -> subprocess.CompletedProcess[str]:
    # Only what the machine is said to have: bash, coreutils, atc.
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(script.parent), **variables}
    if cann is not None:
        environ |= {
            "PATH": f"{cann}/bin:/usr/bin:/bin",
            "ASCEND_HOME_PATH": str(cann),
            "ASCEND_OPP_PATH": f"{cann}/opp",
        }
    return subprocess.run(["bash", script], env=environ, capture_output=True, text=True, check=False, timeout=120)


def test_the_script_passes_shellcheck(tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; it is in the dev extra")
    keep = KeepList(("step/layer_00/mlp/tanh",), ("MatMul",))
    script = scripted(tmp_path, dataclasses.replace(TARGET, precision="mixed_float16"), keep)
    done = subprocess.run([shellcheck, "-s", "bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_script_builds_everything_and_the_manifest_takes_it(tmp_path: Path, cann: Path) -> None:
    script = scripted(tmp_path)
    done = run(script, cann)
    assert done.returncode == 0, done.stderr
    assert "compiled 3, unchanged 0, failed 0 of 3 for Ascend910B3 with CANN 8.5.0" in done.stdout
    directory = script.parent / "artifacts"
    builds = adopt_builds(Manifest.load(directory))
    assert [b.graph for b in builds] == ["codec_stream", "prefill", "step"]
    manifest = Manifest.load(directory)
    plan = plan_atc(manifest, TARGET, BUCKETS)
    assert {job.state for job in plan.jobs} == {"unchanged"}
    step = manifest.builds_of("step")[0]
    assert step.fake and step.versions["cann"] == "8.5.0"
    assert f"--model={directory}/step.onnx" in step.argv
    assert is_fake_om(manifest.check_build(step))
    assert adopt_builds(manifest) == []
    assert {p.name for p in (directory / "om/Ascend910B3-origin").iterdir()} == {
        "op_precision.ini",
        *(f"{name}{end}" for name in ("prefill-B1-T8", "step-B1-C32", "codec_stream-B1-F1")
          for end in (".om", ".om.json", ".atc.log")),
    }  # fmt: skip


def test_a_keep_list_travels_inside_the_script(tmp_path: Path, cann: Path) -> None:
    keep = KeepList(("step/layer_00/mlp/tanh",), ("MatMul",))
    script = scripted(tmp_path, dataclasses.replace(TARGET, precision="mixed_float16"), keep, ("step",))
    assert run(script, cann).returncode == 0
    om = read_fake_om(script.parent / "artifacts/om/Ascend910B3-mixed_float16/step-B1-C32.om")
    assert om.keep_dtype == ("step/layer_00/mlp/tanh",)
    assert om.modify_mixlist["black-list"]["to-add"] == ["BatchMatMulV2"]


def test_after_a_failure_the_next_run_compiles_only_what_is_missing(tmp_path: Path, cann: Path) -> None:
    script = scripted(tmp_path)
    first = run(script, cann, FAKE_ATC_FAIL="step*=E20001", FAKE_ATC_LAYOUT="9")
    assert first.returncode == 1
    assert "compiled 2, unchanged 0, failed 1 of 3" in first.stdout
    assert "FAILED  step-B1-C32" in first.stdout
    assert "Invalid_Argument(E20001): Failed to compile Op [step/layer_00/mlp/tanh]" in first.stderr
    assert not list(script.parent.rglob("step*.om"))
    second = run(script, cann)
    assert second.returncode == 0
    assert "compiled 1, unchanged 2, failed 0 of 3" in second.stdout
    (script.parent / "artifacts/om/Ascend910B3-origin/step-B1-C32.om").write_bytes(b"damaged")
    assert "compiled 1, unchanged 2, failed 0 of 3" in run(script, cann).stdout


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("killed", "lack of memory"),
        ("exit0_no_file", "status 0, 0 .om files"),
        ("exit0_empty_file", "status 0, 0 .om files"),
        ("exit1_with_file", "status 255, 1 .om files"),
        ("exit1_after_success", "status 255, 1 .om files"),
        ("no_success_line", "status 0, 1 .om files"),
        ("no_verdict", "status 0, 0 .om files"),
        ("two_files", "status 0, 2 .om files"),
        ("inner", "EZ9999"),
    ],
)
def test_the_script_believes_no_single_sign_of_success(tmp_path: Path, cann: Path, ending: str, words: str) -> None:
    script = scripted(tmp_path, graphs=("step",))
    done = run(script, cann, FAKE_ATC_FAIL=f"*={ending}")
    assert done.returncode == 1
    assert words in done.stderr
    assert "compiled 0, unchanged 0, failed 1 of 1" in done.stdout
    assert not list(script.parent.rglob("*.om"))


def test_a_suffix_is_found_and_a_hang_is_stopped(tmp_path: Path, cann: Path) -> None:
    script = scripted(tmp_path, graphs=("step", "prefill"))
    done = run(script, cann, FAKE_ATC_FAIL="step*=hang;*=suffix", TIMEOUT_S="3")
    assert "compiled 1, unchanged 0, failed 1 of 2" in done.stdout
    assert "did not end within 3 s" in done.stderr


def test_changed_inputs_and_a_missing_environment_are_refused(tmp_path: Path, cann: Path) -> None:
    script = scripted(tmp_path)
    assert "atc is not on PATH" in run(script, None).stderr
    bare = make_tree(tmp_path / "bare", ops=())
    assert "no ops package for Ascend910B3" in run(script, bare).stderr
    with (script.parent / "artifacts/step.onnx").open("ab") as file:
        file.write(b" ")
    done = run(script, cann)
    assert done.returncode == 1
    assert "step.onnx is not the file that this script was written for" in done.stderr


def test_a_directory_that_atc_would_refuse_is_refused_before_anything_runs(tmp_path: Path, cann: Path) -> None:
    script = scripted(tmp_path, graphs=("step",))
    moved = shutil.move(script.parent, tmp_path / "a box")
    done = run(Path(moved) / "build_om.sh", cann)
    assert "move the directory" in done.stderr
    chinese = Path(shutil.move(moved, tmp_path / "模型"))
    assert run(chinese / "build_om.sh", cann).returncode == 0


def test_records_that_do_not_fit_the_manifest_are_not_adopted(tmp_path: Path, cann: Path) -> None:
    script = scripted(tmp_path, graphs=("step",))
    run(script, cann)
    directory = script.parent / "artifacts"
    record = directory / "om/Ascend910B3-origin/step-B1-C32.om.json"
    data = json.loads(record.read_text())
    record.write_text(json.dumps({**data, "inputs": {**data["inputs"], "step.onnx": "0" * 64}}))
    with pytest.raises(ManifestError, match=r"made from another step\.onnx"):
        adopt_builds(Manifest.load(directory))
    record.write_text("{")
    with pytest.raises(ManifestError, match="no record of a build"):
        adopt_builds(Manifest.load(directory))


def test_a_plan_with_nothing_to_compile_makes_no_script(tmp_path: Path) -> None:
    manifest = make_artifacts(tmp_path / "a")
    plan = plan_atc(manifest, TARGET, BUCKETS, refusal=lambda *_: "no")
    with pytest.raises(AtcError, match="nothing to compile"):
        write_script(plan, tmp_path / "x.sh")
