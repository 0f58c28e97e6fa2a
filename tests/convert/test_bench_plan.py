"""The prediction says that it is one, and its sums follow from the graphs."""

from __future__ import annotations

import pytest

from convert.bench_plan import as_text, plan_speed
from op_patches.targets import Target
from runtime.errors import BenchError
from runtime.manifest import Manifest


def test_the_plan_is_labelled_and_counts_what_a_frame_moves(tiny_artifacts):
    manifest = Manifest.load(tiny_artifacts)
    plan = plan_speed(manifest, Target.parse("910B4,precision=fp16"))
    assert "PREDICTION" in as_text(plan) and plan.to_dict()["prediction"] is True
    one, two = plan.frames
    assert (one.launches, two.launches) == (1, 2) and (one.bytes_up, one.bytes_down) == (136, 128)
    for graph in plan.graphs:
        assert 0 < graph.kernels < graph.kernels_before_fusion <= graph.nodes


def test_a_chip_without_a_cost_model_is_refused(tiny_artifacts):
    with pytest.raises(BenchError, match="no cost model"):
        plan_speed(Manifest.load(tiny_artifacts), Target.parse("910B1"))
