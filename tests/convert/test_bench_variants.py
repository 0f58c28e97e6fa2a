"""Every exact saving leaves the codes as they are: greedy and seeded, against the graph that does the whole work."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from convert.bench_variants import VARIANTS, export_variant
from runtime.backends.ort import OrtBackend
from runtime.bench import BenchProtocol, prompt_rows
from runtime.errors import ExportError
from runtime.frame_model import HostFrameModel
from runtime.generate import generate
from runtime.manifest import Manifest
from runtime.sampling import SamplingParams, draw_uniforms

FRAMES = 12


@pytest.fixture(scope="module")
def manifest(tiny_artifacts):
    return Manifest.load(tiny_artifacts)


def codes(manifest):
    """Forced frames by mode: the stop decision is compared, not obeyed."""
    found = {}
    model = HostFrameModel(manifest, OrtBackend(1), fused=False)
    for mode, (sampling, seed) in MODES.items():
        rng = np.random.default_rng(seed)
        model.prefill(prompt_rows(manifest.model, BenchProtocol(prompt_rows=33, seed=seed)))
        frames = [model.next_frame(draw_uniforms(rng, 16), sampling) for _ in range(FRAMES)]
        found[mode] = np.array([[int(frame.go_on), *frame.codes] for frame in frames])
    model.close()
    return found


@pytest.fixture(scope="module")
def expected(manifest):
    return codes(manifest)


MODES = {
    "greedy": (SamplingParams.greedy(1.2), 0),
    "sampled": (SamplingParams(), 1),
    "wide": (SamplingParams(temperature=1.5, top_k=50, top_p=1.0), 2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_saving_leaves_greedy_and_seeded_codes_as_they_are(manifest, expected, name, tmp_path):
    variant = export_variant(manifest, name, tmp_path / name)
    found = codes(variant)
    for mode in MODES:
        np.testing.assert_array_equal(found[mode], expected[mode], err_msg=mode)
    assert len(np.unique(expected["sampled"][:, 1:])) > FRAMES  # a model that repeats itself would prove nothing
    assert work(variant, VARIANTS[name].graph) != work(manifest, VARIANTS[name].graph)  # it does do something else


def work(manifest, graph):
    """How often the graph has each operator that a saving is about."""
    file = str(manifest.path(manifest.graph(graph).file))
    types = [n.op_type for n in onnx.load(file, load_external_data=False).graph.node]
    return {t: types.count(t) for t in ("MatMul", "Concat", "Cos", "Mul", "Gather")}


def test_generation_and_forced_frames_agree(manifest, expected):
    """The loop of these tests is the loop of the product, but for the ending."""
    model = HostFrameModel(manifest, OrtBackend(1))
    rows = prompt_rows(manifest.model, BenchProtocol(prompt_rows=33, seed=1))
    spoken = generate(model, rows, 1, SamplingParams(), max_frames=FRAMES)
    model.close()
    np.testing.assert_array_equal(spoken.codes, expected["sampled"][: spoken.num_frames, 1:])


def test_an_unknown_variant_is_refused(manifest, tmp_path):
    with pytest.raises(ExportError, match="no variant fast; variants: joined-cache"):
        export_variant(manifest, "fast", tmp_path / "x")
