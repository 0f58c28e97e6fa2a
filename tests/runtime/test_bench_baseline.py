"""run-om bench --baseline: our loop beside a package with the published interface, each in a process of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from runtime.backends.select import BackendOptions
from runtime.bench import BenchProtocol
from runtime.bench_baseline import OURS, QUIET, STOCK, Side, _speak, measure_baseline, open_side
from runtime.bench_baseline_report import as_html, as_text
from runtime.cli import cli
from runtime.errors import BenchError
from runtime.frame_model import Frame
from runtime.manifest import Manifest

PROTOCOL = BenchProtocol(prompt_rows=21, frames=6, repeat=1, encode_seconds=0.5)


def test_both_loops_say_the_same_and_every_figure_has_a_ratio(tiny_artifacts: Path, tiny_package: Path, tmp_path: Path):
    protocol, out = tmp_path / "protocol.json", tmp_path / "side_by_side.json"
    protocol.write_text(json.dumps({"prompt_rows": 21, "frames": 6, "repeat": 1, "encode_seconds": 0.5}))
    command = ["bench", tiny_artifacts, "--baseline", tiny_package, "--threads", 1]
    command += ["--protocol", protocol, "--out", out]
    result = CliRunner().invoke(cli, [str(part) for part in command])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert [side["name"] for side in found["sides"]] == [OURS, STOCK, QUIET]
    for name in (STOCK, QUIET):
        ratios = found["ratios"][name]
        assert ratios.pop("same_codes") is True
        stages = {"prefill", "frame", "encode", "decode_150", "stream_1", "stream_8"}
        assert set(ratios) == {*stages, "load", "llm_peak_rss", "peak_rss"}
        assert all(ratio > 0 for ratio in ratios.values())
        side = next(s for s in found["sides"] if s["name"] == name)
        assert ratios["frame"] == side["milliseconds"]["frame"] / found["sides"][0]["milliseconds"]["frame"]
        assert ratios["peak_rss"] == side["peak_rss_bytes"] / found["sides"][0]["peak_rss_bytes"]
        assert side["peak_rss_bytes"] >= side["llm_peak_rss_bytes"] > 2**24
    assert "made-up weights" in result.stdout and "official loop, spinning off" in result.stdout
    assert "the same codes" in out.with_suffix(".html").read_text()


class Ending:
    """A frame model that wants to end at frames 0 and 3, where its codes mean nothing."""

    def __init__(self, meaningless: int) -> None:
        self.number, self.forced, self.meaningless = -1, [], meaningless

    def prefill(self, rows) -> None:
        assert len(rows) == 21

    def next_frame(self, uniforms, sampling) -> Frame:
        self.number += 1
        go_on = self.number not in (0, 3)
        return Frame(go_on, np.full(16, self.number if go_on else self.meaningless, np.int32))

    def force_frame(self, codes) -> None:
        self.forced.append((self.number, int(codes[0])))


def test_what_a_graph_computes_behind_the_end_is_not_compared():
    """The published fixed graph reads the end token there, ours the slot token: the frame before is repeated."""
    rows = np.zeros((21, 17), np.int32)
    models = Ending(7), Ending(8)
    first, second = (_speak(model, rows, PROTOCOL)["codes"] for model in models)
    assert first == second
    assert np.frombuffer(first, np.int32).reshape(-1, 16)[:, 0].tolist() == [0, 0, 1, 2, 2, 4, 5]
    assert models[0].forced == models[1].forced == [(0, 0), (3, 2)]


def test_other_weights_are_called_so(tiny_artifacts: Path, tiny_package: Path, tmp_path: Path):
    other = Path(shutil.copytree(tiny_package, tmp_path / "other"))
    file = next(other.glob("*/moss_tts_prefill.onnx"))
    model = onnx.load(file)
    bias = next(t for t in model.graph.initializer if list(t.dims) == [t.dims[0]] and t.dims[0] > 16)
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + 3, bias.name))
    onnx.save(model, file)
    result = measure_baseline(Manifest.load(tiny_artifacts), other, BackendOptions(threads=1), PROTOCOL)
    assert "DIFFER" in as_html(result) and "NO" in as_text(result)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("moss_tts_decode_step.onnx", "official loop: .*moss_tts_decode_step.onnx"),
        ("browser_poc_manifest.json", "official loop: .*browser_poc_manifest.json"),
    ],
)
def test_a_side_that_cannot_load_is_named(
    tiny_artifacts: Path, tiny_package: Path, tmp_path: Path, lost: str, words: str
):
    broken = Path(shutil.copytree(tiny_package, tmp_path / "broken"))
    next(broken.glob(f"*/{lost}")).unlink()
    with pytest.raises(BenchError, match=words):
        measure_baseline(Manifest.load(tiny_artifacts), broken, BackendOptions(threads=1), PROTOCOL)


def test_the_baseline_belongs_to_onnx_runtime(tiny_artifacts: Path, tiny_package: Path):
    command = ["bench", str(tiny_artifacts), "--baseline", str(tiny_package), "--backend", "torch"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1
    assert "--baseline compares loops on ONNX Runtime and the CPU, not on torch" in result.stderr


@pytest.mark.parametrize("spinning", [True, False])
def test_every_session_of_the_official_loop_spins_or_does_not(tiny_package: Path, spinning: bool):
    model, codec = open_side(Side(STOCK, tiny_package, BackendOptions(threads=2), spinning=spinning))
    sessions = [*model._sessions.values(), *codec._sessions.values()]
    assert len(sessions) == 8
    for session in sessions:
        options = session._session.get_session_options()
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == str(int(spinning))
        assert options.intra_op_num_threads == 2
        assert options.graph_optimization_level.name == "ORT_ENABLE_ALL"
    model.close()
    codec.close()
