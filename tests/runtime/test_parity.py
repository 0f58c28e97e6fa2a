"""Verdicts on made-up recordings: every way in which a comparison could pass by accident."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import struct
import zlib

import numpy as np
import pytest

from runtime import plots
from runtime.compare import measure
from runtime.compare_audio import log_spectrogram, measure_audio
from runtime.errors import ParityError
from runtime.frame_model import Frame
from runtime.generate import Generation
from runtime.parity import Parity, compare, compare_speeches
from runtime.parity_diff import diff_reports
from runtime.parity_floor import floor_limits, read_report
from runtime.parity_record import Identity, Plan, Recording, Trace, load, save
from runtime.parity_report import to_html, to_json, to_markdown, write_report
from runtime.parity_verdict import FLOAT32_LIMITS, Verdict, worst
from runtime.sampling import SamplingParams, choose_code, draw_uniforms
from runtime.synthesizer import Request, Speech

F, Q, V, E = 12, 4, 30, 8
IDENTITY = Identity("ort", "made", "artifacts/made", True, {"step": "ab"}, "aa", "bb", "pytorch", 128, True, False, {})


GREEDY = SamplingParams.greedy()


def trace(sampling: SamplingParams = GREEDY, end: bool = False, seed: int = 0) -> Trace:
    """Random logits, and the codes that follow from them by the sampling rule."""
    rng, draws = np.random.default_rng(11), np.random.default_rng(seed)
    logits = (3 * rng.standard_normal((F, Q, V))).astype(np.float32)
    codes, seen = np.zeros((F, Q), np.int32), np.zeros((Q, V), np.float32)
    for f in range(F):
        u = draw_uniforms(draws, Q)[0]
        codes[f] = [choose_code(logits[f, q], seen[q], float(u[1 + q]), sampling) for q in range(Q)]
        seen[np.arange(Q), codes[f]] = 1
    slots = np.tile(np.array([8, -8], np.float32), (F, 1))
    if end:
        slots[-1] = [-8, 8]
    return Trace(codes, slots[:, 0] > 0, rng.standard_normal((F, E)).astype(np.float32), slots, logits)


def first_frames(t: Trace, n: int) -> Trace:
    return Trace(t.codes[:n], t.go_on[:n], t.hidden[:n], t.slot_logits[:n], t.code_logits[:n])


def made() -> Recording:
    greedy, plan = trace(end=True), Plan("Hello.", None, frames=F)
    rows = np.arange(5 * (1 + Q), dtype=np.int32).reshape(5, -1)
    rng = np.random.default_rng(3)
    replay = trace()
    n = F - 1
    replay = first_frames(replay, n)
    return Recording(
        identity=IDENTITY, plan=plan, sample_rate_hz=8000, token_ids=np.arange(5, dtype=np.int32), rows=rows,
        traces={"greedy": greedy, "seeded": trace(plan.sampling, end=True), "replay": replay},
        replay_rows=rows, replay_codes=greedy.codes[:n], reference_codes=rng.integers(0, V, (6, Q)).astype(np.int32),
        cache=rng.standard_normal((4, 2, 5, 3)).astype(np.float32),
        latents=rng.standard_normal((n, 6)).astype(np.float32),
        waveform=(0.1 * rng.standard_normal((2, 640 * n))).astype(np.float32),
    )  # fmt: skip


A = made()


def changed(mode: str, **fields: np.ndarray | None) -> Recording:
    """A with some arrays of one trace replaced."""
    return dataclasses.replace(A, traces={**A.traces, mode: dataclasses.replace(A.traces[mode], **fields)})


def logits_with(mode: str, frame: int, codebook: int, code: int, value: float) -> Recording:
    """A whose logit of one code is `value`, and whose code follows where that makes it the largest."""
    t = A.traces[mode]
    logits, codes = t.code_logits.copy(), t.codes.copy()
    logits[frame, codebook, code] = value
    codes[frame, codebook] = logits[frame, codebook].argmax()
    return changed(mode, code_logits=logits, codes=codes)


def runner_up(mode: str, frame: int, codebook: int) -> tuple[int, float]:
    logits = A.traces[mode].code_logits[frame, codebook]
    return int(np.argsort(logits)[-2]), float(logits.max())


def test_the_same_recording_is_exact_and_the_exit_codes_are_those_of_the_verdicts():
    parity = compare(A, A)
    assert parity.verdict is Verdict.EXACT and parity.divergence is None
    assert all(s.verdict is Verdict.EXACT for s in parity.stages)
    codes = {v: v.exit_code for v in Verdict}
    assert [v for v, c in codes.items() if c == 0] == [Verdict.EXACT, Verdict.WITHIN_TOLERANCE, Verdict.NEAR_TIE]
    assert codes[Verdict.DIVERGENT] == 1 and codes[Verdict.ERROR] == codes[Verdict.NOT_MEASURED] == 2
    assert worst([]) is Verdict.NOT_MEASURED


def test_a_small_error_is_within_tolerance_and_says_what_would_have_passed():
    parity = compare(A, changed("replay", hidden=A.traces["replay"].hidden + np.float32(1e-5)))
    assert parity.verdict is Verdict.WITHIN_TOLERANCE
    stage = parity.stage("step hidden")
    assert 0.9e-5 < stage.passing < 1.1e-5 < stage.allowed and stage.metrics.cosine > 0.999


def test_a_large_error_names_its_first_frame():
    hidden = A.traces["replay"].hidden.copy()
    hidden[4:, 2] += 1
    parity = compare(A, changed("replay", hidden=hidden))
    assert parity.verdict is Verdict.DIVERGENT
    assert (parity.divergence.name, parity.divergence.frame) == ("step hidden", 4)


def test_a_code_that_differs_by_a_tie_on_both_sides_is_a_near_tie():
    code, best = runner_up("replay", 3, 2)
    parity = compare(A, logits_with("replay", 3, 2, code, best + 4e-4))  # a's margin is large: not a tie
    assert parity.mode("replay").verdict is Verdict.DIVERGENT
    t = A.traces["replay"]
    logits = t.code_logits.copy()
    logits[3, 2, code] = best - 3e-4
    a = changed("replay", code_logits=logits)
    logits = logits.copy()
    logits[3, 2, code] = best + 3e-4
    codes = t.codes.copy()
    codes[3, 2] = code
    codes[3, 3] = (codes[3, 3] + 1) % V  # what follows in the frame may be anything
    b = changed("replay", code_logits=logits, codes=codes)
    parity = compare(a, b)
    assert parity.stage("codes").verdict is Verdict.NEAR_TIE
    first = parity.mode("replay").first
    assert (first.frame, first.codebook, first.tie) == (3, 2, True)
    assert first.a_margin == pytest.approx(3e-4, rel=0.01) and first.b_margin == pytest.approx(3e-4, rel=0.01)
    strict = dataclasses.replace(FLOAT32_LIMITS, tie_margin=1e-4)
    assert compare(a, b, strict).mode("replay").verdict is Verdict.DIVERGENT


def test_logits_behind_a_different_code_are_not_compared():
    t = A.traces["replay"]
    logits, codes = t.code_logits.copy(), t.codes.copy()
    codes[3, 1] = (codes[3, 1] + 1) % V
    logits[3, 2:] += 50  # follows from the other code
    parity = compare(A, changed("replay", code_logits=logits, codes=codes))
    assert parity.stage("code logits").verdict is Verdict.EXACT
    assert (parity.divergence.name, parity.divergence.frame, parity.divergence.codebook) == ("codes", 3, 1)
    logits[3, 1] += 50
    parity = compare(A, changed("replay", code_logits=logits, codes=codes))
    assert (parity.divergence.name, parity.divergence.frame, parity.divergence.codebook) == ("code logits", 3, 1)


def test_the_verdict_of_an_earlier_stage_still_names_the_first_different_code():
    t = A.traces["replay"]
    codes, hidden = t.codes.copy(), t.hidden + np.float32(1)
    codes[3, 1] = (codes[3, 1] + 1) % V
    parity = compare(A, changed("replay", codes=codes, hidden=hidden))
    assert parity.divergence.name == "prefill hidden"
    assert f"First different code, replay: {parity.mode('replay').first}" in parity.text and "margin" in parity.text


def test_a_code_that_does_not_follow_from_its_logits_is_never_a_tie():
    t = A.traces["replay"]
    codes, logits = t.codes.copy(), t.code_logits.copy()
    code, best = runner_up("replay", 2, 1)
    logits[2, 1, code] = best - 1e-5
    codes[2, 1] = code  # a margin of 1e-5, but on the wrong side
    parity = compare(changed("replay", code_logits=logits), changed("replay", code_logits=logits, codes=codes))
    assert parity.verdict is Verdict.DIVERGENT and not parity.mode("replay").first.b_follows
    assert parity.cause.kind == "sampling"


def test_a_free_run_is_judged_by_its_first_difference_alone():
    t = A.traces["greedy"]
    codes = t.codes.copy()
    codes[5:] = (codes[5:] + 1) % V
    parity = compare(A, changed("greedy", codes=codes))
    mode = parity.mode("greedy")
    assert (mode.first.frame, mode.first.codebook) == (5, 0) and mode.verdict is Verdict.DIVERGENT
    assert mode.agreement == pytest.approx(5 / (F - 1))
    assert parity.divergence is mode  # all stages agree


def test_a_seeded_difference_is_a_tie_only_while_the_logits_agree():
    t = A.traces["seeded"]
    u = draw_uniforms(np.random.default_rng(0), Q)[0]
    q = int(u[1:].argmax())
    logits = t.code_logits.copy()
    other = logits.copy()
    sampling = SamplingParams(temperature=1.0, top_k=2, top_p=1.0, repetition_penalty=1.0)
    edge = float(u[1 + q])  # two candidates whose border lies at the uniform number
    assert edge > 0.5
    for array, shift in ((logits, -2e-4), (other, 2e-4)):
        array[0, q] = -30
        array[0, q, 1], array[0, q, 2] = np.log(edge) + shift, np.log(1 - edge)
    codes = [choose_code(x[0, q], np.zeros(V, np.float32), edge, sampling) for x in (logits, other)]
    assert codes[0] != codes[1]
    sides = []
    for array, code in zip((logits, other), codes, strict=True):
        chosen = t.codes.copy()
        chosen[0, q] = code
        side = changed("seeded", code_logits=array, codes=chosen)
        sides.append(dataclasses.replace(side, plan=dataclasses.replace(A.plan, sampling=sampling)))
    assert compare(*sides).mode("seeded").verdict is Verdict.NEAR_TIE
    strict = dataclasses.replace(FLOAT32_LIMITS, tie_margin=1e-4)
    assert compare(*sides, strict).mode("seeded").verdict is Verdict.DIVERGENT


def test_a_choice_is_judged_with_the_penalty_of_the_codes_before_it():
    t = A.traces["seeded"]
    for frame, q in np.ndindex(F - 1, Q):
        codes = t.codes.copy()
        codes[frame, q] = (codes[frame, q] + 1) % V
        first = compare(A, changed("seeded", codes=codes)).mode("seeded").first
        assert (first.frame, first.codebook, first.a_follows) == (frame, q, True)


def test_codes_beside_the_end_decision_mean_nothing():
    codes = A.traces["greedy"].codes.copy()
    codes[-1] = (codes[-1] + 1) % V
    assert compare(A, changed("greedy", codes=codes)).mode("greedy").verdict is Verdict.EXACT


def test_a_run_that_stops_without_a_reason_is_an_error():
    cut = dataclasses.replace(A, traces={**A.traces, "greedy": first_frames(A.traces["greedy"], 6)})
    parity = compare(A, cut)
    assert parity.mode("greedy").verdict is Verdict.ERROR and parity.verdict is Verdict.ERROR


def test_one_real_difference_among_ties_diverges_and_is_the_one_that_is_named():
    t = A.traces["replay"]
    low, high, codes = t.code_logits.copy(), t.code_logits.copy(), t.codes.copy()
    code, best = runner_up("replay", 1, 0)
    low[1, 0, code], high[1, 0, code], codes[1, 0] = best - 3e-4, best + 3e-4, code
    codes[7, 2] = (codes[7, 2] + 1) % V
    mode = compare(changed("replay", code_logits=low), changed("replay", code_logits=high, codes=codes)).mode("replay")
    assert (mode.verdict, mode.num_ties, mode.num_divergent) == (Verdict.DIVERGENT, 1, 1)
    assert (mode.first.frame, mode.first.codebook) == (7, 2)


def test_codes_that_are_all_the_same_prove_nothing():
    stuck = changed("replay", codes=np.full_like(A.traces["replay"].codes, 7))
    assert compare(stuck, stuck).stage("codes").verdict is Verdict.NOT_MEASURED


@pytest.mark.parametrize("garbage", [-1, -(2**31), V, 2**31 - 1])
@pytest.mark.parametrize("mode", ["greedy", "seeded", "replay"])
def test_numbers_that_are_no_codes_diverge_and_break_nothing(garbage, mode):
    codes = A.traces[mode].codes.copy()
    codes[2, 1] = garbage
    for pair in ((A, changed(mode, codes=codes)), (changed(mode, codes=codes), A)):
        parity = compare(*pair)
        assert parity.verdict is Verdict.DIVERGENT and (parity.mode(mode).first.frame) == 2
        json.loads(to_json(parity))
        assert to_html(parity, *pair) and to_markdown(parity)


def test_a_codec_that_failed_is_an_error_with_its_message():
    failed = dataclasses.replace(A, waveform=None, latents=None, failures={"waveform": "aclmdlExecute failed: 507011"})
    parity = compare(A, failed)
    assert parity.verdict is Verdict.ERROR and "b: aclmdlExecute failed: 507011" in parity.text


def test_an_end_that_comes_earlier_is_named_as_the_end_decision():
    t = A.traces["greedy"]
    slots, go_on = t.slot_logits.copy(), t.go_on.copy()
    slots[6], go_on[6] = [-1, 1], False
    short = Trace(t.codes[:7], go_on[:7], t.hidden[:7], slots[:7], t.code_logits[:7])
    parity = compare(A, dataclasses.replace(A, traces={**A.traces, "greedy": short}))
    first = parity.mode("greedy").first
    assert (first.frame, first.codebook, first.a_code, first.b_code) == (6, None, 1, 0)
    assert parity.verdict is Verdict.DIVERGENT and "the end decision" in parity.text


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sides", ["b", "a", "both"])
@pytest.mark.parametrize("field", ["hidden", "slot_logits", "code_logits"])
def test_nan_and_infinity_on_any_side_diverge(bad, sides, field):
    value = getattr(A.traces["replay"], field).copy()
    value[2].flat[1] = bad
    broken = changed("replay", **{field: value})
    parity = compare(broken if sides != "b" else A, broken if sides != "a" else A)
    assert parity.verdict is Verdict.DIVERGENT and parity.divergence.frame == 2
    assert parity.cause.kind == "overflow"


@pytest.mark.parametrize("name", ["cache", "waveform", "latents"])
def test_nan_in_other_values_diverges(name):
    value = getattr(A, name).copy()
    value.flat[5] = np.nan
    parity = compare(A, dataclasses.replace(A, **{name: value}))
    assert parity.verdict is Verdict.DIVERGENT and "NaN" in parity.text
    assert compare(dataclasses.replace(A, **{name: value}), dataclasses.replace(A, **{name: value})).verdict is (
        Verdict.DIVERGENT
    )


@pytest.mark.parametrize("field", ["hidden", "slot_logits", "code_logits"])
def test_an_output_that_one_side_lacks_is_an_error_and_never_a_pass(field):
    lacking = changed("replay", **{field: None})
    for pair in ((A, lacking), (lacking, A)):
        parity = compare(*pair)
        assert parity.verdict is Verdict.ERROR and parity.verdict.exit_code == 2
        assert "does not give" in parity.divergence.text
    both = compare(lacking, lacking)
    assert not both.verdict.agrees or field == "slot_logits"


@pytest.mark.parametrize("name", ["cache", "waveform", "reference_codes"])
def test_a_value_that_one_side_lacks_is_an_error(name):
    assert compare(A, dataclasses.replace(A, **{name: None})).verdict is Verdict.ERROR
    assert compare(dataclasses.replace(A, **{name: None}), A).verdict is Verdict.ERROR


def test_latents_that_a_compiled_graph_cannot_give_are_not_measured_and_do_not_pass():
    parity = compare(A, dataclasses.replace(A, latents=None))
    assert parity.stage("codec latents").verdict is Verdict.NOT_MEASURED
    assert parity.verdict is Verdict.EXACT and "Not measured: codec latents" in parity.text


@pytest.mark.parametrize("value", [0.0, 3.5])
@pytest.mark.parametrize("field", ["hidden", "code_logits"])
def test_a_constant_reference_proves_nothing(value, field):
    constant = changed("replay", **{field: np.full_like(getattr(A.traces["replay"], field), value)})
    if field == "code_logits":
        zero = np.zeros_like(A.traces["replay"].codes)
        constant = dataclasses.replace(
            constant, traces={**constant.traces, "replay": dataclasses.replace(constant.traces["replay"], codes=zero)}
        )
    parity = compare(constant, constant)
    assert parity.verdict is Verdict.NOT_MEASURED and parity.verdict.exit_code == 2
    assert compare(constant, A).verdict is Verdict.DIVERGENT


def test_a_silent_waveform_proves_nothing():
    silent = dataclasses.replace(A, waveform=np.zeros_like(A.waveform))
    parity = compare(silent, silent)
    assert parity.stage("waveform").verdict is Verdict.NOT_MEASURED
    assert parity.audio.snr_db is None and parity.audio.a.rms_dbfs is None
    assert compare(silent, A).stage("waveform").verdict is Verdict.DIVERGENT


def test_different_lengths_never_pass():
    shorter = dataclasses.replace(A, waveform=A.waveform[:, :-1])
    assert compare(A, shorter).stage("waveform").verdict is Verdict.DIVERGENT
    assert compare(A, dataclasses.replace(A, token_ids=A.token_ids[:-1])).verdict is Verdict.DIVERGENT
    assert compare(A, dataclasses.replace(A, cache=A.cache[:, :, :-1])).verdict is Verdict.ERROR
    t = A.traces["replay"]
    short = first_frames(t, len(t.codes) - 2)
    assert compare(A, dataclasses.replace(A, traces={**A.traces, "replay": short})).verdict is Verdict.ERROR
    assert compare(A, changed("replay", hidden=t.hidden[:, :-1])).verdict is Verdict.ERROR


def test_runs_without_a_frame_are_not_measured():
    empty = Trace(np.zeros((0, Q), np.int32), np.zeros(0, bool), None, None, None)
    none = dataclasses.replace(
        A, traces=dict.fromkeys(A.traces, empty), replay_codes=empty.codes, waveform=None, latents=None
    )
    parity = compare(none, none)
    assert parity.verdict is Verdict.NOT_MEASURED and parity.verdict.exit_code == 2
    assert to_html(parity, none, none)


def test_replays_of_different_codes_fall_back_to_the_greedy_runs():
    other = dataclasses.replace(A, replay_codes=(A.replay_codes + 1) % V)
    parity = compare(A, other)
    assert parity.mode("replay").verdict is Verdict.NOT_MEASURED
    assert parity.stage("code logits").verdict is Verdict.EXACT  # of the greedy runs
    assert parity.stage("waveform").verdict is Verdict.NOT_MEASURED
    assert parity.verdict is Verdict.NOT_MEASURED  # codes per frame are required


def test_reference_codes_name_frame_and_codebook():
    codes = A.reference_codes.copy()
    codes[2:, 3] += 1
    parity = compare(A, dataclasses.replace(A, reference_codes=codes))
    found = parity.divergence
    assert (found.name, found.frame, found.codebook) == ("reference codes", 2, 3) and "100%" in found.text


def test_falling_agreement_of_the_reference_codes_points_at_the_quantizer():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, V, (200, Q)).astype(np.int32)
    other = np.where(rng.random((200, Q)) < np.array([0, 0.1, 0.4, 0.8]), codes + 1, codes).astype(np.int32)
    parity = compare(dataclasses.replace(A, reference_codes=codes), dataclasses.replace(A, reference_codes=other))
    assert parity.cause.kind == "precision" and "quantizer in float32" in parity.cause.text


def test_different_tokens_name_the_tokenizer():
    other = dataclasses.replace(A, token_ids=A.token_ids + 1, identity=dataclasses.replace(IDENTITY, tokenizer="cc"))
    assert compare(A, other).cause.kind == "tokenizer"
    assert compare(A, dataclasses.replace(A, token_ids=A.token_ids + 1)).cause.kind == "text"


@pytest.mark.parametrize(("per_frame", "verdict"), [(2e-6, Verdict.DIVERGENT), (0.0, Verdict.WITHIN_TOLERANCE)])
def test_an_error_that_grows_with_the_position_is_a_finding_of_its_own(per_frame, verdict):
    hidden = A.traces["replay"].hidden
    noise = np.random.default_rng(1).standard_normal(hidden.shape) * 1e-7
    growing = hidden + (per_frame * np.arange(len(hidden))[:, None] + noise).astype(np.float32)
    parity = compare(A, changed("replay", hidden=growing))
    assert parity.growth.verdict is verdict and len(parity.growth.per_frame) == len(hidden)
    assert parity.verdict is verdict
    assert parity.growth.slope > 1e-6 or not per_frame


def test_a_side_that_does_not_repeat_itself_is_noted():
    codes = A.traces["replay"].codes.copy()
    codes[1, 1] = (codes[1, 1] + 1) % V
    assert "does not repeat itself" in compare(changed("replay", codes=codes), A).notes[0]


def speech(recording: Recording, keep_logits: bool = True) -> Speech:
    """A finished request with the seeded trace and the waveform of a recording."""
    t = recording.traces["seeded"]
    fields = zip(t.go_on, t.codes, t.hidden, t.slot_logits, t.code_logits, strict=True)
    frames = tuple(Frame(bool(go_on), *rest) for go_on, *rest in fields) if keep_logits else ()
    generation = Generation(t.codes[t.go_on], "stop", 5, 1.0, 1.0, frames)
    return Speech(recording.waveform, 8000, generation, 1.0, "made")


@pytest.mark.parametrize("keep_logits", [True, False])
def test_two_finished_requests_can_be_compared(keep_logits):
    request = Request("Hello.", sampling=A.plan.sampling)
    a = speech(A, keep_logits)
    assert compare_speeches(a, a, request).verdict is Verdict.EXACT
    louder = speech(dataclasses.replace(A, waveform=A.waveform * 2), keep_logits)
    found = compare_speeches(a, louder, request)
    assert found.verdict is Verdict.DIVERGENT and found.codes.verdict is Verdict.EXACT and found.audio.gain < 0.6
    codes = A.traces["seeded"].codes.copy()
    codes[4, 2] = (codes[4, 2] + 1) % V
    other = compare_speeches(a, speech(changed("seeded", codes=codes), keep_logits), request)
    assert other.verdict is Verdict.DIVERGENT and (other.codes.first.frame, other.codes.first.codebook) == (4, 2)
    assert other.waveform.verdict is Verdict.NOT_MEASURED


# -- files and reports


def test_a_recording_survives_its_files(tmp_path):
    save(A, tmp_path)
    assert compare(A, load(tmp_path)).verdict is Verdict.EXACT
    assert load(tmp_path).plan == A.plan and load(tmp_path).identity == A.identity


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "recording.json").unlink(), "holds no recording"),
        (lambda d: (d / "recording.npz").write_bytes(b"PK nonsense"), "cannot be read"),
        (lambda d: (d / "recording.json").write_text("{}"), "version None"),
        (lambda d: (d / "recording.json").write_text('{"format_version": 1}'), "damaged"),
    ],
)
def test_a_damaged_recording_is_refused(tmp_path, spoil, message):
    save(A, tmp_path)
    spoil(tmp_path)
    with pytest.raises(ParityError, match=message):
        load(tmp_path)


def broken_parity() -> tuple[Parity, Recording]:
    hidden = A.traces["replay"].hidden.copy()
    hidden[3] = np.nan
    wave = A.waveform.copy()
    wave[:, 100:200] = np.nan
    b = dataclasses.replace(changed("replay", hidden=hidden), waveform=wave)
    return compare(A, b, command="run-om parity --a <one> --b two"), b


def test_json_is_strict_and_the_three_forms_tell_the_same(tmp_path):
    parity, b = broken_parity()
    page = write_report(parity, tmp_path, A, b).read_text()
    data = json.loads((tmp_path / "parity.json").read_text(), parse_constant=lambda c: pytest.fail(f"not strict: {c}"))
    markdown = (tmp_path / "parity.md").read_text()
    assert data["verdict"] == "DIVERGENT" and data["exit_code"] == 1
    assert data["first_divergence"]["name"] == "step hidden" and data["first_divergence"]["frame"] == 3
    for stage in data["stages"]:
        assert stage["name"] in page and stage["name"] in markdown
    assert page.index("DIVERGENT") < page.index("<table") and markdown.index("DIVERGENT") < markdown.index("|")
    assert "&lt;one&gt;" in page and "<one>" not in page  # the command is escaped
    assert "http" not in re.sub(r"data:image[^']*", "", page) and "<script" not in page
    assert "Not a voice" in page and "Not a voice" in markdown


def test_a_diff_says_what_got_worse_and_refuses_another_request():
    good, bad = (json.loads(to_json(p)) for p in (compare(A, A), broken_parity()[0]))
    assert diff_reports(good, good) == []
    worse = {c.what for c in diff_reports(good, bad) if c.worse}
    assert "overall: verdict" in worse and "step hidden: verdict" in worse
    assert not any(c.worse for c in diff_reports(bad, good))
    with pytest.raises(ParityError, match="not about the same request: text"):
        diff_reports(good, {**bad, "plan": {**bad["plan"], "text": "Other."}})


def test_a_floor_widens_the_limits_to_twice_its_errors_and_no_further(tmp_path):
    def with_error(size: float) -> Recording:
        b = changed("replay", hidden=A.traces["replay"].hidden + np.float32(size))
        wave = A.waveform + np.float32(size)
        return dataclasses.replace(b, waveform=wave, cache=A.cache + np.float32(size))

    (tmp_path / "floor.json").write_text(to_json(compare(A, with_error(0.01))))
    limits = floor_limits(read_report(tmp_path / "floor.json"), "floor.json")
    assert limits.hidden.atol == pytest.approx(0.02, rel=0.01)
    assert compare(A, with_error(0.015), limits).verdict is Verdict.WITHIN_TOLERANCE
    assert compare(A, with_error(0.015)).verdict is Verdict.DIVERGENT
    assert compare(A, with_error(0.03), limits).verdict is Verdict.DIVERGENT


def test_a_floor_that_overflowed_is_refused():
    report = json.loads(to_json(broken_parity()[0]))
    with pytest.raises(ParityError, match="no finite figure"):
        floor_limits(report, "floor.json")


def test_a_file_that_is_no_report_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"format": "other"}')
    with pytest.raises(ParityError, match="format 'other'"):
        read_report(tmp_path / "x.json")
    with pytest.raises(ParityError, match="not a readable"):
        read_report(tmp_path / "missing.json")


def test_markdown_tables_keep_their_columns():
    lines = [line for line in to_markdown(compare(A, A)).splitlines() if line.startswith("| ")]
    header = next(line for line in lines if line.startswith("| stage"))
    cells = re.split(r"(?<!\\)\|", header)
    start = lines.index(header)
    assert all(len(re.split(r"(?<!\\)\|", line)) == len(cells) for line in lines[start : start + 12])


# -- metrics and plots


def test_metrics_are_undefined_rather_than_good():
    zero, one = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    assert measure(zero, one).relative is None and measure(zero, one).cosine is None
    assert measure(one, 100 + one).correlation is None
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((2, 1000)).astype(np.float32)
    blind = measure(100 + noise[:1], 100 + noise[1:])
    assert blind.cosine > 0.999 and abs(blind.correlation) < 0.1  # a common offset makes the cosine blind
    assert measure(one, one[:1]).max_abs == np.inf and measure(one, one * np.nan).max_abs == np.inf


def test_audio_metrics_see_what_a_cosine_does_not():
    rng = np.random.default_rng(0)
    a = (0.1 * rng.standard_normal((2, 8000))).astype(np.float32)
    quiet = measure_audio(a, a * np.float32(0.01), 8000)
    assert quiet.gain == pytest.approx(100, rel=1e-3) and quiet.snr_db < 1 and quiet.aligned_snr_db > 60
    assert quiet.b.rms_dbfs == pytest.approx(quiet.a.rms_dbfs - 40, abs=0.1) and quiet.log_mel_db > 20
    late = measure_audio(a, np.roll(a, 109, axis=1), 8000)
    assert late.lag == 109 and late.aligned_snr_db > 60 > late.snr_db
    click = a.copy()
    click[:, 4000:4040] *= -1
    assert measure_audio(a, click, 8000).segmental_snr_db < 100
    assert measure_audio(a, a, 8000).snr_db == np.inf
    loud = measure_audio(a, np.where(np.arange(8000) < 3, 2.0, a).astype(np.float32), 8000)
    assert loud.b.clipped == 6 and loud.a.clipped == 0


@pytest.mark.parametrize("b", [np.zeros((2, 100)), np.full((2, 100), np.nan), np.zeros((2, 0)), np.zeros((1, 100))])
def test_audio_metrics_of_nothing_are_undefined(b):
    a = np.ones((2, 100)) * 0.1
    for pair in ((a, b), (b, a)):
        assert measure_audio(pair[0].astype(np.float32), pair[1].astype(np.float32), 8000).aligned_snr_db is None


def test_a_png_is_a_png():
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    data = plots.png(pixels)
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (7, 5)
    body = zlib.decompress(data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8])
    rows = np.frombuffer(body, np.uint8).reshape(5, 1 + 21)
    assert (rows[:, 0] == 0).all() and np.array_equal(rows[:, 1:].reshape(5, 7, 3), pixels)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [np.nan] * 3, [1e-6, np.nan, 1e-5, np.inf], [5.0, -2.0]])
@pytest.mark.parametrize("log", [False, True])
def test_line_plots_survive_anything(values, log):
    html = plots.line_plot([plots.Line("x", values)], "frame", "error", log=log, limit=None)
    assert "nan" not in html and "inf" not in html.replace("infinite", "")


def test_maps_survive_anything():
    field = np.array([[0.0, np.nan, np.inf, -np.inf]])
    pixels = plots.light_map(field, 0.0, 0.0)
    assert tuple(pixels[0, 1]) == plots.NO_VALUE and pixels.dtype == np.uint8
    assert plots.image(plots.light_map(np.zeros((0, 0)), 0, 1), "nothing", 10).startswith("<p")
    assert base64.b64decode(plots.image(pixels, "x", 10).split("base64,")[1][:-2])[:4] == b"\x89PNG"
    assert plots.agreement_map(np.array([[1, 0, 2]]))[0].tolist() == [
        list(plots.AGREE), list(plots.DIFFER), list(plots.NO_VALUE)
    ]  # fmt: skip
    assert np.isfinite(log_spectrogram(np.array([np.nan, np.inf, 0.0]), 8000)).all()
