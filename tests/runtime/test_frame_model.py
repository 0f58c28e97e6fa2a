"""The host cache: what a graph sees must equal a cache that is simply joined row by row."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.backends.ort import OrtBackend
from runtime.errors import CapacityError, GenerationError, ManifestError, SpecMismatchError
from runtime.frame_model import CACHE_BLOCK, HostFrameModel, HostKvCache
from runtime.generate import generate
from runtime.sampling import MASKED, SamplingParams


def test_the_cache_equals_joined_rows_across_block_borders():
    rng = np.random.default_rng(0)
    cache = HostKvCache(num_tensors=2, num_heads=3, head_size=4, capacity=2 * CACHE_BLOCK + 10)
    prompt = [rng.standard_normal((1, 3, CACHE_BLOCK - 3, 4)).astype(np.float32) for _ in range(2)]
    cache.load(prompt)
    joined = prompt
    for _ in range(CACHE_BLOCK + 8):  # over two borders, up to the last row
        rows = [rng.standard_normal((1, 3, 1, 4)).astype(np.float32) for _ in range(2)]
        cache.append(rows)
        joined = [np.concatenate([a, b], axis=2) for a, b in zip(joined, rows, strict=True)]
        past, mask = cache.visible()
        for got, want in zip(past, joined, strict=True):
            assert got.flags.c_contiguous
            assert np.array_equal(got[:, :, : cache.length], want)
        assert (mask[0, 0, 0, : cache.length] == 0).all() and (mask[0, 0, 0, cache.length :] == MASKED).all()
        assert mask.shape[-1] == past[0].shape[2]


def test_a_second_prompt_sees_nothing_of_the_first(golden_llm):
    golden = golden_llm.golden
    model = HostFrameModel(golden_llm.manifest, OrtBackend(1))
    alone = generate(model, golden["prompt_input_ids"], 3, SamplingParams(), max_frames=6)
    generate(model, golden["nq8_prompt_input_ids"][:50], 9, SamplingParams(), max_frames=6)
    again = generate(model, golden["prompt_input_ids"], 3, SamplingParams(), max_frames=6)
    assert np.array_equal(alone.codes, again.codes)


def test_the_frame_that_would_overflow_the_cache_is_refused_before_it_runs(golden_llm):
    rows = golden_llm.golden["prompt_input_ids"]
    model = HostFrameModel(golden_llm.manifest, OrtBackend(1), capacity=len(rows) + 2)
    model.prefill(rows)
    u = np.zeros((1, 17), np.float32)
    for _ in range(3):  # the first frame needs no row
        model.next_frame(u, SamplingParams.greedy())
    with pytest.raises(CapacityError, match=f"holds {len(rows) + 2} rows"):
        model.next_frame(u, SamplingParams.greedy())


def test_a_prompt_without_room_is_refused_with_the_numbers(golden_llm):
    rows = golden_llm.golden["prompt_input_ids"]
    model = HostFrameModel(golden_llm.manifest, OrtBackend(1), capacity=100)
    with pytest.raises(CapacityError, match=r"113 rows.*100"):
        model.prefill(rows)
    with pytest.raises(CapacityError, match=r"113 prompt rows and up to 5 frames need 118 rows.*100"):
        generate(model, rows, 0, SamplingParams(), max_frames=5)


def test_forced_codes_count_as_seen_and_the_replaced_ones_do_not(golden_llm):
    model = HostFrameModel(golden_llm.manifest, OrtBackend(1))
    model.prefill(golden_llm.golden["prompt_input_ids"])
    frame = model.next_frame(np.full((1, 17), 0.5, np.float32), SamplingParams())
    forced = (frame.codes + 1) % golden_llm.manifest.model.codebook_size
    model.force_frame(forced)
    assert (model._seen[0, np.arange(16), forced] == 1).all() and model._seen.sum() == 16


def test_an_unknown_graph_and_a_wrong_file_are_refused(golden_llm, tmp_path):
    manifest = golden_llm.manifest
    with pytest.raises(ManifestError, match="no graph nonsense"):
        manifest.graph("nonsense")
    with pytest.raises(SpecMismatchError, match="expected inputs"):
        OrtBackend(1).open(manifest.graph("step").spec, manifest.path(manifest.graph("prefill").file))


class Scripted:
    """A FrameModel that plays back decisions."""

    capacity, backend_name = 100, "scripted"

    def __init__(self, decisions):
        self.decisions = iter(decisions)

    def prefill(self, rows):
        self.rows = rows

    def next_frame(self, uniforms, sampling, keep_logits=False):
        from runtime.frame_model import Frame

        self.uniforms = uniforms
        return Frame(next(self.decisions), np.arange(4, dtype=np.int32))


ROWS = np.zeros((3, 5), np.int32)


def test_the_loop_ends_when_the_model_says_so():
    seen = []
    result = generate(Scripted([True, True, False, True]), ROWS, 0, SamplingParams(), 10, on_frame=seen.append)
    assert (result.num_frames, result.finish_reason, len(seen)) == (2, "stop", 2)


def test_the_loop_ends_at_the_limit_and_says_length():
    result = generate(Scripted([True] * 9), ROWS, 0, SamplingParams(), max_frames=4)
    assert (result.num_frames, result.finish_reason) == (4, "length")


def test_an_utterance_may_be_empty():
    assert generate(Scripted([False]), ROWS, 0, SamplingParams(), 5).codes.shape == (0, 4)


def test_no_frames_at_all_cannot_be_asked_for():
    with pytest.raises(GenerationError, match="at least 1"):
        generate(Scripted([]), ROWS, 0, SamplingParams(), max_frames=0)
