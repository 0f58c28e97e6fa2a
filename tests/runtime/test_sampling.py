"""The sampler's rules, on the NumPy reference and on the `frame` graph alike."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.errors import GenerationError
from runtime.sampling import LARGEST_UNIFORM, SamplingParams, choose_code, decide_slot, draw_uniforms, softmax

NOT_SEEN = np.zeros(64, np.float32)


def test_greedy_takes_the_best_and_the_lower_index_on_ties():
    logits = np.zeros(64, np.float32)
    logits[[7, 30]] = 3.0
    assert choose_code(logits, NOT_SEEN, 0.999, SamplingParams.greedy()) == 7


def test_the_penalty_divides_positive_and_multiplies_negative_scores_once():
    logits = np.full(64, -5.0, np.float32)
    logits[[3, 4]] = [2.0, 1.9]
    seen = NOT_SEEN.copy()
    seen[3] = 1
    assert choose_code(logits, seen, 0.5, SamplingParams.greedy(1.2)) == 4
    logits = -np.arange(1, 65, dtype=np.float32)
    seen = NOT_SEEN.copy()
    seen[0] = 1  # -1 becomes -2.5, behind -2
    assert choose_code(logits, seen, 0.5, SamplingParams.greedy(2.5)) == 1


def test_frequencies_follow_the_distribution():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(64).astype(np.float32)
    params = SamplingParams(temperature=0.7, top_k=50, top_p=1.0, repetition_penalty=1.0)
    draws = [choose_code(logits, NOT_SEEN, u, params) for u in rng.random(4000)]
    top = np.argsort(-logits)[:50]
    want = np.zeros(64)
    want[top] = softmax(logits[top] / np.float32(0.7))
    # 4000 draws: the standard error of a frequency is below 0.008, so 0.03 is about 4 sigma
    np.testing.assert_allclose(np.bincount(draws, minlength=64) / 4000, want, atol=0.03)


def test_top_p_keeps_the_smallest_head_that_reaches_it():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05] + [1e-9] * 60)).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.6, repetition_penalty=1.0)
    assert {choose_code(logits, NOT_SEEN, u, params) for u in np.linspace(0, 0.9999, 400)} == {0, 1}


def test_the_largest_uniform_still_finds_a_kept_code():
    logits = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    params = SamplingParams(top_k=5, top_p=0.4)
    kept = {choose_code(logits, NOT_SEEN, u, params) for u in np.linspace(0, 0.99, 200)}
    assert choose_code(logits, NOT_SEEN, LARGEST_UNIFORM, params) in kept


def test_the_slot_decision_goes_on_up_to_and_with_its_probability():
    logits = np.array([0.0, 0.0], np.float32)
    assert decide_slot(logits, 0.5, SamplingParams())
    assert not decide_slot(logits, 0.5001, SamplingParams())
    assert decide_slot(logits, 0.99, SamplingParams.greedy())  # a tie goes on


def test_uniforms_never_round_up_to_one():
    class Almost:
        def random(self, n):
            return np.full(n, 1 - 1e-12)

    assert draw_uniforms(Almost(), 16).max() == np.float32(LARGEST_UNIFORM) < 1


@pytest.mark.parametrize(
    "bad", [{"top_k": 0}, {"top_k": 51}, {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": 0.0}, {"temperature": np.nan},
            {"repetition_penalty": -1.0}]
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises(GenerationError, match=next(iter(bad))):
        SamplingParams(**bad)


SETTINGS = [
    SamplingParams(),
    SamplingParams.greedy(),
    SamplingParams.greedy(1.3),
    SamplingParams(temperature=2.0, top_k=50, top_p=1.0, repetition_penalty=1.0, slot_temperature=3.0),
    SamplingParams(temperature=0.3, top_k=3, top_p=0.5, repetition_penalty=1.7, slot_top_k=1),
    SamplingParams(top_k=7, top_p=0.999, slot_top_p=0.7),
]


@pytest.mark.parametrize("params", SETTINGS)
def test_the_frame_graph_chooses_what_the_reference_chooses(golden_llm, params):
    """Feed random states; every code and decision must be the reference's on the logits that the graph shows."""
    from runtime.backends.ort import OrtBackend

    manifest = golden_llm.manifest
    config, graph = manifest.model, manifest.graph("frame")
    rng = np.random.default_rng(7)
    with OrtBackend(1).open(graph.spec, manifest.path(graph.file)) as session:
        for _ in range(12):
            feeds = {
                "hidden": (2 * rng.standard_normal((1, config.hidden_size))).astype(np.float32),
                "seen": (rng.random((1, config.n_vq, config.codebook_size)) < 0.2).astype(np.float32),
                "uniforms": draw_uniforms(rng, config.n_vq),
                **params.feeds(),
            }
            out = session.run(feeds)
            u = feeds["uniforms"][0]
            assert bool(out["go_on"][0]) == decide_slot(out["slot_logits"][0], u[0], params)
            for i in range(config.n_vq):
                want = choose_code(out["code_logits"][0, i], feeds["seen"][0, i], u[1 + i], params)
                assert out["codes"][0, i] == want
            expected_seen = feeds["seen"][0].copy()
            expected_seen[np.arange(config.n_vq), out["codes"][0]] = 1
            assert np.array_equal(out["seen_next"][0], expected_seen)
