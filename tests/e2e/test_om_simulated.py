"""Checkpoint -> ONNX -> fake atc -> simulator -> speech: the whole .om path, through the commands a user types."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest
import sentencepiece
from click.testing import CliRunner, Result

from convert.export import export_artifacts
from runtime.assembly import open_codec
from runtime.backends import om_device
from runtime.backends.select import BackendOptions, open_backend
from runtime.backends.simulator import uninstall
from runtime.cli import cli
from runtime.manifest import Manifest
from tests.fake_cann.tree import make_tree

NANO = Path(__file__).resolve().parents[1] / "data" / "nano"
SIZES = ("--capacity=272", "--prefill=64,256", "--encode-frames=128", "--stream-frames=1,8")
GRAPHS = "--graphs=prefill,step,frame,step_frame,codec_encode,codec_stream"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_llm_b with a tokenizer of our own, exported and compiled by the fake atc."""
    root = tmp_path_factory.mktemp("om")
    checkpoint = Path(shutil.copytree(NANO / "tiny_llm_b", root / "checkpoint"))
    (root / "corpus.txt").write_text("hello there general\nhow are you today\nthe quick brown fox\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(root / "corpus.txt"),
        model_prefix=str(checkpoint / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        pad_id=3,
        user_defined_symbols=[f"<reserved_{i}>" for i in range(4, 16)],
        minloglevel=2,
    )
    manifest = export_artifacts(str(checkpoint), str(NANO / "tiny_codec"), root / "artifacts", max_positions=288)
    home = make_tree(root / "machine")
    environ = {**os.environ, "PATH": f"{home}/bin:{os.environ['PATH']}", "ASCEND_HOME_PATH": str(home)}
    command = [sys.executable, "-c", "from convert.cli import cli; cli()", "atc", str(manifest.directory)]
    compiled = subprocess.run([*command, *SIZES, GRAPHS], env=environ, check=False, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stdout + compiled.stderr
    return manifest.directory


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Two seconds of a vowel-like tone at the rate of the codec."""
    rate = 4800
    t = np.arange(2 * rate) / rate
    tone = 0.3 * np.sin(2 * np.pi * 140 * t) * (1 + 0.5 * np.sin(2 * np.pi * 3 * t))
    path = tmp_path / "clip.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((32767 * tone).astype(np.int16).tobytes())
    return path


def run_om(*arguments: object) -> Result:
    try:
        return CliRunner().invoke(cli, [str(a) for a in arguments])
    finally:
        om_device.close_all()  # what the end of the process does: finalize, and fail on a leak
        uninstall()


def say(artifacts: Path, clip: Path, out: Path, *options: object) -> Result:
    return run_om("say", "--artifacts", artifacts, "--text", "hello there", "--voice", clip, "--out", out,
                  "--max-frames", 12, "--json", *options)  # fmt: skip


def test_say_on_the_simulator_writes_the_same_bytes_as_on_onnx_runtime(
    artifacts: Path, clip: Path, tmp_path: Path
) -> None:
    results = {
        "ort": say(artifacts, clip, tmp_path / "ort.wav", "--threads", 1),
        "om": say(artifacts, clip, tmp_path / "om.wav", "--backend", "om", "--device", 0, "--simulate", "--stats"),
        "split": say(artifacts, clip, tmp_path / "split.wav", "--backend", "om", "--simulate", "--split-step"),
    }
    assert {name: r.exit_code for name, r in results.items()} == dict.fromkeys(results, 0), results["om"].output
    expected = (tmp_path / "ort.wav").read_bytes()
    assert (tmp_path / "om.wav").read_bytes() == expected
    assert (tmp_path / "split.wav").read_bytes() == expected
    figures = json.loads(results["om"].stdout)
    assert figures["backend"] == "om (simulated)"
    assert "nothing here is a device result" in results["om"].stderr
    assert "each frame: 1 launches, 2 copies up (136 B), 1 down (128 B)" in results["om"].stderr
    assert "opened: codec_stream: om (simulated) Ascend910B4, codec_stream-B1-F8.om" in results["om"].stderr
    assert "codec: new rows by one 2-D copy per stage and span" in results["om"].stderr
    moved = re.search(r"codec_stream, last launch: 1 launches, 1 copies up \((\d+) B\)", results["om"].stderr)
    assert moved and int(moved[1]) < 1024, results["om"].stderr  # the rings stay; test_om_codec.py pins the bytes


def spoken_by_server(artifacts: Path, clip: Path, *options: str) -> tuple[str, bytes]:
    """The backend that run-om serve names, and one request as raw PCM; the process has ended when this returns."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", "from runtime.cli import cli; cli()", "serve", str(artifacts), *options]
    command += ["--batch", "1", "--port", str(port), "--voices", str(clip.parent / "voices")]
    server = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        state = {"backend": ""}
        while not state["backend"] and server.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                state = httpx.get(f"{url}/ready", trust_env=False).json()
            time.sleep(0.05)
        reference = "data:audio/wav;base64," + base64.b64encode(clip.read_bytes()).decode()
        body = {"input": "hello there", "ref_audio": reference, "response_format": "pcm", "max_new_tokens": 12}
        answers = [httpx.post(f"{url}/v1/audio/speech", json=body, trust_env=False, timeout=60) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        assert answers[0].content == answers[1].content
        return state["backend"], answers[0].content
    finally:
        server.terminate()
        server.communicate(timeout=30)


def test_the_server_on_the_simulator_answers_with_the_bytes_of_onnx_runtime(artifacts: Path, clip: Path) -> None:
    backend, spoken = spoken_by_server(artifacts, clip, "--backend", "om", "--simulate")
    assert backend == "om (simulated)"
    assert len(spoken) > 2 * 384 and np.frombuffer(spoken, "<i2").any()
    assert spoken == spoken_by_server(artifacts, clip, "--backend", "ort", "--threads", "1")[1]


def test_without_cann_say_exits_with_the_reason_and_what_to_do(artifacts: Path, clip: Path, tmp_path: Path) -> None:
    result = say(artifacts, clip, tmp_path / "x.wav", "--backend", "om")
    assert result.exit_code == 1
    assert "set_env.sh" in result.stderr
    assert not (tmp_path / "x.wav").exists()


def test_the_codec_on_the_simulator_equals_onnx_runtime(artifacts: Path) -> None:
    manifest = Manifest.load(artifacts)
    waveform = np.random.default_rng(0).normal(0, 0.1, (2, 384 * 40)).astype(np.float32)
    found = []
    for name, options in (("ort", BackendOptions(threads=1)), ("om", BackendOptions(simulate=True))):
        backend = open_backend(name, manifest, options=options, report=lambda line: None)
        with open_codec(manifest, backend) as codec:
            codes = codec.encode(waveform)
            found.append((codes, codec.decode(codes[:21])))
    om_device.close_all()
    uninstall()
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], atol=2e-6)


def test_the_self_test_writes_one_report_that_says_simulated(artifacts: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    result = run_om("selftest", "--backend", "om", "--artifacts", artifacts, "--simulate", "--out", tmp_path)
    report = json.loads((tmp_path / "selftest.json").read_text())
    verdicts = {step["name"]: step["verdict"] for step in report["steps"]}
    unmeasured = {"cann", "atc-exit", "atc-precheck", "aliasing", "speed"}
    assert {name for name, verdict in verdicts.items() if verdict != "pass"} == unmeasured, report["steps"]
    assert {verdicts[name] for name in unmeasured} == {"not measured"}
    assert (report["verdict"], report["simulated"], result.exit_code) == ("pass", True, 0)
    page = (tmp_path / "selftest.md").read_text()
    assert "# Self-test of the OM backend (simulated)" in page
    assert "nothing here is a device result" in page
    assert "pass  codes: 640 codes identical" in result.output


def test_the_self_test_fails_on_another_chip_and_measures_nothing_there(artifacts: Path, tmp_path: Path) -> None:
    from runtime.backends.simulator import SimulatorConfig, install

    install(SimulatorConfig(soc="Ascend910B3"))
    result = run_om("selftest", "--artifacts", artifacts, "--out", tmp_path)
    report = json.loads((tmp_path / "selftest.json").read_text())
    verdicts = {step["name"]: step["verdict"] for step in report["steps"]}
    assert (result.exit_code, report["verdict"], verdicts["device"]) == (1, "fail", "fail")
    assert {verdicts[name] for name in ("copy-2d", "load", "graphs", "codes", "speed")} == {"not measured"}
    assert "has no .om for Ascend910B3 (compiled: Ascend910B4)" in result.output


def test_the_self_test_finds_a_graph_that_computes_something_else(artifacts: Path, tmp_path: Path) -> None:
    """The weights of ONNX Runtime's side are another model's: what a stale .om looks like."""
    other = Path(shutil.copytree(artifacts, tmp_path / "other"))
    raw = np.fromfile(other / "weights.bin", np.float32)
    raw[: len(raw) // 2] *= np.float32(1.01)
    raw.tofile(other / "weights.bin")  # the fake .om files still point at the old directory
    result = run_om("selftest", "--artifacts", other, "--simulate", "--out", tmp_path, "--only", "graphs,repeat")
    assert run_om("selftest", "--artifacts", other, "--simulate", "--only", "grafs").exit_code == 1
    report = json.loads((tmp_path / "selftest.json").read_text())
    steps = {step["name"]: step for step in report["steps"]}
    assert result.exit_code == 1
    assert list(steps) == ["device", "graphs", "repeat"]
    assert steps["graphs"]["verdict"] == "fail"
    assert "allowed" in steps["graphs"]["detail"]
    assert steps["repeat"]["verdict"] == "pass"


def test_inspect_shows_every_file_of_an_artifacts_directory(artifacts: Path) -> None:
    result = run_om("inspect", artifacts, "--json")
    files = {Path(f["path"]).name: f for f in json.loads(result.stdout)["files"]}
    assert {"step.onnx", "step_frame-B1-C272.om", "codec_stream-B1-F8.om"} <= set(files)
    step = files["step.onnx"]
    assert step["target"]["opset"] == "ai.onnx 17"
    assert step["nodes"]["MatMul"] >= 4 * 3
    assert step["external_data"]["weights.bin"] == (artifacts / "weights.bin").stat().st_size
    assert tuple(step["inputs"][0]["shape"]) == ("B", 1, 17)
    om = files["step_frame-B1-C272.om"]
    assert (om["kind"], om["target"]["soc"], om["num_bytes"]) == (
        "fake om",
        "Ascend910B4",
        (artifacts / "om/Ascend910B4-origin/step_frame-B1-C272.om").stat().st_size,
    )
    assert "step_frame compiled for Ascend910B4" in om["remarks"]


def test_inspect_predicts_engines_for_a_target(artifacts: Path) -> None:
    result = run_om("inspect", artifacts / "step.onnx", "--target", "910B4", "--json")
    report = json.loads(result.stdout)
    assert sum(report["engines"].values()) == sum(report["nodes"].values())
    assert report["engines"]["aicore"] > 50
    text = run_om("inspect", artifacts / "step.onnx", "--target", "910B4").stdout
    assert "engines (predicted): aicore" in text
    assert run_om("inspect", artifacts / "step.onnx", "--target", "Ascend910B").exit_code == 1


def test_inspect_says_what_it_cannot_know_of_a_real_om(artifacts: Path, tmp_path: Path) -> None:
    (tmp_path / "alone.om").write_bytes(b"IMOD" + bytes(400))
    alone = run_om("inspect", tmp_path / "alone.om")
    assert alone.exit_code == 0
    assert "atc --mode=6" in alone.stdout
    assert "nothing more of a compiled graph can be read" in alone.stdout
    # The same bytes where a build is recorded: the manifest knows interface and target, and that the bytes changed.
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    (copy / "om/Ascend910B4-origin/frame-B1.om").write_bytes(b"IMOD" + bytes(400))
    known = run_om("inspect", copy / "om/Ascend910B4-origin/frame-B1.om").stdout
    assert "soc: Ascend910B4" in known
    assert "in   uniforms: float32[1, 17]" in known
    assert "CHANGED since" in known


@pytest.mark.parametrize("content", [None, b"no protobuf at all \xff\xff"])
def test_inspect_of_what_is_no_graph_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.onnx").write_bytes(content)
    result = run_om("inspect", tmp_path / "x.onnx")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_the_bench_runs_compiled_graphs_and_says_that_they_were_simulated(artifacts: Path, tmp_path: Path) -> None:
    protocol = tmp_path / "protocol.json"
    protocol.write_text('{"prompt_rows": 40, "frames": 12, "repeat": 2, "encode_seconds": 0.5}')
    result = run_om("bench", artifacts, "--backend=om", "--simulate", "--protocol", protocol, "--json")
    found = json.loads(result.stdout)
    assert "simulated" in found["backend"] and "nothing here is a device result" in result.stderr
    stages = {stage["name"]: stage["calls"] for stage in found["stages"]}
    assert (stages["prefill"], stages["frame"], stages["step_frame"]) == (2, 2, 2 * 11)
    assert found["roofline_frames_per_second"] is None and found["cache_curve"] == []
