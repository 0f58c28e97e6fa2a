"""run-om parity and run-om accuracy as a user calls them: exit codes, reports, recordings, the simulator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from runtime.backends import om_device
from runtime.backends.om_rows import RowCopier
from runtime.backends.simulator import uninstall
from runtime.cli import cli
from runtime.graphs import derived_axes
from runtime.manifest import Manifest, sha256_of
from tests.runtime.om_builds import compile_manifest

FRAMES = 8


def run_om(*arguments: object) -> Result:
    try:
        return CliRunner().invoke(cli, [str(a) for a in arguments])
    finally:
        om_device.close_all()
        uninstall()


def parity(*options: object) -> Result:
    return run_om("parity", "--text", "Hello there.", "--frames", FRAMES, "--threads", 1, *options)


@pytest.fixture(scope="module")
def other(tiny_artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same artifacts with one weight matrix scaled."""
    directory = Path(shutil.copytree(tiny_artifacts, tmp_path_factory.mktemp("other") / "artifacts"))
    manifest = Manifest.load(directory)
    weights = np.fromfile(directory / "weights.bin", np.uint8)
    record = next(r for name, r in manifest.weights.items() if "layer" in name and len(r.shape) == 2)
    weights[record.offset : record.offset + record.num_bytes].view(np.float32)[:] *= np.float32(1.5)
    weights.tofile(directory / "weights.bin")
    data = json.loads((directory / "manifest.json").read_text())
    data["data_files"]["weights.bin"] = sha256_of(directory / "weights.bin")
    (directory / "manifest.json").write_text(json.dumps(data))
    return directory


def test_two_backends_agree_and_the_report_is_written(tiny_artifacts: Path, tmp_path: Path) -> None:
    result = parity("--a", "ort", "--b", "torch", "--artifacts", tiny_artifacts, "--report", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data == json.loads((tmp_path / "parity.json").read_text())
    assert data["verdict"] == "WITHIN_TOLERANCE" and {m["name"] for m in data["modes"]} == {
        "greedy",
        "seeded",
        "replay",
    }
    assert all(s["verdict"] in ("EXACT", "WITHIN_TOLERANCE") for s in data["stages"] if s["name"] != "reference codes")
    assert "--a ort --b torch" in data["command"]
    page = (tmp_path / "parity.html").read_text()
    assert page.count("data:image/png;base64") == 4  # the agreement map and three spectrograms


def test_other_weights_part_with_exit_code_1_and_a_diff_sees_it(
    tiny_artifacts: Path, other: Path, tmp_path: Path
) -> None:
    same = parity("--a", "ort", "--b", "ort", "--artifacts", tiny_artifacts, "--report", tmp_path / "same")
    assert same.exit_code == 0 and "EXACT" in same.stdout
    changed = parity("--a", "ort", "--b", "ort", "--artifacts-a", tiny_artifacts, "--artifacts-b", other,
                     "--report", tmp_path / "changed")  # fmt: skip
    assert changed.exit_code == 1 and "the sides have different weights" in changed.stdout
    diff = run_om("parity", "diff", tmp_path / "same" / "parity.json", tmp_path / "changed" / "parity.json")
    assert diff.exit_code == 1 and "worse: overall: verdict: EXACT -> DIVERGENT" in diff.stdout
    back = run_om("parity", "diff", tmp_path / "changed" / "parity.json", tmp_path / "same" / "parity.json", "--json")
    assert back.exit_code == 0 and not any(c["worse"] for c in json.loads(back.stdout))


def test_a_recorded_side_is_compared_without_its_backend(tiny_artifacts: Path, other: Path, tmp_path: Path) -> None:
    recorded = parity("--a", "ort", "--artifacts", tiny_artifacts, "--record", tmp_path / "run")
    assert recorded.exit_code == 0, recorded.output
    common = ("--threads", 1, "--artifacts")
    for sides in (("--a", tmp_path / "run", "--b", "ort"), ("--a", "ort", "--b", tmp_path / "run")):
        result = run_om("parity", *sides, *common, tiny_artifacts)
        assert result.exit_code == 0 and result.stdout.startswith("EXACT"), result.output
    assert run_om("parity", "--a", tmp_path / "run", "--b", "ort", *common, other).exit_code == 1
    assert run_om("parity", "--a", tmp_path / "run", "--b", tmp_path / "run").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--a", "nonsense", "--b", "ort"), "no such side"),
        (("--b", "ort"), "--a is missing"),
        (("--a", "ort", "--b", "torch"), "needs its artifacts"),
        (("--a", "ort", "--b", "torch", "--artifacts", "nowhere"), "holds no manifest.json"),
        (("--a", "ort", "--record", "x", "--b", "ort"), "leave --b out"),
        (("--a", "ort", "--b", "ort", "--artifacts", ".", "--floor", "missing.json"), "not a readable parity report"),
    ],
)
def test_what_cannot_be_compared_leaves_with_exit_code_2_and_one_line(options: tuple[str, ...], message: str) -> None:
    result = parity(*options)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
    assert run_om("parity", "diff", "missing.json", "missing.json").exit_code == 2


def test_a_text_that_is_not_the_recordings_is_refused(tiny_artifacts: Path, tmp_path: Path) -> None:
    assert parity("--a", "ort", "--artifacts", tiny_artifacts, "--record", tmp_path).exit_code == 0
    result = run_om("parity", "--a", tmp_path, "--b", "ort", "--artifacts", tiny_artifacts, "--text", "Other.")
    assert result.exit_code == 2 and "leave --text out" in result.stderr


@pytest.fixture(scope="module")
def compiled(tiny_artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts with every graph compiled for the simulator."""
    directory = Path(shutil.copytree(tiny_artifacts, tmp_path_factory.mktemp("om") / "artifacts"))
    manifest = Manifest.load(directory)
    step = [{"B": 1, "C": 192}]
    wanted = {"prefill": [{"B": 1, "T": 128}], "frame": [{"B": 1}], "step_frame": step, "step": step}
    for name in ("codec_encode", "codec_stream"):
        axes = {"B": 1, **derived_axes(manifest.codec, 4)}
        wanted[name] = [{k: v for k, v in axes.items() if k in manifest.graph(name).spec.dynamic_axes()}]
    compile_manifest(manifest, wanted).save()
    return directory


@pytest.mark.parametrize("split", [(), ("--split-b",)])
def test_the_simulated_om_agrees_and_says_that_it_is_simulated(compiled: Path, split: tuple[str, ...]) -> None:
    result = parity("--a", "ort", "--b", "simulated", "--artifacts", compiled, "--json", *split)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["b"]["simulated"] and data["b"]["fused"] is not bool(split)
    verdicts = {s["name"]: s["verdict"] for s in data["stages"]}
    assert verdicts["prefill cache"] in ("EXACT", "WITHIN_TOLERANCE")  # read back from the device
    assert verdicts["codec latents"] == "NOT_MEASURED"
    assert verdicts["codes"] == "EXACT" and "Not measured: reference codes, codec latents" in data["text"]


def test_a_device_that_writes_cache_rows_one_too_early_is_found_out(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = RowCopier.copy

    def early(self, target, source, width, column):
        return copy(self, target, source, width, column - width if column else 0)

    monkeypatch.setattr(RowCopier, "copy", early)
    result = parity("--a", "ort", "--b", "simulated", "--artifacts", compiled, "--report", tmp_path)
    assert result.exit_code == 1, result.output
    assert "The sides part at step hidden" in result.stdout
    assert "cause: on side b, new cache rows are written one row too early" in result.stdout
    assert "rerun with this fault comes within" in (tmp_path / "parity.html").read_text()


def test_accuracy_counts_texts_and_writes_json(tiny_artifacts: Path, other: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("Hello.\n\n你好。\n", encoding="utf-8")
    common = ("--texts", texts, "--frames", 4, "--threads", 1, "--out", tmp_path / "out.json")
    good = run_om("accuracy", "--b", "torch", "--artifacts", tiny_artifacts, *common)
    assert good.exit_code == 0 and "2 of 2 texts with equal codes" in good.stdout, good.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert [r["text"] for r in data["results"]] == ["Hello.", "你好。"] and data["texts_with_equal_codes"] == 2
    bad = run_om("accuracy", "--b", "ort", "--artifacts-a", tiny_artifacts, "--artifacts-b", other, *common)
    assert bad.exit_code == 1 and "DIVERGENT" in bad.stdout
    texts.write_text("\n")
    assert run_om("accuracy", "--b", "torch", "--artifacts", tiny_artifacts, *common).exit_code == 2


def test_the_built_in_texts_are_english_chinese_numbers_and_punctuation() -> None:
    from runtime.accuracy import TEXTS

    assert sum(any("\u4e00" <= c <= "\u9fff" for c in t) for t in TEXTS) >= 4
    assert sum(any(c.isdigit() for c in t) for t in TEXTS) >= 3 and any("?!" in t for t in TEXTS)
