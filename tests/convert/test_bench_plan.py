"""The prediction for a device: its arithmetic follows from the graphs, and it never looks like a measurement."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from convert.bench_plan import DEVICES, as_text, plan_speed
from convert.cli import cli
from op_patches.targets import Target
from runtime.manifest import Manifest


@pytest.fixture(scope="module")
def manifest(tiny_artifacts):
    return Manifest.load(tiny_artifacts)


@pytest.fixture(scope="module")
def plan(manifest):
    return plan_speed(manifest, Target.parse("910B4,precision=fp16"))


def test_a_step_does_the_products_of_its_weights(manifest, plan):
    """2 FLOP per weight of every linear, plus attention over the cache: counted by hand from the config."""
    model = manifest.model
    (step,) = [g for g in plan.graphs if g.graph == "step"]
    e, inner, capacity = model.hidden_size, model.inner_size, step.axes["C"]
    linear = model.num_layers * (e * 3 * e + e * e + 2 * e * inner)
    attention = model.num_layers * 2 * capacity * e
    assert step.flops == pytest.approx(2 * (linear + attention), rel=0.15)  # the rest is element-wise


def test_one_launch_is_the_sum_of_its_parts_and_fusion_only_saves(plan):
    graphs = {g.graph: g for g in plan.graphs if g.graph in ("step", "frame", "step_frame")}
    assert graphs["step_frame"].kernels == graphs["step"].kernels + graphs["frame"].kernels
    assert all(g.kernels < g.kernels_before_fusion <= g.nodes for g in plan.graphs)
    one, two = plan.frames
    assert (one.launches, two.launches) == (1, 2) and one.predicted_ms < two.predicted_ms


def test_a_frame_moves_what_the_om_backend_counts(plan):
    assert all(f.bytes_up <= 1024 and f.bytes_down <= 128 for f in plan.frames)


def test_the_text_says_that_it_is_a_prediction_and_names_every_assumption(plan):
    text = as_text(plan)
    assert text.startswith("PREDICTION") and "not measured" in text.splitlines()[0]
    assert DEVICES["910b"].note in text and "assumed" in text


def test_the_command_and_another_chip(tiny_artifacts):
    run = CliRunner().invoke(cli, ["bench-plan", str(tiny_artifacts), "--target", "310P3,precision=fp16", "--json"])
    assert run.exit_code == 0, run.output
    data = json.loads(run.stdout)
    assert len(data["frames"]) == 2 and any("310P3" in a for a in data["assumptions"])
