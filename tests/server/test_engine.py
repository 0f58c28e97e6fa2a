"""The engine: what a job gets does not depend on who runs beside it, before it, or is cancelled."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from runtime.assembly import open_codec
from runtime.backends.select import open_backend
from runtime.batch_frame_model import BatchFrameModel
from runtime.errors import BackendError
from runtime.frame_model import Frame
from runtime.manifest import Manifest
from runtime.prompt import PromptBuilder
from runtime.sampling import SamplingParams
from runtime.server.engine import Engine
from runtime.server.jobs import Failed, Finished, Job, Piece, SegmentJob, Started
from runtime.stop_rules import StopRules
from runtime.synthesizer import TOKENIZER_NAME
from runtime.tokenizer import Tokenizer

RULES = StopRules(runaway=False)


@pytest.fixture(scope="module")
def parts(tiny_artifacts):
    manifest = Manifest.load(tiny_artifacts)
    backend = open_backend("ort", manifest, threads=1)
    model, codec = BatchFrameModel(manifest, backend, 3, 400), open_codec(manifest, backend)
    yield manifest, model, codec
    model.close()
    codec.close()


class Run:
    """An engine and what it said."""

    def __init__(self, model, codec, rules=RULES):
        self.events = []
        self.engine = Engine(model, codec, self.events.append, rules)

    def until_idle(self, limit=2000):
        while not self.engine.idle:
            self.engine.turn()
            limit -= 1
            assert limit, "the engine never became idle"
        return self

    def audio(self):
        pcm = defaultdict(bytes)
        for event in self.events:
            if isinstance(event, Piece):
                pcm[event.id] += event.pcm
        return dict(pcm)

    def of(self, kind):
        return {event.id: event for event in self.events if isinstance(event, kind)}


def job(manifest, name, seed=1, length=25, segments=1, max_frames=40, sampling=None):
    codes = np.random.default_rng(seed).integers(0, manifest.model.codebook_size, (length, manifest.model.n_vq))
    prompt = PromptBuilder(manifest.model, Tokenizer(manifest.path(TOKENIZER_NAME)))
    rows = prompt.voice_clone(f"This is text number {seed}.", codes)
    parts = tuple(SegmentJob(rows, seed + i, 1000.0, 480 if i + 1 < segments else 0) for i in range(segments))
    return Job(name, parts, sampling or SamplingParams(), max_frames)


def alone(parts, wanted):
    _, model, codec = parts
    run = Run(model, codec)
    run.engine.add(wanted)
    return run.until_idle().audio()[wanted.id]


def test_audio_is_the_same_alone_in_company_and_after_a_cancelled_neighbour(parts):
    manifest, model, codec = parts
    jobs = [job(manifest, f"job{i}", seed=i, length=15 + 30 * i, max_frames=12 + 7 * i) for i in range(5)]
    want = {j.id: alone(parts, j) for j in jobs}
    assert len(set(want.values())) == 5 and all(want.values())

    run = Run(model, codec)
    run.engine.add(job(manifest, "left", seed=9))
    for j in jobs:
        run.engine.add(j)
    for _ in range(5):
        run.engine.turn()
    run.engine.cancel("left")
    run.until_idle()
    assert "left" not in run.of(Finished)
    assert {name: pcm for name, pcm in run.audio().items() if name != "left"} == want


def test_parameters_are_each_requests_own(parts):
    manifest, model, codec = parts
    greedy, warm = (
        job(manifest, name, seed=3, sampling=sampling)
        for name, sampling in (("greedy", SamplingParams.greedy()), ("warm", SamplingParams(temperature=1.5)))
    )
    want = {j.id: alone(parts, j) for j in (greedy, warm)}
    run = Run(model, codec)
    run.engine.add(greedy)
    run.engine.add(warm)
    assert run.until_idle().audio() == want and want["greedy"] != want["warm"]


def test_a_cancelled_job_frees_its_slot_at_once(parts):
    manifest, model, codec = parts
    run = Run(model, codec)
    for i in range(4):
        run.engine.add(job(manifest, f"job{i}", max_frames=200))
    for _ in range(4):
        run.engine.turn()
    assert "job3" not in run.of(Started)
    run.engine.cancel("job1")
    run.engine.turn()
    assert "job3" in run.of(Started)
    run.engine.close()


def test_segments_follow_each_other_with_their_pause(parts):
    manifest, model, codec = parts
    samples = manifest.codec.samples_per_frame
    run = Run(model, codec)
    run.engine.add(job(manifest, "long", segments=3, max_frames=10))
    finished = run.until_idle().of(Finished)["long"]
    assert len(finished.reasons) == 3
    assert len(run.audio()["long"]) == 2 * (finished.num_frames * samples + 2 * 480)


def test_a_prompt_that_does_not_fit_fails_alone(parts):
    manifest, model, codec = parts
    fits = job(manifest, "fits")
    run = Run(model, codec)
    run.engine.add(fits)
    run.engine.add(job(manifest, "too long", length=400))
    run.until_idle()
    assert "too long" in run.of(Failed) and run.audio()["fits"] == alone(parts, fits)


class FakeModel:
    """Scripted frames; fails where it is told to."""

    slots, capacity, backend_name = 2, 100, "fake"

    def __init__(self, n_vq, go_on=True, fail_prefill=0):
        self.codes, self.go_on, self.fail_prefill, self.released = np.zeros(n_vq, np.int32), go_on, fail_prefill, []

    def prefill(self, slot, rows):
        if self.fail_prefill:
            self.fail_prefill -= 1
            raise BackendError("aclmdlExecute: 507018")

    def next_frames(self, draws, keep_logits=False):
        return {slot: Frame(self.go_on, self.codes) for slot in draws}

    def release(self, slot):
        self.released.append(slot)


def test_an_utterance_without_a_frame_is_a_failure_not_silence(parts):
    manifest, _, codec = parts
    run = Run(FakeModel(manifest.model.n_vq, go_on=False), codec)
    run.engine.add(job(manifest, "mute"))
    run.until_idle()
    assert "before the first frame" in run.of(Failed)["mute"].message and not run.of(Finished)


def test_a_stuck_model_is_stopped_by_the_rules(parts):
    manifest, _, codec = parts
    run = Run(FakeModel(manifest.model.n_vq), codec, StopRules())
    run.engine.add(job(manifest, "stuck", max_frames=375))
    assert run.until_idle().of(Finished)["stuck"].reasons == ("loop",)


def test_one_failing_prompt_is_forgiven_three_mean_a_broken_backend(parts):
    manifest, _, codec = parts
    run = Run(FakeModel(manifest.model.n_vq, fail_prefill=1), codec)
    run.engine.add(job(manifest, "unlucky"))
    run.engine.add(job(manifest, "next", max_frames=3))
    run.until_idle()
    assert "507018" in run.of(Failed)["unlucky"].message and "next" in run.of(Finished)

    run = Run(FakeModel(manifest.model.n_vq, fail_prefill=5), codec)
    for i in range(5):
        run.engine.add(job(manifest, f"job{i}"))
    with pytest.raises(BackendError, match="3 prompts in a row"):
        run.until_idle()


def test_not_finite_audio_is_a_failure(parts, monkeypatch):
    manifest, model, codec = parts
    from runtime.codec import DecodeStream

    plain = DecodeStream.push
    monkeypatch.setattr(DecodeStream, "push", lambda self, codes: plain(self, codes) * np.float32(np.nan))
    run = Run(model, codec)
    run.engine.add(job(manifest, "nan"))
    run.until_idle()
    assert "NaN" in run.of(Failed)["nan"].message and not run.audio()
