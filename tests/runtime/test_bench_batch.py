"""Several utterances in one step_frame: each is spoken exactly as alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from runtime.backends.ort import OrtBackend
from runtime.bench import BenchProtocol, prompt_rows
from runtime.bench_batch import BatchModel, measure_batch
from runtime.cli import cli
from runtime.frame_model import HostFrameModel
from runtime.manifest import Manifest
from runtime.sampling import SamplingParams, draw_uniforms

PROTOCOL = BenchProtocol(prompt_rows=30, frames=10, repeat=1)


@pytest.fixture(scope="module")
def manifest(tiny_artifacts):
    return Manifest.load(tiny_artifacts)


@pytest.mark.parametrize("greedy", [False, True])
def test_each_utterance_of_a_batch_is_spoken_as_alone(manifest, greedy):
    """Alone means the product's own frame model, which knows nothing of batches."""
    sampling = SamplingParams.greedy(1.1) if greedy else SamplingParams()
    prompts = [prompt_rows(manifest.model, BenchProtocol(prompt_rows=n, seed=n)) for n in (30, 11, 24)]
    backend = OrtBackend(1)
    model = HostFrameModel(manifest, backend)
    alone = []
    for seed, prompt in enumerate(prompts):
        rng = np.random.default_rng(seed)
        model.prefill(prompt)
        alone.append([model.next_frame(draw_uniforms(rng, 16), sampling).codes.copy() for _ in range(10)])
    sessions = {n: backend.open(manifest.graph(n).spec, manifest.path(manifest.graph(n).file))
                for n in ("prefill", "frame", "step_frame")}  # fmt: skip
    together = BatchModel(manifest.model, sessions).speak(prompts, [0, 1, 2], sampling, 10).codes
    np.testing.assert_array_equal(together, np.array(alone))
    assert not np.array_equal(together[0], together[1])


def test_the_measurement_compares_with_each_alone(manifest):
    one, three = measure_batch(manifest, OrtBackend(1), 3, PROTOCOL)
    assert (one.batch, three.batch) == (1, 3) and one.same_codes and three.same_codes
    assert min(one.frames_per_second, three.frames_per_second) > 0


def test_the_command_prints_both_sizes(tiny_artifacts, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"prompt_rows": 9, "frames": 3, "repeat": 1}))
    command = ["bench", str(tiny_artifacts), "--threads", "1", "--protocol", str(tmp_path / "p.json"), "--batch", "2"]
    ran = CliRunner().invoke(cli, command)
    assert ran.exit_code == 0, ran.output
    assert "B = 2" in ran.stdout and ran.stdout.count("codes as alone") == 2
    refused = CliRunner().invoke(cli, [*command, "--backend", "om", "--simulate"])
    assert refused.exit_code == 1 and "--batch runs on ort and torch" in refused.stderr
