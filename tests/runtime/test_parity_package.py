"""run-om parity with a published package as a side, and with the name of a stored voice instead of a clip."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from runtime.cli import cli
from tests.conftest import DATA

CLIP = DATA.parents[1] / "examples" / "voice_en.flac"
AGREES = ("EXACT", "WITHIN_TOLERANCE")


@pytest.fixture(scope="module")
def package(tiny_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same package with a built-in voice."""
    root = Path(shutil.copytree(tiny_package, tmp_path_factory.mktemp("package") / "package"))
    path = next(root.glob("*/browser_poc_manifest.json"))
    manifest = json.loads(path.read_text())
    codes = np.random.default_rng(5).integers(0, 64, (12, 16)).tolist()
    manifest["builtin_voices"] = [{"voice": "Ava", "prompt_audio_codes": codes}]
    path.write_text(json.dumps(manifest))
    return root


def parity(*options: object) -> Result:
    common = ("parity", "--text", "Hello there.", "--frames", "6", "--threads", "1")
    return CliRunner().invoke(cli, [*common, *map(str, options)])


def against_package(artifacts: Path, package: Path, *options: object) -> Result:
    return parity("--a", "published", "--artifacts-a", package, "--b", "ort", "--artifacts-b", artifacts, *options)


def verdicts(result: Result) -> dict[str, str]:
    data = json.loads(result.stdout)
    return {entry["name"]: entry["verdict"] for entry in (*data["stages"], *data["modes"])}


def first_divergence(result: Result) -> str:
    return str(json.loads(result.stdout)["first_divergence"]["name"])


def test_the_package_agrees_in_every_stage_that_it_can_show(tiny_artifacts: Path, package: Path) -> None:
    result = against_package(tiny_artifacts, package, "--voice", CLIP, "--json")
    assert result.exit_code == 0, result.output
    found = verdicts(result)
    assert found.pop("codec latents") == "NOT_MEASURED"
    assert len(found) == 13 and set(found.values()) <= set(AGREES)
    assert found["greedy"] == found["seeded"] == found["replay"] == found["prompt rows"] == "EXACT"
    data = json.loads(result.stdout)
    assert "Not measured: codec latents." in data["text"] and "a does not give these values" in result.stdout
    assert data["a"]["backend"] == "ort (as published)" and data["a"]["made_up"]
    assert data["a"]["template"] == data["b"]["template"] == "onnx"
    assert "moss_tts_prefill.onnx" in data["a"]["graphs"]


def break_weight(package: Path, copy: Path, file: str) -> Path:
    """A copy with one weight of one graph moved; the data files that other graphs share stay as they are."""
    root = Path(shutil.copytree(package, copy))
    path = next(root.glob(f"*/{file}"))
    model = onnx.load(path)
    floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims)]
    weight = next((t for t in floats if len(t.dims) == 1 and t.dims[0] > 16), floats[0])  # a bias, where there is one
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + np.float32(3), weight.name))
    onnx.save(model, path)
    return root


@pytest.mark.parametrize(
    ("file", "stage"),
    [
        ("moss_audio_tokenizer_encode.onnx", "reference codes"),
        ("moss_tts_prefill.onnx", "prefill hidden"),
        ("moss_tts_decode_step.onnx", "step hidden"),
        ("moss_tts_local_cached_step.onnx", "slot logits"),
        ("moss_tts_local_fixed_sampled_frame.onnx", "the seeded run"),
        ("moss_audio_tokenizer_decode_full.onnx", "waveform"),
    ],
)
def test_a_broken_weight_is_found_at_its_stage(
    tiny_artifacts: Path, package: Path, tmp_path: Path, file: str, stage: str
) -> None:
    broken = break_weight(package, tmp_path / "broken", file)
    voice = ("--voice", CLIP) if stage == "reference codes" else ()
    result = against_package(tiny_artifacts, broken, "--json", *voice)
    assert result.exit_code == 1, result.output
    assert first_divergence(result) == stage


def remove(package: Path, copy: Path, *files: str) -> Path:
    root = Path(shutil.copytree(package, copy))
    for file in files:
        next(root.glob(f"*/{file}")).unlink()
    return root


def test_without_local_decoder_the_fixed_graph_is_compared_by_its_codes_alone(
    tiny_artifacts: Path, package: Path, tmp_path: Path
) -> None:
    lean = remove(package, tmp_path / "lean", "moss_tts_local_decoder.onnx", "moss_audio_tokenizer_decode_full.onnx")
    result = against_package(tiny_artifacts, lean, "--json")
    assert result.exit_code == 0, result.output
    assert verdicts(result)["seeded"] == "EXACT" and verdicts(result)["waveform"] in AGREES  # by the stream


def test_a_missing_encoder_is_named_and_a_stored_voice_does_without(
    tiny_artifacts: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSS_TTS_VOICES", str(tmp_path / "voices"))
    lean = remove(package, tmp_path / "lean", "moss_audio_tokenizer_encode.onnx")
    clip = against_package(tiny_artifacts, lean, "--voice", CLIP)
    assert clip.exit_code == 2 and "has no moss_audio_tokenizer_encode.onnx" in clip.stderr
    assert CliRunner().invoke(cli, ["voice", "add", "me", str(CLIP), "--artifacts", str(tiny_artifacts)]).exit_code == 0
    sides = ("--a", "ort", "--artifacts-a", tiny_artifacts, "--b", "published", "--artifacts-b", lean)
    stored = parity(*sides, "--voice", "me", "--json")
    assert stored.exit_code == 0, stored.output
    assert verdicts(stored)["reference codes"] == "NOT_MEASURED"
    assert "me is a stored voice: no side encoded a clip" in stored.stdout
    assert json.loads(stored.stdout)["plan"]["stored_voice"] == "me" and verdicts(stored)["greedy"] == "EXACT"


def test_a_built_in_voice_of_the_package_has_a_name_too(tiny_artifacts: Path, package: Path) -> None:
    spoken = against_package(tiny_artifacts, package, "--voice", "Ava")
    assert spoken.exit_code == 0 and "Ava is a stored voice" in spoken.stdout, spoken.output
    unknown = against_package(tiny_artifacts, package, "--voice", "Bob")
    assert unknown.exit_code == 2 and "no voice named Bob" in unknown.stderr


def test_the_prompt_of_a_recording_decides_and_so_does_its_voice(
    tiny_artifacts: Path, package: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recorded = parity("--a", "published", "--artifacts", package, "--voice", "Ava", "--record", run)
    assert recorded.exit_code == 0, recorded.output
    ours = ("--b", "ort", "--artifacts", tiny_artifacts)
    spoken = parity("--a", run, *ours, "--json")
    assert spoken.exit_code == 0 and json.loads(spoken.stdout)["b"]["template"] == "onnx", spoken.output
    other = parity("--a", run, *ours, "--voice", CLIP)
    assert other.exit_code == 2 and "the recording speaks with the voice Ava" in other.stderr
    assert parity("--a", "ort", "--artifacts", tiny_artifacts, "--record", run).exit_code == 0
    spoken = parity("--a", run, "--b", "published", "--artifacts", package, "--json")
    assert spoken.exit_code == 0 and json.loads(spoken.stdout)["b"]["template"] == "pytorch", spoken.output
    data = json.loads((run / "recording.json").read_text())
    data["identity"]["template"] = "mine"
    (run / "recording.json").write_text(json.dumps(data))
    damaged = parity("--a", run, *ours)
    assert damaged.exit_code == 2 and "damaged" in damaged.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--a", "published@1"), "no device, split or precision"),
        (("--a", "published", "--split-a"), "no device, split or precision"),
        (("--a", "published", "--artifacts-a", "nowhere"), "holds no browser_poc_manifest.json"),
    ],
)
def test_what_a_package_cannot_do_is_refused_in_one_line(
    tiny_artifacts: Path, options: tuple[str, ...], message: str
) -> None:
    result = parity("--b", "ort", "--artifacts", tiny_artifacts, *options)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_accuracy_takes_a_package_too(tiny_artifacts: Path, package: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("Hello.\n")
    sides = ["--a", "published", "--artifacts-a", str(package), "--b", "ort", "--artifacts-b", str(tiny_artifacts)]
    options = ["--texts", str(tmp_path / "texts.txt"), "--frames", "4", "--threads", "1"]
    result = CliRunner().invoke(cli, ["accuracy", *sides, *options])
    assert result.exit_code == 0 and "1 of 1 texts with equal codes" in result.stdout, result.output
