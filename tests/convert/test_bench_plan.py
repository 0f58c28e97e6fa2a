"""The prediction says that it is one, and its sums follow from the graphs."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from convert.bench_plan import as_text, plan_speed
from convert.bench_variants import VARIANTS
from convert.patched_graphs import lower_graph
from op_patches.targets import Target
from runtime.cli import cli
from runtime.errors import BenchError
from runtime.graphs import DEVICE_GRAPHS
from runtime.manifest import Manifest


def test_the_plan_is_labelled_and_counts_what_a_frame_moves(tiny_artifacts):
    manifest = Manifest.load(tiny_artifacts)
    plan = plan_speed(manifest, Target.parse("910B4,precision=fp16"))
    assert "PREDICTION" in as_text(plan) and plan.to_dict()["prediction"] is True
    one, two = plan.frames
    assert (one.launches, two.launches) == (1, 2) and (one.bytes_up, one.bytes_down) == (136, 128)
    for graph in plan.graphs:
        assert 0 < graph.kernels < graph.kernels_before_fusion <= graph.nodes
    host = {(g.graph, g.axes.get("T")): (g.bytes_up, g.bytes_down) for g in plan.graphs}
    rows = 4 * 128 * (1 + manifest.model.n_vq)
    assert host["prefill", 128][0] > rows + 4 * 1024 and host["prefill", 128][1] == 0  # rows and the cache mask
    stream = next(g for g in plan.graphs if g.graph == "codec_stream" and g.axes["F"] == 8)
    positions = sum(4 * stage.ring_frames for stage in manifest.codec.decoder) + 4 * 8
    samples = 8 * 4 * manifest.codec.num_channels * manifest.codec.samples_per_frame
    assert (stream.bytes_up, stream.bytes_down) == (4 * 8 * manifest.codec.n_vq + positions, samples)  # no rings
    assert host["step_frame", None] == (136, 128) and host["step", None] == (None, None)


@pytest.mark.parametrize("soc", ["910B4", "310P3"])
def test_the_plan_counts_the_nodes_that_atc_would_get(tiny_artifacts, soc):
    manifest, target = Manifest.load(tiny_artifacts), Target.parse(f"{soc},precision=fp16")
    planned = {graph.graph: graph.nodes for graph in plan_speed(manifest, target).graphs}
    lowered, report = lower_graph(manifest, "step_frame", target)
    assert planned["step_frame"] == len(lowered.graph.node) > manifest.graph("step_frame").num_nodes
    assert {rule.rule for rule in report.rules if rule.count} >= {"layer_norm", "gelu_pattern"}


def test_each_exact_saving_never_adds_kernels_and_work_together(tiny_artifacts):
    before = sorted(tiny_artifacts.iterdir())
    plan = plan_speed(Manifest.load(tiny_artifacts), Target.parse("910B4,precision=fp16"), with_savings=True)
    assert {s.saving for s in plan.savings} == {v.saving for v in VARIANTS.values()}
    for saving in plan.savings:
        assert saving.kernels < saving.kernels_before or saving.gflop < saving.gflop_before, saving
        assert f"{saving.kernels_before} -> {saving.kernels} kernels" in as_text(plan)
    assert sorted(tiny_artifacts.iterdir()) == before  # the variants leave nothing behind


def test_the_command_predicts_and_says_so(tiny_artifacts):
    arguments = [str(tiny_artifacts), "--target", "310P3,precision=fp16"]
    result = CliRunner().invoke(cli, ["bench", "--plan", *arguments])
    assert result.exit_code == 0, result.output
    assert "PREDICTION" in result.stdout and "310P3" in result.stdout and "step_frame" in result.stdout
    data = json.loads(CliRunner().invoke(cli, ["bench", *arguments, "--plan", "--json"]).stdout)
    assert {graph["graph"] for graph in data["graphs"]} == set(DEVICE_GRAPHS) - {"codec_decode"}  # nothing runs it


def test_without_the_packages_of_convert_one_line_says_what_to_install(tiny_artifacts, monkeypatch):
    monkeypatch.setitem(sys.modules, "convert.bench_plan", None)
    result = CliRunner().invoke(cli, ["bench", "--plan", str(tiny_artifacts)])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "[convert]" in result.stderr


def test_a_chip_without_a_cost_model_is_refused(tiny_artifacts):
    with pytest.raises(BenchError, match="no cost model"):
        plan_speed(Manifest.load(tiny_artifacts), Target.parse("910B1"))
