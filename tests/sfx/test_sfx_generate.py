"""Runs against upstream: greedy rows exact, sampled rows exact when the random numbers are torch's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from runtime.errors import GenerationError
from runtime.sfx import generate as loop
from runtime.sfx.config import SfxConfig
from runtime.sfx.delay import DelayState, TextChoice, delay, segments, undelay
from runtime.sfx.generate import FinishReason, InsideLogits, generate
from runtime.sfx.sampling import (
    PenaltyScope,
    SeenCodes,
    SfxSampling,
    code_scores,
    draw,
    penalise,
    probabilities,
)
from runtime.sfx.torch_model import TorchRowModel

Golden = Mapping[str, np.ndarray]


@pytest.mark.parametrize(("name", "penalty"), [("greedy", 1.0), ("greedy_pen", 1.2)])
def test_greedy_rows_equal_upstream(
    model: TorchRowModel, golden: Golden, config: SfxConfig, name: str, penalty: float
) -> None:
    [run] = generate(model, [golden["ids_0"]], SfxSampling.greedy(penalty), [0], 400)
    np.testing.assert_array_equal(run.rows, golden[f"gen_{name}"])
    assert run.finish_reason is FinishReason.END
    found = segments(run.rows, config)
    assert len(found.codes) == 1 and found.dropped_rows == 0
    np.testing.assert_array_equal(found.codes[0], golden[f"codes_{name}"])


def test_a_penalty_per_codebook_is_another_run(model: TorchRowModel, golden: Golden) -> None:
    sampling = SfxSampling(
        temperature=0.0, text_temperature=0.0, repetition_penalty=1.2, penalty_scope=PenaltyScope.PER_CODEBOOK
    )
    [run] = generate(model, [golden["ids_0"]], sampling, [0], 60)
    assert not np.array_equal(run.rows, golden["gen_greedy_pen"][:60])


@pytest.mark.parametrize(
    ("name", "sampling"), [("sample_rec", SfxSampling()), ("sample_def", SfxSampling(1.7, 0.8, 25, 1.0))]
)
def test_sampled_rows_equal_upstream_with_its_random_numbers(
    model: TorchRowModel, golden: Golden, config: SfxConfig, monkeypatch: pytest.MonkeyPatch, name: str,
    sampling: SfxSampling,
) -> None:  # fmt: skip
    """Upstream draws with torch.multinomial at seed 1234: text over the vocabulary, codebook 0, then all others."""
    first_book_sampled = iter((golden[f"gen_{name}"][:, 1] != config.audio_pad_code).tolist())
    advance = DelayState.advance
    now = [next(first_book_sampled)]

    def advance_and_note(state: DelayState, text_id: int) -> None:
        advance(state, text_id)
        now[0] = next(first_book_sampled, False)

    def choose_codes(logits: np.ndarray, seen: np.ndarray, _uniforms: np.ndarray, s: SfxSampling) -> np.ndarray:
        scores = np.pad(code_scores(logits, seen, s), ((0, 0), (0, 1)), constant_values=-np.inf)  # the pad column
        p = torch.from_numpy(probabilities(scores, s.top_k, s.top_p))
        calls = [p[:1], p[1:]] if now[0] else [p]
        return torch.cat([torch.multinomial(x, 1) for x in calls if len(x)])[:, 0].numpy().astype(np.int32)

    monkeypatch.setattr(DelayState, "advance", advance_and_note)
    monkeypatch.setattr(loop, "choose_text", lambda logits, _u, s: _torch_text(config, logits, s))
    monkeypatch.setattr(loop, "choose_codes", choose_codes)
    torch.manual_seed(1234)
    [run] = generate(model, [golden["ids_0"]], sampling, [0], 400)
    np.testing.assert_array_equal(run.rows, golden[f"gen_{name}"])


def _torch_text(config: SfxConfig, logits: np.ndarray, s: SfxSampling) -> int:
    """Inside audio our head has two columns; upstream draws over the whole vocabulary with all else masked."""
    slots = [config.gen_slot_id, config.delay_slot_id]
    full = logits
    if len(logits) == 2:
        full = np.full(config.vocab_size, -np.inf, np.float32)
        full[slots] = logits
    p = probabilities(full[None] / np.float32(s.text_temperature), s.text_top_k, s.text_top_p)
    chosen = int(torch.multinomial(torch.from_numpy(p), 1))
    return chosen if len(logits) > 2 else slots.index(chosen)


def test_the_same_seed_gives_the_same_rows_and_another_one_does_not(model: TorchRowModel, golden: Golden) -> None:
    first, again, other = (generate(model, [golden["ids_0"]], SfxSampling(), [s], 30)[0].rows for s in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or not np.array_equal(first, other)


class FlatModel:
    """Every code is equally likely; audio_start begins, then 18 gen slots, then the codebooks run out."""

    backend_name, max_rows = "scripted", 1000

    def __init__(self, config: SfxConfig) -> None:
        self.config = config

    def start(self, batch: int, num_rows: int) -> None:
        self.batch, self.num_reads = batch, 0

    def read(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        self.num_reads += 1
        return np.zeros((self.batch, 1), np.float32)

    def inside(self, hidden: np.ndarray) -> InsideLogits:
        slots = np.tile(np.array([99, 0] if self.num_reads < 20 else [0, 99], np.float32), (self.batch, 1))
        return InsideLogits(slots, np.zeros((self.batch, self.config.n_vq, 1024), np.float32))

    def text(self, hidden: np.ndarray) -> np.ndarray:
        logits = np.zeros((self.batch, self.config.vocab_size), np.float32)
        logits[:, self.config.audio_start_id] = 99.0
        return logits

    def close(self) -> None: ...


def test_each_codebook_has_its_own_uniform_whatever_else_is_sampled(
    config: SfxConfig, golden: Golden
) -> None:  # fmt: skip
    sampling = SfxSampling(1.0, top_p=1.0, top_k=1024, repetition_penalty=1.0, text_top_k=1)
    [run] = generate(FlatModel(config), [golden["ids_0"]], sampling, [11], 35)
    uniforms = np.random.default_rng(11).random((35, 17)).astype(np.float32)
    ids = [config.audio_start_id, *[config.gen_slot_id] * 18, *[config.delay_slot_id] * 16]
    assert run.rows[:, 0].tolist() == ids
    for step in range(35):
        sampled = (np.arange(16) < step) & (np.arange(16) >= step - 19)
        want = np.where(sampled, np.floor(uniforms[step, 1:] * 1024), config.audio_pad_code)
        assert np.abs(run.rows[step, 1:] - want).max() <= 1  # the sum of 1024 float32 probabilities rounds


def test_a_request_does_not_depend_on_its_neighbours(model: TorchRowModel, golden: Golden) -> None:
    prompts, seeds = [golden[f"ids_{i}"] for i in range(3)], [5, 6, 7]
    together = generate(model, prompts, SfxSampling(), seeds, 60)
    for prompt, seed, run in zip(prompts, seeds, together, strict=True):
        [alone] = generate(model, [prompt], SfxSampling(), [seed], 60)
        np.testing.assert_array_equal(run.rows, alone.rows)
        assert run.finish_reason is alone.finish_reason


def test_upstream_batch_couples_requests_by_their_penalty(model: TorchRowModel, golden: Golden) -> None:
    def greedy(scope: PenaltyScope) -> SfxSampling:
        return SfxSampling(0.0, repetition_penalty=3.0, text_temperature=0.0, penalty_scope=scope)

    prompts = [golden["ids_0"], golden["ids_1"]]
    coupled = generate(model, prompts, greedy(PenaltyScope.UPSTREAM_BATCH), [0, 0], 40)
    free = generate(model, prompts, greedy(PenaltyScope.UNION), [0, 0], 40)
    assert not np.array_equal(coupled[0].rows, free[0].rows)


def test_a_cut_run_says_so_and_drops_the_incomplete_frames(
    model: TorchRowModel, golden: Golden, config: SfxConfig
) -> None:
    [run] = generate(model, [golden["ids_0"]], SfxSampling.greedy(), [0], 50)
    assert run.finish_reason is FinishReason.LENGTH and len(run.rows) == 50
    found = segments(run.rows, config)
    assert found.dropped_rows == 15
    np.testing.assert_array_equal(np.concatenate(found.codes), golden["codes_greedy"][:34])


def test_wrong_requests_are_refused(model: TorchRowModel, golden: Golden) -> None:
    with pytest.raises(GenerationError, match="at least one prompt"):
        generate(model, [], SfxSampling(), [], 5)
    with pytest.raises(GenerationError, match="one seed per prompt"):
        generate(model, [golden["ids_0"]], SfxSampling(), [1, 2], 5)
    with pytest.raises(GenerationError, match="max_new_tokens"):
        generate(model, [golden["ids_0"]], SfxSampling(), [1], 0)
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"repetition_penalty": float("nan")}):
        with pytest.raises(GenerationError, match=next(iter(wrong))):
            SfxSampling(**wrong)  # type: ignore[arg-type]


def test_delay_and_its_inverse_equal_upstream(golden: Golden) -> None:
    np.testing.assert_array_equal(delay(golden["delay_in"], 1024), golden["delay_out"])
    np.testing.assert_array_equal(undelay(golden["delay_out"]), golden["delay_in"])
    assert undelay(golden["delay_out"][:15]).shape == (0, 16)


def test_two_stretches_of_audio_are_two_segments(golden: Golden, config: SfxConfig) -> None:
    one = golden["gen_sample_rec"]
    found = segments(np.concatenate([one, one]), config)
    assert [len(codes) for codes in found.codes] == [5, 5] and found.dropped_rows == 0
    np.testing.assert_array_equal(found.codes[1], golden["codes_sample_rec"])


def test_rows_without_audio_hold_no_segment(config: SfxConfig) -> None:
    rows = np.full((20, 17), config.audio_pad_code, np.int32)
    assert segments(rows, config).codes == ()


def test_the_state_walks_from_start_to_end(config: SfxConfig, golden: Golden) -> None:
    state = DelayState(config, golden["ids_0"])
    assert state.text_choice is TextChoice.OUTSIDE and config.im_end_id in state.banned_text()
    sampled = []
    for row in golden["gen_sample_rec"]:
        if state.text_choice is TextChoice.FORCED:
            assert state.forced_text == row[0]
        sampled.append(state.sampled_books())
        state.advance(int(row[0]))
    np.testing.assert_array_equal(sampled, golden["gen_sample_rec"][:, 1:] != config.audio_pad_code)
    assert state.finished


def test_a_prompt_that_ends_inside_audio_is_continued(config: SfxConfig, golden: Golden) -> None:
    prompt = np.concatenate([golden["ids_0"], golden["gen_greedy"][:4]])
    state = DelayState(config, prompt)
    assert state.text_choice is TextChoice.INSIDE
    assert state.sampled_books().sum() == 4
    assert state.banned_text() == (config.delay_slot_id,)


def test_the_penalty_equals_upstream(golden: Golden) -> None:
    """These figures are the same for both rules; that upstream uses the union is seen in greedy_pen above."""
    codes = golden["samp_prev"][0]
    seen = SeenCodes(1, 3, 1025)
    seen.add(0, np.concatenate([np.zeros((len(codes), 1), np.int64), codes], axis=1))
    union = np.broadcast_to(seen.table[0].any(axis=0), (3, 1025))
    for table, want in ((union, "samp_argmax_pen_2d"), (seen.table[0], "samp_argmax_pen_3d")):
        np.testing.assert_array_equal(penalise(golden["samp_logits"], table, 1.2).argmax(1), golden[want])


def test_what_counts_as_seen_depends_on_the_scope() -> None:
    seen = SeenCodes(2, 3, 8)
    seen.add(0, np.array([[9, 1, 2, 8]]))  # 8 is the pad code
    seen.add(1, np.array([[9, 5, 8, 7]]))
    where = {s: [np.flatnonzero(row).tolist() for row in seen.penalised(0, s)] for s in PenaltyScope}
    assert where[PenaltyScope.PER_CODEBOOK] == [[1], [2], []]
    assert where[PenaltyScope.UNION] == [[1], [2], [2]]
    assert where[PenaltyScope.UPSTREAM_BATCH] == [[1, 5], [2, 7], [2, 7]]


def test_the_filters_keep_ties_and_the_score_that_crosses_top_p() -> None:
    scores = np.log(np.array([[0.4, 0.3, 0.1, 0.1, 0.1]], np.float32))
    np.testing.assert_allclose(probabilities(scores, 3, 1.0), [[0.4, 0.3, 0.1, 0.1, 0.1]], atol=1e-6)  # ties with 3rd
    np.testing.assert_allclose(probabilities(scores, 2, 1.0), [[4 / 7, 3 / 7, 0, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(probabilities(scores, 5, 0.6), [[4 / 7, 3 / 7, 0, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(probabilities(scores, 5, 0.2), [[1, 0, 0, 0, 0]], atol=1e-6)


def test_draws_follow_the_distribution() -> None:
    p = np.array([0.5, 0.0, 0.3, 0.2], np.float32)
    uniforms = np.random.default_rng(0).random(4000).astype(np.float32)
    counts = np.bincount(draw(np.broadcast_to(p, (4000, 4)), uniforms), minlength=4)
    np.testing.assert_allclose(counts / 4000, p, atol=0.03)  # standard error below 0.008
    assert draw(p[None], np.array([0.0], np.float32))[0] == 0
    assert draw(p[None], np.array([np.nextafter(np.float32(1), np.float32(0))], np.float32))[0] == 3
