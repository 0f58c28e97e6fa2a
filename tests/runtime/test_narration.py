"""Long texts with scripted models: every reason to stop, retries, resume, interruption, batch files."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from runtime.batch import parse_line, run_batch
from runtime.errors import GenerationError, TextError
from runtime.frame_model import Frame
from runtime.narration import NarrationSettings, Narrator, derive_seed
from runtime.narration_file import AudioFormat, narrate_to_file
from runtime.progress import NarrationProgress
from runtime.stop_rules import LoopDetector, StopRules
from runtime.text import plan_text
from runtime.tokenizer import Tokenizer
from tests.conftest import DATA

SAMPLES = 3840
AUDIO = AudioFormat(48_000, 2)
TEXT = "The first sentence is here. " * 8 + "The last one ends the story."
TOKENIZER = Tokenizer(DATA / "tokenizer" / "tokenizer.model")
TALK, SILENT = 1, 2  # code 0 of a frame decides what the fake codec makes of it


class FakeCodec:
    def stream(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def push(self, codes):
        loud = np.repeat(np.asarray(codes)[:, 0] != SILENT, SAMPLES)
        tone = np.tile(0.2 * np.sin(np.arange(SAMPLES) / 20, dtype=np.float32), len(codes)) * loud
        return np.stack([tone, tone]).astype(np.float32)


class ScriptedModel:
    """Plays one script per prefill: a function frame index -> code row, or None to end."""

    capacity, backend_name = 10_000, "scripted"

    def __init__(self, *scripts):
        self.scripts, self.runs, self.uniforms = list(scripts), 0, []

    def prefill(self, rows):
        self.script = self.scripts[min(self.runs, len(self.scripts) - 1)]
        self.runs += 1
        self.index = 0

    def next_frame(self, uniforms, sampling, keep_logits=False):
        if self.index == 0:
            self.uniforms.append(float(uniforms[0, 0]))
        codes = self.script(self.index)
        self.index += 1
        return Frame(codes is not None, np.zeros(16, np.int32) if codes is None else np.asarray(codes, np.int32))


def talk(num_frames):
    """Codes that never repeat, then the end."""
    rng = np.random.default_rng(num_frames)
    rows = rng.integers(10, 1024, (num_frames + 1, 16))
    rows[:, 0] = TALK
    return lambda i: rows[i] if i < num_frames else None


def looping(period):
    rows = np.random.default_rng(1).integers(10, 1024, (period, 16))
    return lambda i: rows[i % period]


def silent(i):
    return [SILENT, *np.random.default_rng(i).integers(0, 1024, 15)]


def endless(i):
    return [TALK, *np.random.default_rng(i).integers(0, 1024, 15)]


def narrator(model, made_up=False, **settings):
    codec = SimpleNamespace(samples_per_frame=SAMPLES, sample_rate_hz=48_000, num_channels=2)
    synthesizer = SimpleNamespace(
        manifest=SimpleNamespace(made_up=made_up, codec=codec, data_files={"weights.bin": "x"}),
        tokenizer=TOKENIZER,
        codec=FakeCodec(),
        frame_model=model,
        rows=lambda request: np.zeros((5, 17), np.int32),
        decode=lambda request, codes: FakeCodec().push(codes),
    )
    return Narrator(synthesizer, np.zeros((4, 16), np.int32), NarrationSettings(**settings))


def plan(text="A short sentence with a few words in it.", max_tokens=75):
    from runtime.text import TextOptions

    return plan_text(text, TOKENIZER, TextOptions(max_tokens=max_tokens))


def test_an_utterance_that_ends_by_itself_is_taken_at_the_first_try():
    model = ScriptedModel(talk(30))
    (segment,) = narrator(model).narrate(plan())
    assert (segment.finish_reason, segment.attempts, len(segment.codes)) == ("stop", 1, 30)
    assert segment.waveform.shape == (2, 30 * SAMPLES)
    assert model.uniforms[0] == np.float32(np.random.default_rng(0).random())


@pytest.mark.parametrize("script", [looping(1), looping(7), looping(25), silent, endless])
def test_a_lost_model_is_tried_again_with_a_derived_seed(script):
    model = ScriptedModel(script, talk(30))
    (segment,) = narrator(model, seed=5).narrate(plan())
    assert (segment.finish_reason, segment.attempts, model.runs) == ("stop", 2, 2)
    assert model.uniforms[1] == np.float32(np.random.default_rng(derive_seed(5, 0, 1)).random())
    assert segment.notes and "tried again" in segment.notes[0]


@pytest.mark.parametrize(("script", "reason"), [(looping(3), "loop"), (silent, "silence"), (endless, "runaway")])
def test_a_model_that_stays_lost_fails_with_the_reason(script, reason):
    model = ScriptedModel(script)
    with pytest.raises(GenerationError, match=rf"segment 1 .*failed 3 times: {reason} at frame"):
        list(narrator(model, retries=2).narrate(plan()))
    assert model.runs == 3


def test_silence_is_noticed_while_it_happens():
    model = ScriptedModel(silent)
    with pytest.raises(GenerationError, match="silence at frame 40"):  # 38, rounded up to a whole decoded chunk
        list(narrator(model, retries=0).narrate(plan()))


def test_rules_can_be_switched_off():
    model = ScriptedModel(endless)
    rules = StopRules(runaway=False)
    (segment,) = narrator(model, rules=rules, max_frames=300, retries=0).narrate(plan(TEXT, max_tokens=0))
    assert (segment.finish_reason, len(segment.codes)) == ("length", 300)


def test_too_little_speech_for_the_text_is_tried_again_but_not_with_made_up_weights():
    model = ScriptedModel(talk(2), talk(60))
    (segment,) = narrator(model).narrate(plan(TEXT, max_tokens=0))
    assert segment.attempts == 2
    (segment,) = narrator(ScriptedModel(talk(2)), made_up=True).narrate(plan(TEXT, max_tokens=0))
    assert segment.attempts == 1


def test_an_utterance_without_a_frame_is_an_error_with_its_reason():
    with pytest.raises(GenerationError, match=r"failed 1 times: the waveform is \[2, 0\]"):
        list(narrator(ScriptedModel(talk(0)), retries=0).narrate(plan()))


@pytest.mark.parametrize("period", [1, 4, 25])
def test_a_loop_needs_its_full_length(period):
    detector = LoopDetector(StopRules(loop_frames=25))
    rows = np.random.default_rng(0).integers(0, 1024, (period, 16)).astype(np.int32)
    first = next(i for i in range(500) if detector.add(rows[i % period]))
    assert first + 1 == period + max(25, 2 * period)


def test_speech_that_repeats_a_word_is_not_a_loop():
    detector = LoopDetector(StopRules(loop_frames=25))
    word = np.random.default_rng(0).integers(0, 1024, (12, 16)).astype(np.int32)
    other = np.random.default_rng(1).integers(0, 1024, (12, 16)).astype(np.int32)
    assert not any(detector.add(row) for row in [*word, *word, *other, *word, *word])


def test_segments_are_joined_with_their_pauses(tmp_path):
    p = plan(TEXT, max_tokens=20)
    assert len(p.segments) > 2
    result = narrate_to_file(narrator(ScriptedModel(talk(20))), p, tmp_path / "o.wav", AUDIO, False, progress(p))
    pauses = sum(round(s.pause_seconds * 48_000) for s in p.segments)
    assert result.written.num_samples == len(p.segments) * 20 * SAMPLES + pauses
    assert soundfile.info(tmp_path / "o.wav").frames == result.written.num_samples
    assert not (tmp_path / "o.wav.resume.json").exists()


def progress(p):
    return NarrationProgress([len(s.token_ids) for s in p.segments], 0.08)


def test_an_interruption_keeps_a_valid_file_and_resume_gives_the_same_bytes(tmp_path):
    p = plan(TEXT, max_tokens=20)
    whole = narrate_to_file(narrator(ScriptedModel(talk(20))), p, tmp_path / "whole.wav", AUDIO, False, progress(p))

    def interrupted(i):
        raise KeyboardInterrupt

    out = tmp_path / "o.wav"
    cut = narrate_to_file(narrator(ScriptedModel(talk(20), talk(20), interrupted)), p, out, AUDIO, False, progress(p))
    assert cut.interrupted and len(cut.segments) == 2
    pauses = sum(round(s.pause_seconds * 48_000) for s in p.segments[:2])
    assert soundfile.info(out).frames == 40 * SAMPLES + pauses
    model = ScriptedModel(talk(20))
    resumed = narrate_to_file(narrator(model), p, out, AUDIO, True, progress(p))
    assert not resumed.interrupted and model.runs == len(p.segments) - 2
    assert out.read_bytes() == (tmp_path / "whole.wav").read_bytes()
    assert whole.written.num_samples == resumed.written.num_samples


def test_an_interruption_before_the_first_segment_leaves_no_file(tmp_path):
    def interrupted(i):
        raise KeyboardInterrupt

    p = plan()
    result = narrate_to_file(narrator(ScriptedModel(interrupted)), p, tmp_path / "o.wav", AUDIO, False, progress(p))
    assert result.interrupted and result.written is None and not list(tmp_path.iterdir())


def test_a_failure_in_the_middle_keeps_what_can_be_resumed_and_no_file(tmp_path):
    p = plan(TEXT, max_tokens=20)
    with pytest.raises(GenerationError, match=r"1 of .* segments are kept"):
        model = ScriptedModel(talk(20), looping(2))
        narrate_to_file(narrator(model, retries=0), p, tmp_path / "o.wav", AUDIO, False, progress(p))
    assert [f.name for f in tmp_path.iterdir()] == ["o.wav.resume.json"]


def test_resume_refuses_what_belongs_to_something_else(tmp_path):
    p, out = plan(), tmp_path / "o.wav"
    with pytest.raises(GenerationError, match="nothing to resume"):
        narrate_to_file(narrator(ScriptedModel(talk(9))), p, out, AUDIO, True, progress(p))
    (tmp_path / "o.wav.resume.json").write_text('{"key": "x", "segments": []}')
    with pytest.raises(GenerationError, match="another text, voice"):
        narrate_to_file(narrator(ScriptedModel(talk(9))), p, out, AUDIO, True, progress(p))
    (tmp_path / "o.wav.resume.json").write_text("{")
    with pytest.raises(GenerationError, match="damaged"):
        narrate_to_file(narrator(ScriptedModel(talk(9))), p, out, AUDIO, True, progress(p))


BAD_LINES = {
    "not json": "not JSON",
    "[1]": "expected an object",
    '{"id": "a"}': "'text' is missing",
    '{"id": "../a", "text": "x"}': "becomes a file name",
    '{"id": "a", "text": 3}': "text: expected str, got int",
    '{"id": "a", "text": "x", "speed": 1}': "unknown field 'speed'",
    '{"id": "a", "text": "x", "seed": -1}': "seed: expected 0",
    '{"id": "a", "text": "x", "seed": true}': "seed: expected int",
}


@pytest.mark.parametrize("line", list(BAD_LINES))
def test_a_bad_line_says_what_is_wrong(line):
    with pytest.raises(TextError, match=BAD_LINES[line]):
        parse_line(line)


def test_one_bad_line_never_stops_the_rest(tmp_path):
    lines = [
        '{"id": "a", "text": "x"}',
        "bad",
        "",
        '{"id": "a", "text": "again"}',
        '{"id": "b", "text": "y", "seed": 3}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))

    def speak(item, out):
        if item.id == "b":
            raise GenerationError("lost")
        out.write_bytes(b"RIFF")
        return {"audio_seconds": 1.0}

    summary = run_batch(tmp_path / "in.jsonl", tmp_path / "out", ".wav", speak, lambda line: None)
    assert (summary.spoken, summary.failed) == (1, 3)
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [r["line"] for r in records] == [1, 2, 4, 5]
    assert records[0]["audio_seconds"] == 1.0 and "was used by a line before" in records[2]["error"]
    assert records[3] == {"line": 5, "id": "b", "error": "lost"}
