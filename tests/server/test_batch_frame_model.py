"""Slots: each has its own length, and nothing of a neighbour reaches it, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.backends.select import open_backend
from runtime.batch_frame_model import BatchFrameModel, Draw, SlotKvCache, settle
from runtime.errors import BackendError, CapacityError
from runtime.frame_model import CACHE_BLOCK, HostFrameModel
from runtime.manifest import Manifest
from runtime.sampling import MASKED, SamplingParams, draw_uniforms


@pytest.fixture(scope="module")
def manifest(tiny_artifacts):
    return Manifest.load(tiny_artifacts)


@pytest.fixture
def model(manifest):
    opened = BatchFrameModel(manifest, open_backend("ort", manifest, threads=1), slots=3, capacity=400)
    yield opened
    opened.close()


def prompt(manifest, length: int, seed: int = 0) -> np.ndarray:
    rows = np.full((length, 1 + manifest.model.n_vq), manifest.model.audio_pad_id, np.int32)
    rows[:, 0] = np.random.default_rng(seed).integers(5, 60, length)
    return rows


class Caller:
    """One utterance as the engine drives it."""

    def __init__(self, rows, seed, sampling=None):
        self.rows, self.rng = rows, np.random.default_rng(seed)
        self.sampling = sampling or SamplingParams()
        self.logits = []

    def draw(self):
        return Draw(draw_uniforms(self.rng, self.rows.shape[1] - 1), self.sampling)

    def take(self, frame):
        self.logits.append(np.concatenate([frame.slot_logits, frame.code_logits.ravel(), frame.codes]))


def run(model, callers, frames):
    """Frames of several utterances in the slots given: {slot: caller}."""
    for slot, caller in callers.items():
        model.prefill(slot, caller.rows)
    for _ in range(frames):
        for slot, frame in model.next_frames({s: c.draw() for s, c in callers.items()}, True).items():
            callers[slot].take(frame)
    for slot in callers:
        model.release(slot)


def test_bits_are_the_same_alone_in_company_and_in_every_slot(manifest, model):
    rows = prompt(manifest, 20)
    alone = Caller(rows, 5)
    run(model, {0: alone}, 12)
    for slot in range(3):
        again = Caller(rows, 5)
        others = {s: Caller(prompt(manifest, 140 + s, s), s, SamplingParams.greedy()) for s in range(3) if s != slot}
        run(model, {slot: again, **others}, 12)
        np.testing.assert_array_equal(np.stack(alone.logits), np.stack(again.logits))


def test_neighbours_that_join_and_leave_change_nothing(manifest, model):
    rows = prompt(manifest, 20)
    alone, watched = Caller(rows, 5), Caller(rows, 5)
    run(model, {0: alone}, 10)
    model.prefill(1, watched.rows)
    for step in range(10):
        if step == 2:
            guest = Caller(prompt(manifest, 300), 1)
            model.prefill(0, guest.rows)
        if step == 6:
            model.release(0)
        draws = {1: watched.draw()} | ({0: guest.draw()} if 2 <= step < 6 else {})
        watched.take(model.next_frames(draws, True)[1])
    np.testing.assert_array_equal(np.stack(alone.logits), np.stack(watched.logits))


def test_a_slot_gives_the_frames_of_the_single_model(manifest, model):
    caller, n_vq = Caller(prompt(manifest, 30), 3), manifest.model.n_vq
    run(model, {1: caller, 2: Caller(prompt(manifest, 50), 4)}, 8)
    single = HostFrameModel(manifest, open_backend("ort", manifest, threads=1))
    single.prefill(caller.rows)
    rng = np.random.default_rng(3)
    for kept in caller.logits:
        frame = single.next_frame(draw_uniforms(rng, n_vq), SamplingParams())
        np.testing.assert_array_equal(frame.codes, kept[-n_vq:].astype(np.int32))
    single.close()


def test_settle_accepts_onnx_runtime_and_refuses_a_model_that_mixes(manifest, model, monkeypatch):
    settle(model, prompt(manifest, 4))
    plain = model._step

    def leaking(stepping, draws, keep_logits):
        frames = plain(stepping, draws, keep_logits)
        for frame in frames.values():
            frame.slot_logits[:] += 1e-6 * len(stepping)
        return frames

    monkeypatch.setattr(model, "_step", leaking)
    with pytest.raises(BackendError, match="--batch 1"):
        settle(model, prompt(manifest, 4))


def test_a_backend_that_minds_the_visible_cache_gets_all_of_it(manifest, model, monkeypatch):
    plain = model._step

    def minding(stepping, draws, keep_logits):
        visible = model._cache._visible
        frames = plain(stepping, draws, keep_logits)
        for frame in frames.values():
            frame.slot_logits[:] += 1e-6 * visible
        return frames

    monkeypatch.setattr(model, "_step", minding)
    settle(model, prompt(manifest, 4))
    assert model._cache._visible == model.capacity


def test_nan_is_an_error_and_never_reaches_the_cache(manifest, model, monkeypatch):
    model.prefill(0, prompt(manifest, 10))
    model.next_frames({0: Caller(prompt(manifest, 10), 0).draw()})
    session = model._sessions["step_frame"]
    monkeypatch.setattr(type(session), "run", lambda self, feeds: {"hidden": np.full((3, 4), np.nan, np.float32)})
    with pytest.raises(BackendError, match="NaN"):
        model.next_frames({0: Caller(prompt(manifest, 10), 0).draw()})


def test_a_prompt_or_a_frame_beyond_the_capacity_is_refused(manifest, model):
    with pytest.raises(CapacityError):
        model.prefill(0, prompt(manifest, 400))
    caller = Caller(prompt(manifest, 399), 0)
    model.prefill(0, caller.rows)
    model.next_frames({0: caller.draw()})
    model.next_frames({0: caller.draw()})
    with pytest.raises(CapacityError):
        model.next_frames({0: caller.draw()})


def test_cache_rows_survive_growing_and_shrinking():
    rng = np.random.default_rng(0)
    slots, heads, size = 3, 2, 4
    cache = SlotKvCache(1, slots, heads, size, capacity=3 * CACHE_BLOCK)
    expected: dict[int, np.ndarray] = {}

    def load(slot, length):
        expected[slot] = rng.standard_normal((heads, length, size)).astype(np.float32)
        cache.load(slot, [expected[slot][None]])

    def append(*where):
        rows = rng.standard_normal((slots, heads, 1, size)).astype(np.float32)
        for slot in where:
            expected[slot] = np.concatenate([expected[slot], rows[slot]], axis=1)
        cache.append(list(where), [rows])

    def check(visible):
        (view,), mask = cache.visible()
        assert view.shape[2] == mask.shape[3] == visible
        for slot, want in expected.items():
            np.testing.assert_array_equal(view[slot, :, : want.shape[1]], want)
            np.testing.assert_array_equal(mask[slot, 0, 0], np.where(np.arange(visible) < want.shape[1], 0, MASKED))

    load(1, 5)
    load(0, CACHE_BLOCK - 1)
    append(0, 1)
    check(CACHE_BLOCK)
    append(0)
    check(2 * CACHE_BLOCK)
    load(2, 2 * CACHE_BLOCK + 3)
    append(0, 1, 2)
    check(3 * CACHE_BLOCK)
    cache.clear(2)
    del expected[2]
    check(2 * CACHE_BLOCK)
    cache.clear(0)
    del expected[0]
    append(1)
    check(CACHE_BLOCK)
