"""The bench counts what really ran: on the tiny made-up checkpoint, without a word about how long it took."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from runtime.backends.select import BackendOptions
from runtime.bench import BenchProtocol, measure, prompt_rows
from runtime.bench_bytes import graph_bytes, read_bandwidth
from runtime.bench_diff import diff
from runtime.bench_report import as_html, as_text
from runtime.bench_sessions import Calls
from runtime.cli import cli
from runtime.errors import BenchError
from runtime.manifest import Manifest

PROTOCOL = BenchProtocol(prompt_rows=21, frames=12, repeat=2, codec_frames=4, encode_seconds=0.5,
                         cache_lengths=(16, 64), cache_calls=1)  # fmt: skip


@pytest.fixture(scope="module")
def manifest(tiny_artifacts):
    return Manifest.load(tiny_artifacts)


def measured(manifest, protocol=PROTOCOL, **options):
    return measure(manifest, BackendOptions(threads=1, **options), protocol, bandwidth_bytes=1 << 22)


@pytest.fixture(scope="module")
def result(manifest):
    return measured(manifest)


def test_every_stage_is_called_as_often_as_the_protocol_says(result):
    calls = {stage.name: stage.calls for stage in result.stages}
    assert calls == {
        "codec_encode": 2,  # 6 frames fit one call
        "prefill": 2,
        "frame": 2 * 12,
        "step": 2 * 11,
        "codec_stream": 2 * (1 + 3),  # one frame, then 4 + 4 + 3
        "host per frame": 2,
    }


def test_the_shares_of_all_stages_make_the_whole_wall_clock(result):
    assert sum(stage.share for stage in result.stages) == pytest.approx(1)
    assert all(0 < stage.share < 1 for stage in result.stages)
    assert all(0 < stage.median_ms <= stage.p95_ms for stage in result.stages)


def test_the_frame_count_is_forced_where_the_model_would_have_ended(manifest):
    """Made-up checkpoints end by themselves after 20 to 80 frames; the bench goes on."""
    protocol = dataclasses.replace(PROTOCOL, frames=90, repeat=1, cache_lengths=(), greedy=True)
    result = measured(manifest, protocol)
    assert next(s.calls for s in result.stages if s.name == "step") == 89


def test_other_ways_to_run_generate_the_same_codes(manifest, result):
    protocol = dataclasses.replace(PROTOCOL, cache_lengths=())
    for options in ({"name": "torch"}, {"split": True}, {"device_graphs": True}):
        other = measured(manifest, protocol, **options)
        assert other.codes == result.codes and other.fixture == result.fixture
    assert "step_frame" in {s.name for s in other.stages}
    assert measured(manifest, dataclasses.replace(protocol, seed=1, repeat=1, frames=2)).codes != result.codes


def test_the_bytes_of_a_step_are_its_layers_and_the_rows_that_it_looks_up(manifest):
    """Counted here from the manifest's index of weights, there from the nodes of the graph."""
    model = manifest.model
    layers = sum(w.num_bytes for n, w in manifest.weights.items() if n.startswith(("global_.layers.", "global_.ln_f.")))
    looked_up = 4 * ((1 + model.n_vq) * model.hidden_size + 2 * model.head_size)
    found = graph_bytes(manifest, "step", cache_rows=100, prompt_rows=21)
    assert 0 <= found.weights_distinct - layers - looked_up < 1024  # small constants: offsets, the padded row
    assert found.cache == 2 * model.num_layers * model.num_heads * 100 * model.head_size * 4
    frame = graph_bytes(manifest, "frame", cache_rows=100, prompt_rows=21)
    fused = graph_bytes(manifest, "step_frame", cache_rows=100, prompt_rows=21)
    assert frame.weights_read > 3 * frame.weights_distinct  # the local layer runs once per position
    assert 0.9 < (found.weights_distinct + frame.weights_distinct) / fused.weights_distinct < 1.2


def test_the_roofline_follows_from_bytes_and_bandwidth(result):
    per_frame = [b.weights_distinct + b.cache for b in result.graph_bytes if b.graph in ("step", "frame")]
    limit = result.bandwidth_bytes_per_second / sum(per_frame)
    stages = {s.name: s.limit_ms for s in result.stages}
    assert stages["step"] + stages["frame"] == pytest.approx(1e3 / limit) and stages["host per frame"] is None
    assert result.roofline_frames_per_second == pytest.approx(limit)
    assert result.roofline_share == pytest.approx(result.frames_per_second / limit)
    assert read_bandwidth(2, 1 << 22) > 1e8


def test_clocks_add_up_and_forget_the_warm_up():
    calls = Calls()
    for _ in range(3):
        with calls.clock("a"):
            pass
    assert len(calls.seconds["a"]) == 3 and calls.total == sum(calls.seconds["a"])
    calls.clear()
    assert calls.total == 0 and not calls.seconds


def test_prompt_rows_are_valid_and_come_from_the_seed(manifest):
    rows = prompt_rows(manifest.model, PROTOCOL)
    assert rows.shape == (21, 17) and rows.dtype == np.int32
    assert np.array_equal(rows, prompt_rows(manifest.model, PROTOCOL))
    assert (rows[:, 0] < manifest.model.vocab_size).all()
    assert set(rows[:5, 1:].ravel()) == {manifest.model.audio_pad_id} and (rows[5:15, 1:] < 1024).all()


def test_reports_show_stages_notes_and_the_plot(result, manifest):
    text, html = as_text(result), as_html(result)
    for word in ("step", "limit ms", "made-up weights", "roofline", "peak RSS"):
        assert word in text and word in html
    first, last = result.cache_curve
    assert last.cache_bytes - first.cache_bytes == 48 * 2 * manifest.model.num_layers * manifest.model.hidden_size * 4
    assert "reading the row once takes" in text and html.count("stroke-dasharray") == 1
    assert html.count("<circle") == 2 and "<script" not in html and "http" not in html.split("</head>")[1]


def test_results_are_compared_only_when_they_measured_the_same(result):
    a = json.loads(json.dumps(result.to_dict()))
    faster = {**a, "frames_per_second": 2 * a["frames_per_second"], "peak_rss_bytes": a["peak_rss_bytes"] // 2}
    lines = diff(a, faster).splitlines()
    assert lines[-1] == "codes: the same"
    assert all(line.endswith("2.00x") for line in lines if line.startswith(("frames per second", "peak RSS")))
    assert "DIFFERENT" in diff(a, {**a, "codes": "0"})
    with pytest.raises(BenchError, match=r"fixture"):
        diff(a, {**a, "fixture": "0"})
    with pytest.raises(BenchError, match="frames is 12 and 13"):
        diff(a, {**a, "protocol": {**a["protocol"], "frames": 13}})


def test_the_command_writes_json_and_a_page_and_compares_them(tiny_artifacts, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"prompt_rows": 9, "encode_seconds": 0.2, "cache_lengths": [8]}))
    command = ["bench", str(tiny_artifacts), "--threads", "1", "--protocol", str(tmp_path / "p.json"), "--frames", "3",
               "--repeat", "1", "--out", str(tmp_path / "a.json"), "--json"]  # fmt: skip
    ran = CliRunner().invoke(cli, command)
    assert ran.exit_code == 0, ran.output
    written = json.loads((tmp_path / "a.json").read_text())
    assert written == json.loads(ran.stdout) and written["protocol"]["frames"] == 3
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    compared = CliRunner().invoke(cli, ["bench", "diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")])
    assert compared.exit_code == 0 and "codes: the same" in compared.output


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ('{"frames": 0}', "frames: expected a whole number from 1 on"),
        ('{"speed": 1}', "expected an object with fields of"),
        ("[", "expected a JSON file"),
        ('{"frames": 100000}', "was exported for"),
        ('{"encode_seconds": "x"}', "encode_seconds"),
        ('{"cache_lengths": 8}', "cache_lengths"),
        ('{"seed": "x"}', "expected seed from 0 on"),
    ],
)
def test_a_bad_protocol_is_one_line_and_exit_1(tiny_artifacts, tmp_path, protocol, message):
    (tmp_path / "p.json").write_text(protocol)
    ran = CliRunner().invoke(cli, ["bench", str(tiny_artifacts), "--protocol", str(tmp_path / "p.json")])
    assert ran.exit_code == 1 and message in ran.stderr and ran.stderr.count("\n") == 1


def test_comparing_what_is_no_result_is_one_line(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    ran = CliRunner().invoke(cli, ["bench", "diff", str(tmp_path / "x.json"), str(tmp_path / "y.json")])
    assert ran.exit_code == 1 and "schema" in ran.stderr and ran.stderr.count("\n") == 1
