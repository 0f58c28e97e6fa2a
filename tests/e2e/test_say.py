"""From the command line to a WAV, on the made-up tiny checkpoint: the main job and what goes wrong on the way."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner

from runtime.cli import cli
from runtime.manifest import MADE_UP_NOTICE
from tests.conftest import DATA

VOICE = DATA.parents[1] / "examples" / "voice_en.flac"


def say(artifacts, out, *arguments, text="Hello there, how are you today?", voice=VOICE):
    command = ["say", "--artifacts", str(artifacts), "--text", text, "--out", str(out), "--threads", "1", *arguments]
    return CliRunner().invoke(cli, [*command, *(["--voice", str(voice)] if voice else [])])


def test_a_text_becomes_speech_that_ends_by_itself(tiny_artifacts, tmp_path):
    result = say(tiny_artifacts, tmp_path / "o.wav", "--json", "--codes-out", str(tmp_path / "codes.npz"))
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["backend"] == "ort" and figures["note"] == MADE_UP_NOTICE
    (segment,) = figures["segments"]
    assert segment["finish_reason"] == "stop" and 20 <= segment["frames"] <= 80
    samples, rate = soundfile.read(tmp_path / "o.wav")
    assert rate == 48_000 and samples.shape == (segment["frames"] * 3840, 2)
    assert 0.02 < np.sqrt(np.mean(samples**2)) < 0.2 and np.abs(samples).max() < 1
    with np.load(tmp_path / "codes.npz") as codes:
        assert codes["codes"].shape == (segment["frames"], 16)


@pytest.mark.parametrize("mode", [[], ["--greedy"]])
def test_both_backends_say_the_same_codes_and_the_same_seed_gives_the_same_bytes(tiny_artifacts, tmp_path, mode):
    for name, backend in (("a", "ort"), ("b", "ort"), ("c", "torch")):
        arguments = ["--backend", backend, "--codes-out", str(tmp_path / f"{name}.json"), "--seed", "7", *mode]
        assert say(tiny_artifacts, tmp_path / f"{name}.wav", *arguments).exit_code == 0
    a, b, c = ((tmp_path / f"{n}.json").read_text() for n in "abc")
    assert a == b == c
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()
    wave_a, wave_c = (soundfile.read(tmp_path / f"{n}.wav")[0] for n in "ac")
    np.testing.assert_allclose(wave_a, wave_c, atol=2 / 32768)  # one step of 16 bits, and rounding


def test_two_calls_per_frame_say_what_one_says(tiny_artifacts, tmp_path):
    for name, extra in (("a", []), ("b", ["--split-step"])):
        assert (
            say(
                tiny_artifacts, tmp_path / f"{name}.wav", "--codes-out", str(tmp_path / f"{name}.json"), *extra
            ).exit_code
            == 0
        )
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_text_and_voice_and_weights_matter(tiny_artifacts, tmp_path):
    def codes(name, **changes):
        path = tmp_path / f"{name}.json"
        assert (
            say(tiny_artifacts, tmp_path / f"{name}.wav", "--greedy", "--codes-out", str(path), **changes).exit_code
            == 0
        )
        return path.read_text()

    other_text = [codes(f"t{i}", text=t) for i, t in enumerate(("One two three.", "A quite different text.", "No."))]
    assert len(set(other_text)) > 1


def test_a_continuation_and_a_long_text(tiny_artifacts, tmp_path):
    result = say(tiny_artifacts, tmp_path / "c.wav", "--reference-text", "The words of the clip.", "--json")
    assert result.exit_code == 0 and len(json.loads(result.stdout)["segments"]) == 1
    long = "This is a sentence with several words. " * 12
    result = say(tiny_artifacts, tmp_path / "l.wav", "--max-tokens", "30", "--json", text=long)
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["segments"]) > 3
    assert "segment 2/" in result.stderr


def test_length_is_a_warning_and_with_strict_an_error(tiny_artifacts, tmp_path):
    result = say(tiny_artifacts, tmp_path / "o.wav", "--max-frames", "5")
    assert result.exit_code == 0 and "reached --max-frames (5 frames)" in result.stderr
    assert say(tiny_artifacts, tmp_path / "o.wav", "--max-frames", "5", "--strict").exit_code == 1


def test_mono_and_sample_formats(tiny_artifacts, tmp_path):
    assert (
        say(tiny_artifacts, tmp_path / "o.flac", "--mono", "--sample-format", "pcm24", "--max-frames", "8").exit_code
        == 0
    )
    info = soundfile.info(tmp_path / "o.flac")
    assert (info.channels, info.subtype) == (1, "PCM_24")


def bad_artifacts(tiny_artifacts, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_artifacts, copy)
    with (copy / "weights.bin").open("r+b") as file:
        file.write(b"x")
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "  "}, "text"),
        ({"voice": "/no/such/clip.wav"}, "no such file"),
        ({"voice": __file__}, "not an audio file"),
        ({"arguments": ["--top-k", "0"]}, "top_k: expected 1 to 50"),
        ({"arguments": ["--temperature", "0"]}, "temperature"),
        ({"arguments": ["--max-frames", "9999"]}, "lower --max-frames"),
        ({"arguments": ["--text-file", "/no/such/file"]}, "one of them"),
        ({"arguments": ["--codes-out", "x.txt"]}, ".npz or .json"),
        ({"arguments": ["--resume"]}, "nothing to resume"),
        ({"out": "o.mp3"}, "o.mp3"),
        ({"out": "no/such/dir/o.wav"}, "no/such/dir"),
        ({"artifacts": "/nowhere"}, "holds no manifest.json"),
        ({"artifacts": bad_artifacts}, "weights.bin: sha256"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(tiny_artifacts, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    artifacts = change.get("artifacts", tiny_artifacts)
    artifacts = artifacts(tiny_artifacts, tmp_path) if callable(artifacts) else artifacts
    before = set(tmp_path.rglob("*"))
    kept = {k: v for k, v in change.items() if k in ("text", "voice")}
    result = say(artifacts, change.get("out", "o.wav"), *change.get("arguments", []), **kept)
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in result.output
    assert set(tmp_path.rglob("*")) == before


def test_a_batch_file(tiny_artifacts, tmp_path):
    lines = [
        {"id": "one", "text": "The first line."},
        {"id": "two", "text": "Second.", "seed": 4},
        {"id": "bad", "text": " "},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["batch", str(tmp_path / "in.jsonl"), "--artifacts", str(tiny_artifacts), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli, [*command, "--voice", str(VOICE), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["spoken"] == 2
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["one.wav", "results.jsonl", "two.wav"]


def test_a_stream_says_what_the_file_says(tiny_artifacts, tmp_path):
    long = "This is a sentence with several words. " * 4
    for name, extra in (("file", []), ("stream", ["--stream", "--json"])):
        codes = ["--codes-out", str(tmp_path / f"{name}.json"), "--max-tokens", "30"]
        result = say(tiny_artifacts, tmp_path / f"{name}.wav", *codes, *extra, text=long)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "file.json").read_text() == (tmp_path / "stream.json").read_text()
    (file, rate), (stream, _) = (soundfile.read(tmp_path / f"{n}.wav", dtype="int16") for n in ("file", "stream"))
    assert file.shape == stream.shape and rate == 48_000
    assert np.abs(file.astype(int) - stream).max() <= 2  # chunks of other sizes round differently
    figures = json.loads(result.stdout)
    assert figures["stream"]["first_audio_ms"] > 0 and 0 < figures["stream"]["codec_share"] < 1
    assert sum(int(n) * calls for n, calls in figures["stream"]["chunks"].items()) == figures["frames"]
    assert figures["stream"]["chunks"]["1"] >= 1 and len(figures["segments"]) > 1


def test_a_stream_to_standard_output_is_samples_alone_and_says_what_they_are(tiny_artifacts, tmp_path, capfdbinary):
    result = say(tiny_artifacts, "-", "--stream", "--codes-out", str(tmp_path / "codes.json"))
    assert result.exit_code == 0, result.output
    assert "samples: pcm16, 48000 Hz, 2 channel(s)" in result.stderr
    frames = len(json.loads((tmp_path / "codes.json").read_text())["codes"])
    assert result.stdout == "" and len(capfdbinary.readouterr().out) >= frames * 3840 * 2 * 2 > 0


def test_what_cannot_be_streamed_is_refused_before_anything_is_loaded(tmp_path):
    for out, extra, words in (
        ("o.flac", [], "a name that ends in .wav, or as raw samples to -"),
        ("o.wav", ["--resume"], "--resume goes on with a file"),
    ):
        result = say(tmp_path / "none", tmp_path / out, "--stream", *extra)
        assert result.exit_code == 1 and words in result.stderr and not (tmp_path / out).exists()
