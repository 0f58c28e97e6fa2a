"""convert-moss atc from the outside: what is printed where, exit codes, and the round trip through JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from convert.cli import cli
from tests.fake_cann.artifacts import make_artifacts
from tests.fake_cann.tree import make_tree

SIZES = ("--capacity", "32", "--prefill", "8", "--stream-frames", "1")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifacts(tmp_path / "artifacts").directory


@pytest.fixture
def no_cann(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("convert.cann._SYSTEM_HOMES", ())  # also on a machine that has CANN
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def cann(no_cann: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    home = make_tree(tmp_path / "machine")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    return home


def atc(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["atc", *map(str, arguments)], catch_exceptions=False)


def test_a_dry_run_prints_the_plan_and_needs_no_cann(directory: Path, no_cann: None) -> None:
    done = atc(directory, *SIZES, "--dry-run")
    assert done.exit_code == 0
    assert "3 compile" in done.stdout
    assert "device memory while the graph runs, ESTIMATED (not measured)" in done.stdout
    assert f"makes    {directory}/om/Ascend910B4-origin/step-B1-C32.om" in done.stdout
    assert "'--input_shape=row:1,1,8;past_key_0:1,32,8'" in done.stdout
    assert not (directory / "om").exists()


def test_a_dry_run_speaks_json(directory: Path, no_cann: None) -> None:
    data = json.loads(atc(directory, *SIZES, "--dry-run", "--json", "--graphs", "step").stdout)
    (job,) = data["jobs"]
    assert (job["graph"], job["axes"], job["state"]) == ("step", {"B": 1, "C": 32}, "compile")
    assert job["memory_estimate"]["cache_bytes"] == 32 * 8 * 4
    assert job["argv"][0] == "atc"


def test_without_cann_a_run_says_what_works_instead(directory: Path, no_cann: None) -> None:
    done = atc(directory, *SIZES)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: atc is not on PATH")
    assert "--script" in done.stderr


def test_a_run_compiles_and_says_that_the_files_are_fake(directory: Path, cann: Path) -> None:
    done = atc(directory, *SIZES, "--jobs", "2")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("FAKE: made by the fake atc") == 3
    assert "[3/3]" in done.stderr and "compiling, output in" in done.stderr
    again = atc(directory, *SIZES, "--json")
    assert {job["state"] for job in json.loads(again.stdout)["jobs"]} == {"unchanged"}


def test_a_failure_is_explained_and_the_exit_code_is_1(
    directory: Path, cann: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ATC_FAIL", "step*=EZ3002")
    done = atc(directory, *SIZES, "--graphs", "step", "--json")
    assert done.exit_code == 1
    failure = json.loads(done.stdout)["results"][0]["failure"]
    assert (failure["code"], failure["node"]) == ("EZ3002", "step/layer_00/mlp/tanh")
    assert "step: ATC failed (choosing kernels)" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("error: 1 of 1 not compiled: step-B1-C32")
    log = directory / "om/Ascend910B4-origin/step-B1-C32.atc.log"
    explained = atc(directory, "--explain", log)
    assert explained.exit_code == 0
    assert "node    step/layer_00/mlp/tanh (Tanh)" in explained.stdout


def test_a_killed_run_is_recognised_in_its_log(directory: Path, no_cann: None, tmp_path: Path) -> None:
    log = tmp_path / "step-B1-C32.atc.log"
    log.write_text("ATC start working now, please wait for a moment.\n")
    assert "ran out of memory" in atc(directory, "--explain", log).stdout
    log.write_text("ATC run success, welcome to the next use.\n")
    assert "nothing to explain" in atc(directory, "--explain", log).stderr
    assert "is not readable" in atc(directory, "--explain", tmp_path / "none.log").stderr


def test_a_script_is_written_and_its_builds_are_adopted(directory: Path, no_cann: None, tmp_path: Path) -> None:
    script = tmp_path / "build_om.sh"
    done = atc(directory, *SIZES, "--script", script)
    assert done.exit_code == 0
    assert os.access(script, os.X_OK)
    assert "compiles 3 graphs" in done.stderr
    adopted = atc(directory, "--adopt")
    assert (adopted.exit_code, adopted.stdout) == (0, "")
    assert "no new .om file" in adopted.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("--dry-run", "--adopt"), 2, "exclude each other"),
        (("--prefill", "a,b", "--dry-run"), 2, "expected numbers with commas"),
        (("--capacity", "16", "--dry-run"), 1, "prefill bucket 512 is longer than the cache of 16 rows"),
        (("--decode-frames", "100", "--dry-run"), 1, "multiples of 8 frames"),
        (("--target", "Ascend910B", "--dry-run"), 1, "no preset"),
        (("--target", "soc=Ascend910B", "--dry-run"), 1, "FIRST-generation"),
        (("--keep-fp32", "nowhere.txt", "--precision", "fp16", "--dry-run"), 1, "not a readable keep list"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    directory: Path, no_cann: None, arguments: tuple[str, ...], exit_code: int, words: str
) -> None:
    done = atc(directory, *arguments)
    assert done.exit_code == exit_code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_reduced_precision_has_its_own_place_and_options(directory: Path, no_cann: None, tmp_path: Path) -> None:
    keep = tmp_path / "keep.txt"
    keep.write_text("OpType::Tanh\n")
    done = atc(directory, *SIZES, "--precision", "mixed", "--keep-fp32", keep, "--dry-run", "--graphs", "step")
    assert "--precision_mode_v2=mixed_float16" in done.stdout
    assert f"--modify_mixlist={directory}/om/Ascend910B4-mixed_float16/step-B1-C32.mixlist.json" in done.stdout
