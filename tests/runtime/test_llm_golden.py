"""The language model against upstream's own outputs (tests/data/nano), on ONNX Runtime and on PyTorch.

Tolerance 2e-5 absolute: the golden README states it for float32 implementations; code sequences must be exact.
"""

from __future__ import annotations

import numpy as np
import pytest

from runtime.backends.ort import OrtBackend
from runtime.backends.shared import SharedBackend
from runtime.backends.torch import TorchBackend
from runtime.frame_model import HostFrameModel
from runtime.generate import generate
from runtime.sampling import SamplingParams

ATOL = 2e-5


@pytest.fixture(params=["ort", "ort shared", "torch"])
def backend(request, golden_llm):
    if request.param == "torch":
        return TorchBackend(golden_llm.manifest)
    ort = OrtBackend(threads=1)
    return SharedBackend(ort, golden_llm.manifest) if request.param == "ort shared" else ort


@pytest.fixture(params=["fused", "two calls"])
def model(request, golden_llm, backend):
    model = HostFrameModel(golden_llm.manifest, backend, fused=request.param == "fused")
    yield model
    model.close()


def run_frames(model, rows, uniforms, sampling, forced=None, go_always=False):
    """Frames for given uniforms [S, 1 + n_vq]; the loop goes on after a stop decision when asked to."""
    model.prefill(rows)
    frames = []
    for i, u in enumerate(uniforms):
        frames.append(model.next_frame(u[None].astype(np.float32), sampling, keep_logits=True))
        if forced is not None:
            model.force_frame(forced[i])
        if not (frames[-1].go_on or go_always):
            break
    return frames


def test_prefill_gives_upstreams_hidden_state_and_cache(golden_llm, backend):
    manifest, golden = golden_llm.manifest, golden_llm.golden
    graph = manifest.graph("prefill")
    rows = golden["prompt_input_ids"]
    padded = np.concatenate([rows, rows[:9]])  # right padding must not matter
    feeds = {
        "rows": padded[None].astype(np.int32),
        "positions": np.arange(len(padded), dtype=np.int32)[None],
        "last": np.array([len(rows) - 1], np.int32),
    }
    with backend.open(graph.spec, manifest.path(graph.file)) as session:
        outputs = session.run(feeds)
    np.testing.assert_allclose(outputs["hidden"][0], golden["prefill_hidden"][-1], atol=ATOL)
    d = manifest.model.head_size
    pairs = np.argsort(np.r_[np.arange(0, d, 2), np.arange(1, d, 2)])  # our halves back to neighbouring pairs
    last = manifest.model.num_layers - 1
    for ours, theirs, order in (("key_0", "prefill_k_layer0", pairs), ("value_0", "prefill_v_layer0", slice(None)),
                                (f"key_{last}", "prefill_k_last", pairs)):  # fmt: skip
        rows_first = outputs[ours][0, :, : len(rows)].transpose(1, 0, 2)[..., order]
        np.testing.assert_allclose(rows_first, golden[theirs], atol=ATOL)


@pytest.mark.parametrize(("tag", "penalty"), [("greedy", 1.0), ("greedy_pen1.2", 1.2)])
def test_greedy_codes_and_logits_are_upstreams(golden_llm, model, tag, penalty):
    golden = golden_llm.golden
    result = generate(
        model, golden["prompt_input_ids"], 0, SamplingParams.greedy(penalty), max_frames=12, keep_logits=True
    )
    assert np.array_equal(result.codes, golden[f"{tag}_frames"])
    assert (result.finish_reason == "stop") == bool(golden[f"{tag}_stopped"])
    for i, frame in enumerate(result.frames):
        np.testing.assert_allclose(frame.hidden, golden[f"{tag}_global_hidden"][i], atol=ATOL)
        np.testing.assert_allclose(frame.slot_logits, golden[f"{tag}_slot_end_logits"][i], atol=ATOL)
    name = next(key for key in golden if key.startswith(f"{tag}_audio_logits"))
    for frame, logits in zip(result.frames, golden[name], strict=False):
        np.testing.assert_allclose(frame.code_logits, logits, atol=ATOL)


def test_teacher_forced_hidden_states_stay_upstreams_for_40_frames(golden_llm, model):
    golden = golden_llm.golden
    uniforms = np.full((41, 17), 0.5)
    forced = np.concatenate([golden["forced_frames"], golden["forced_frames"][:1]])
    frames = run_frames(model, golden["prompt_input_ids"], uniforms, SamplingParams.greedy(), forced, go_always=True)
    hidden = np.stack([f.hidden for f in frames[1:]])
    np.testing.assert_allclose(hidden, golden["forced_hidden"], atol=ATOL)


@pytest.mark.parametrize("tag", ["fixed", "fixed_forced", "fixed_mid"])
def test_sampled_codes_follow_the_recorded_uniforms(golden_llm, model, tag):
    golden = golden_llm.golden
    uniforms = np.concatenate([golden[f"{tag}_assistant_u"][:, None], golden[f"{tag}_audio_u"]], axis=1)
    # the loop of these runs went on with upstream's own codes, also after a stop decision
    frames = run_frames(
        model, golden["prompt_input_ids"], uniforms, SamplingParams(), golden[f"{tag}_frames"], go_always=True
    )
    go_on = [int(f.go_on) for f in frames]
    assert go_on == golden[f"{tag}_should_continue"].tolist()
    for frame, codes in zip(frames, golden[f"{tag}_frames"], strict=True):
        if frame.go_on:  # after a stop decision upstream samples from wte[end]; those codes are discarded
            assert np.array_equal(frame.codes, codes)


def test_recorded_uniforms_are_our_generators_draws(golden_llm):
    from runtime.sampling import draw_uniforms

    golden = golden_llm.golden
    rng = np.random.default_rng(int(golden["fixed_rng_seed"]))
    for text_u, audio_u in zip(golden["fixed_assistant_u"], golden["fixed_audio_u"], strict=True):
        assert np.array_equal(draw_uniforms(rng, 16)[0], np.r_[text_u, audio_u].astype(np.float32))


def test_fewer_codebooks_give_upstreams_codes(golden_llm, backend):
    golden = golden_llm.golden
    model = HostFrameModel(golden_llm.manifest, backend, num_codebooks=8)
    result = generate(model, golden["nq8_prompt_input_ids"], 0, SamplingParams.greedy(), max_frames=4)
    assert np.array_equal(result.codes[:, :8], golden["nq8_greedy_frames"][:, :8])
    assert (result.codes[:, 8:] == golden_llm.manifest.model.audio_pad_id).all()


def test_rows_of_a_batch_do_not_know_each_other(golden_llm, backend):
    """Two prompts of different length, right-padded, give the hidden states of upstream's left-padded batch."""
    manifest, golden = golden_llm.manifest, golden_llm.golden
    masks = golden["batch_attention_mask"]
    lengths = masks.sum(axis=1)
    rows = np.full((2, masks.shape[1], 1 + manifest.model.n_vq), manifest.model.audio_pad_id, np.int32)
    rows[..., 0] = manifest.model.pad_id
    for i, length in enumerate(lengths):
        rows[i, :length] = golden["batch_input_ids"][i, masks[i]]
    feeds = {
        "rows": rows,
        "positions": np.tile(np.arange(rows.shape[1], dtype=np.int32), (2, 1)),
        "last": (lengths - 1).astype(np.int32),
    }
    graph = manifest.graph("prefill")
    with backend.open(graph.spec, manifest.path(graph.file)) as session:
        hidden = session.run(feeds)["hidden"]
    np.testing.assert_allclose(hidden, golden["batch_last_hidden"], atol=ATOL)
