"""Our own graphs on the way to ATC: patched for each target, nothing blocks, counts follow from the architecture,
and the patched files still say the same codes."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from op_patches.patch_file import patch_file
from op_patches.pipeline import apply_lowerings
from op_patches.readiness import check_model
from op_patches.targets import Engine, Target
from runtime.backends.ort import OrtBackend
from runtime.frame_model import HostFrameModel
from runtime.generate import generate
from runtime.graphs import DEVICE_GRAPHS, derived_axes
from runtime.manifest import Manifest
from runtime.sampling import SamplingParams

A2_85, A2_91, P3_FLOAT32, P3_FLOAT16 = TARGETS = (
    "cann=8.5,soc=Ascend910B4",
    "cann=9.1,soc=Ascend910B4",
    "cann=8.5,soc=Ascend310P3,precision=origin",
    "cann=8.5,soc=Ascend310P3,precision=fp16",
)
# Besides LayerNormalization: 310P computes float32 products on its vector unit, and float16 needs GELU without x^3.
ALSO = {P3_FLOAT32: {"matmul_310p", "lifted_weights"}, P3_FLOAT16: {"gelu_pattern"}}


@pytest.fixture(scope="module")
def manifest(tiny_artifacts):
    return Manifest.load(tiny_artifacts)


def layer_norms(manifest):
    """2 x layers + 1 per transformer; `frame` repeats the local one, its first LayerNorm being a table but once."""
    model, codec = manifest.model, manifest.codec
    step = 2 * model.num_layers + 1
    frame = model.n_vq * (2 * model.local_layers + 1) - (model.n_vq - 1)
    encoder, decoder = (2 * sum(s.num_layers for s in stages) for stages in (codec.encoder, codec.decoder))
    return {
        "prefill": step, "step": step, "frame": frame, "step_frame": step + frame,
        "codec_encode": encoder, "codec_decode": decoder, "codec_stream": decoder,
    }  # fmt: skip


def bound_shapes(manifest, name, num_frames=8):
    """The input shapes of one static build."""
    axes = {"B": 1, "T": 128, "C": 1024, **derived_axes(manifest.codec, num_frames)}
    spec = manifest.graph(name).spec
    bound = spec.bind(**{axis: axes[axis] for axis in spec.dynamic_axes()})
    return {tensor.name: tensor.bound_shape for tensor in bound.inputs}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DEVICE_GRAPHS)
def test_a_patched_graph_is_ready_and_its_counts_follow_from_the_architecture(manifest, name, target):
    target = Target.parse(key := target)
    model = onnx.load(manifest.path(manifest.graph(name).file), load_external_data=False)
    shapes = bound_shapes(manifest, name)
    patched, report = apply_lowerings(model, target, input_shapes=shapes)
    assert report.counts["layer_norm"] == layer_norms(manifest)[name]
    assert set(report.counts) <= {"layer_norm"} | ALSO.get(key, set())  # the export needs nothing else
    assert not any(node.op_type == "LayerNormalization" for node in patched.graph.node)
    assert not report.remaining and not report.refusals
    found = check_model(patched, target, shapes)
    assert not found.blocking, [str(f.message) for f in found.blocking]
    assert set(found.engines) == {Engine.AICORE, Engine.LOCAL}
    assert not found.remarks


@pytest.mark.parametrize("num_frames", [1, 8])
def test_one_patched_stream_serves_every_chunk_size_on_310p(manifest, num_frames):
    target = Target.parse(P3_FLOAT32)
    model = onnx.load(manifest.path(manifest.graph("codec_stream").file), load_external_data=False)
    batch_only = {
        tensor.name: [1 if d == "B" else d if isinstance(d, int) else -1 for d in tensor.shape]
        for tensor in manifest.graph("codec_stream").spec.inputs
    }
    patched, report = apply_lowerings(model, target, input_shapes=batch_only)
    assert not report.refusals
    found = check_model(patched, target, bound_shapes(manifest, "codec_stream", num_frames))
    assert set(found.engines) == {Engine.AICORE, Engine.LOCAL}


def test_patched_graphs_say_upstreams_codes(golden_llm, tmp_path):
    source = golden_llm.manifest
    graphs = {}
    for name in ("prefill", "frame", "step_frame"):
        graph = source.graph(name)
        patch_file(source.path(graph.file), tmp_path / graph.file, Target.parse(A2_85))
        graphs[name] = graph
    model = HostFrameModel(dataclasses.replace(source, directory=tmp_path, graphs=graphs), OrtBackend(1))
    for tag, penalty in (("greedy", 1.0), ("greedy_pen1.2", 1.2)):
        rows = golden_llm.golden["prompt_input_ids"]
        result = generate(model, rows, 0, SamplingParams.greedy(penalty), max_frames=12)
        assert np.array_equal(result.codes, golden_llm.golden[f"{tag}_frames"])
