"""A package in the published ONNX form, written here, runs on its own graphs and gives upstream's codes; so do ours.

Tolerance 2e-5 absolute for waveforms, as the golden README states it; codes must be exact.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from convert.cli import cli as convert_cli
from convert.published_package import write_published_package
from runtime.backends.ort import OrtBackend
from runtime.cli import cli as run_cli
from runtime.errors import ManifestError
from runtime.frame_model import HostFrameModel
from runtime.generate import generate
from runtime.manifest import MADE_UP_NOTICE
from runtime.onnx_package import open_package
from runtime.package_codec import PublishedCodec
from runtime.package_graphs import cache_names
from runtime.package_model import PublishedFrameModel
from runtime.package_speech import describe_package
from runtime.sampling import SamplingParams
from tests.conftest import DATA, NANO

ATOL = 2e-5
MODES = {"greedy": SamplingParams.greedy(1.2), "fixed": SamplingParams()}
CAPACITY = 128  # rows that the padded past has, below


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(NANO / "e2e_tiny_b.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """The package of the golden checkpoints. They have no tokenizer: the published one is laid beside it."""
    root = tmp_path_factory.mktemp("package")
    tts = write_published_package(NANO / "tiny_llm_b", NANO / "tiny_codec", root)
    shutil.copyfile(DATA / "tokenizer" / "tokenizer.model", tts / "tokenizer.model")
    return root


@dataclass(frozen=True, slots=True)
class Published:
    """What --as-published opens, without a text front end: the golden request comes as rows."""

    frame_model: PublishedFrameModel
    codec: PublishedCodec


@pytest.fixture(scope="module")
def published(package):
    opened = open_package(package)
    model = PublishedFrameModel(opened, threads=1)
    codec = PublishedCodec(opened, describe_package(opened, model).codec, threads=1)
    yield Published(model, codec)
    model.close()
    codec.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_packages_own_graphs_give_upstreams_codes(published, golden, mode):
    run = generate(published.frame_model, golden["request_rows"], 0, MODES[mode], 12)
    np.testing.assert_array_equal(run.codes, golden[f"{mode}_frames"])
    assert run.finish_reason == "stop"


@pytest.mark.parametrize("golden_llm", ["b"], indirect=True, scope="session")
@pytest.mark.parametrize("mode", MODES)
def test_our_own_graphs_give_the_same_codes(tiny_b, golden, mode):
    run = generate(tiny_b, golden["request_rows"], 0, MODES[mode], 12)
    np.testing.assert_array_equal(run.codes, golden[f"{mode}_frames"])
    assert run.finish_reason == "stop"


@pytest.fixture
def tiny_b(golden_llm):
    model = HostFrameModel(golden_llm.manifest, OrtBackend(threads=1))
    yield model
    model.close()


@pytest.mark.parametrize("golden_llm", ["b"], indirect=True, scope="session")
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(1.1, 40, 0.9, 1.4)], ids=["the fixed graph's", "other settings"]
)
def test_both_see_the_same_logits_and_choose_the_same_codes(published, tiny_b, golden, sampling):
    theirs, ours = (
        generate(model, golden["request_rows"], 3, sampling, 6, keep_logits=True)
        for model in (published.frame_model, tiny_b)
    )
    np.testing.assert_array_equal(theirs.codes, ours.codes)
    for their_frame, our_frame in zip(theirs.frames, ours.frames, strict=True):
        np.testing.assert_allclose(their_frame.slot_logits, our_frame.slot_logits, atol=ATOL)
        np.testing.assert_allclose(their_frame.code_logits, our_frame.code_logits, atol=ATOL)


def test_the_packages_codec_encodes_decodes_and_streams_as_upstream(published, golden):
    codec, frames = published.codec, golden["fixed_frames"]
    np.testing.assert_array_equal(codec.encode(golden["ref_wav"]), golden["ref_codes"])
    np.testing.assert_allclose(codec.decode(frames), golden["fixed_wav"], atol=ATOL)
    with codec.stream() as stream:
        parts = [stream.push(frames[i : i + 2]) for i in range(0, len(frames), 2)]
    np.testing.assert_allclose(np.concatenate(parts, 1), golden["fixed_wav"], atol=ATOL)


def padded_shapes(model: PublishedFrameModel) -> str:
    heads, size = model.cache_shape
    caches = [f"{name}:1,{CAPACITY},{heads},{size}" for name in cache_names("past", model.num_layers)]
    return ";".join(["input_ids:1,1,17", "past_valid_lengths:1", *caches])


def hazards(package: Path, shapes: str) -> dict[str, set[str]]:
    """Graph file -> severities of the padded-past finding; the findings block, so the command exits with 1."""
    result = CliRunner().invoke(convert_cli, ["check", str(package), "--json", "--input-shape", shapes])
    assert result.exit_code == 1, result.output
    reports = json.loads(result.stdout)["reports"]
    assert len(reports) == 8
    return {
        Path(r["graph"]).name: {f["severity"] for f in r["findings"] if f["rule"] == "hazard.padded-past"}
        for r in reports
    }


@pytest.mark.parametrize("bound", [True, False])
def test_check_names_the_padded_past_of_both_graphs_with_a_growing_cache(package, published, bound):
    """Bound or not: ATC compiles an axis at a number, and the untouched package must say what that would do."""
    found = hazards(package, padded_shapes(published.frame_model) if bound else "")
    growing = {"moss_tts_decode_step.onnx", "moss_tts_local_cached_step.onnx"}
    assert found == {name: {"silent wrong result"} if name in growing else set() for name in found}


def test_the_padded_past_is_wrong_in_fact(published, golden):
    model = published.frame_model
    model.prefill(golden["request_rows"])
    past = dict(zip(cache_names("past", model.num_layers), model._past, strict=True))
    step = {"input_ids": golden["request_rows"][None, -1:], "past_valid_lengths": np.array([100], np.int32)}
    right = model.run("decode_step", step | past)["global_hidden"]
    padding = [(0, 0), (0, CAPACITY - 100), (0, 0), (0, 0)]
    padded = model.run("decode_step", step | {name: np.pad(rows, padding) for name, rows in past.items()})
    assert np.abs(padded["global_hidden"] - right).max() > 0.01


def say(artifacts: Path, out: Path, *arguments: str):
    command = ["say", "--artifacts", str(artifacts), "--out", str(out.with_suffix(".wav")), "--codes-out", str(out)]
    command += ["--text", "Hello there, how are you today?", "--threads", "1", "--json", *arguments]
    return CliRunner().invoke(run_cli, command)


@pytest.fixture(scope="module")
def spoken_package(tiny_artifacts, tmp_path_factory) -> Path:
    """The package of the made-up checkpoint that speaks, with a built-in voice, without graphs that can be missing."""
    graphs = ("prefill", "decode_step", "local_cached_step", "encode", "codec_decode_step")
    model, codec = (tiny_artifacts.parent / "checkpoint" / part for part in ("model", "codec"))
    voice = np.random.default_rng(5).integers(0, 64, (12, 16))
    root = tmp_path_factory.mktemp("spoken")
    write_published_package(model, codec, root, {"Ava": voice}, graphs)
    return root


@pytest.mark.parametrize("mode", [["--greedy"], ["--seed", "7"]])
def test_say_as_published_gives_the_codes_of_our_own_graphs(tiny_artifacts, spoken_package, tmp_path, mode):
    voice = ["--voice", str(DATA.parents[1] / "examples" / "voice_en.flac"), *mode]
    theirs = say(spoken_package, tmp_path / "theirs.json", "--as-published", *voice)
    assert theirs.exit_code == 0, theirs.output
    figures = json.loads(theirs.stdout)
    assert figures["backend"] == "ort (as published)" and figures["note"] == MADE_UP_NOTICE
    ours = say(tiny_artifacts, tmp_path / "ours.json", "--template", "onnx", *voice)
    assert ours.exit_code == 0, ours.output
    assert (tmp_path / "theirs.json").read_text() == (tmp_path / "ours.json").read_text()


def test_a_built_in_voice_is_named_like_a_stored_one(spoken_package, tmp_path):
    result = say(spoken_package, tmp_path / "a.json", "--as-published", "--voice", "Ava", "--max-frames", "4")
    assert result.exit_code == 0, result.output
    unknown = say(spoken_package, tmp_path / "b.json", "--as-published", "--voice", "Bob", "--max-frames", "4")
    assert unknown.exit_code == 1 and "Bob" in unknown.stderr and "Ava" in unknown.stderr


def test_a_package_is_not_mistaken_for_artifacts_nor_artifacts_for_a_package(tiny_artifacts, spoken_package, tmp_path):
    result = say(spoken_package, tmp_path / "a.json")
    assert result.exit_code == 1 and "--as-published" in result.stderr
    result = say(tiny_artifacts, tmp_path / "a.json", "--as-published")
    assert result.exit_code == 1 and "browser_poc_manifest.json" in result.stderr
    result = say(spoken_package, tmp_path / "a.json", "--as-published", "--backend", "torch")
    assert result.exit_code == 1 and "--backend ort" in result.stderr


def test_settings_that_need_a_missing_graph_are_refused_by_its_name(package, golden, tmp_path):
    shutil.copytree(package, tmp_path / "p")
    (tmp_path / "p" / "MOSS-TTS-Nano-100M-ONNX" / "moss_tts_local_cached_step.onnx").unlink()
    model = PublishedFrameModel(open_package(tmp_path / "p"), threads=1)
    run = generate(model, golden["request_rows"], 0, MODES["fixed"], 12)
    np.testing.assert_array_equal(run.codes, golden["fixed_frames"])
    with pytest.raises(ManifestError, match=r"moss_tts_local_cached_step\.onnx"):
        generate(model, golden["request_rows"], 0, MODES["greedy"], 2)
    model.close()
