"""One stage after the other: does side b have what side a has?

Values that follow from a different choice are not compared: in a replay, the logits of a codebook count while all
earlier codes of the frame are equal; a free run counts up to its first different choice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.compare import Tolerance, compare_tensors, is_constant, measure
from runtime.generate import MAX_FRAMES
from runtime.parity_choices import Rule, differences
from runtime.parity_record import GREEDY, Recording, Trace
from runtime.parity_verdict import CodeDifference, Growth, Limits, Mode, Stage, Verdict
from runtime.spec import Array

Ints = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

STAGES = (
    "token ids", "prompt rows", "reference codes", "prefill hidden", "prefill cache", "step hidden", "slot logits",
    "code logits", "codes", "codec latents", "waveform",
)  # fmt: skip
REQUIRED = ("token ids", "prompt rows", "prefill hidden", "code logits", "codes")  # without them there is no verdict
MIN_FRAMES_FOR_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Common:
    """What two runs on the same inputs have in common: the traces, what they were fed, and which values count."""

    a: Trace
    b: Trace
    frames: int
    counts: Mask  # [frames, n_vq]: whether the logits of a codebook can be compared
    same_prompt: bool
    source: str  # which runs these are


def common_part(a: Recording, b: Recording) -> Common:
    """The replays when both were fed the same, else the greedy runs up to their first different choice."""
    same_prompt = np.array_equal(a.replay_rows, b.replay_rows)
    if same_prompt and np.array_equal(a.replay_codes, b.replay_codes) and "replay" in a.traces and "replay" in b.traces:
        first, second = a.traces["replay"], b.traces["replay"]
        frames, source = min(len(first.codes), len(second.codes)), "replay of a's codes"
    else:
        first, second, source = a.traces["greedy"], b.traces["greedy"], "greedy runs up to the first different choice"
        same_prompt = np.array_equal(a.rows, b.rows)
        frames = _frames_until_different(first, second) if same_prompt else 0
    equal = first.codes[:frames] == second.codes[:frames] if frames else np.zeros((0, 0), bool)
    before = np.cumprod(np.concatenate([np.ones((frames, 1), bool), equal[:, :-1]], axis=1), axis=1).astype(bool)
    return Common(first, second, frames, before if frames else equal, same_prompt, source)


def _frames_until_different(a: Trace, b: Trace) -> int:
    n = min(len(a.codes), len(b.codes))
    same = (a.codes[:n] == b.codes[:n]).all(axis=1) & (a.go_on[:n] == b.go_on[:n]) if n else np.zeros(0, bool)
    different = np.flatnonzero(~same)
    return int(different[0]) + 1 if len(different) else n


def build_stages(a: Recording, b: Recording, common: Common, replay: Mode, limits: Limits) -> tuple[Stage, ...]:
    """Every stage of STAGES, in order."""
    n, first, second = common.frames, common.a, common.b
    no_frames = f"the sides have no frame in common ({common.source})"

    def part(trace: Trace, name: str, start: int, stop: int) -> Array | None:
        values = getattr(trace, name)
        return None if values is None else np.asarray(values[start:stop])

    def frames_stage(name: str, field: str, start: int, stop: int, tolerance: Tolerance) -> Stage:
        if stop <= start:
            return Stage(name, Verdict.NOT_MEASURED, no_frames if not n else "there is only one frame")
        values = part(first, field, start, stop), part(second, field, start, stop)
        index = np.arange(start, stop)[:, None]
        return tensor_stage(name, *values, tolerance, index)

    return (
        integer_stage("token ids", a.token_ids, b.token_ids),
        _rows_stage(a, b),
        _reference_stage(a, b, limits),
        frames_stage("prefill hidden", "hidden", 0, min(n, 1), limits.hidden),
        _cache_stage(a, b, common, limits),
        frames_stage("step hidden", "hidden", 1, n, limits.hidden),
        frames_stage("slot logits", "slot_logits", 0, n, limits.logits),
        _code_logits_stage(common, limits) if n else Stage("code logits", Verdict.NOT_MEASURED, no_frames),
        Stage("codes", replay.verdict, replay.text, frame=_of(replay, "frame"), codebook=_of(replay, "codebook")),
        _decoded_stage("codec latents", a.latents, b.latents, a, b, limits),
        _decoded_stage("waveform", a.waveform, b.waveform, a, b, limits),
    )


def _of(mode: Mode, name: str) -> int | None:
    return getattr(mode.first, name) if mode.first is not None else None


# -- values


def tensor_stage(
    name: str, a: Array | None, b: Array | None, tolerance: Tolerance, index: Array, optional: bool = False
) -> Stage:
    """Compare floats [rows, …]; `index` [rows, 1 or 2] says which frame (and codebook) each row is."""
    if a is None or b is None:
        return _missing(name, a, b, optional)
    if a.shape != b.shape:
        return Stage(name, Verdict.ERROR, f"a has {list(a.shape)} values, b has {list(b.shape)}")
    if not a.size:
        return Stage(name, Verdict.NOT_MEASURED, "there is no value to compare")
    broken = np.asarray(~(np.isfinite(a) & np.isfinite(b)))
    if broken.any():
        frame, codebook = _place(index, np.asarray(broken.reshape(len(a), -1).any(axis=1)))
        sides = " and ".join(s for s, v in (("a", a), ("b", b)) if not np.isfinite(v).all())
        text = f"NaN or infinity on {sides}, {int(broken.sum())} of {a.size} values"
        return Stage(name, Verdict.DIVERGENT, text, measure(a, b), frame=frame, codebook=codebook)
    return _finite_stage(name, a, b, tolerance, index)


def _finite_stage(name: str, a: Array, b: Array, tolerance: Tolerance, index: Array) -> Stage:
    found, metrics = compare_tensors(name, a, b, tolerance), measure(a, b)
    allowed = tolerance.atol + tolerance.rtol * found.reference_max
    verdict, text, frame, codebook = Verdict.WITHIN_TOLERANCE, found.reason, None, None
    if not found.passed:
        gaps = np.abs(a.astype(np.float64) - b.astype(np.float64)).reshape(len(a), -1).max(axis=1)
        verdict, (frame, codebook) = Verdict.DIVERGENT, _place(index, gaps > allowed)
    elif is_constant(a):
        verdict = Verdict.NOT_MEASURED
        text = f"every value is {a.flat[0]:.4g} on a: agreement with a constant proves nothing"
    elif np.array_equal(a, b):
        verdict, text = Verdict.EXACT, f"{a.size} values are equal"
    return Stage(name, verdict, text, metrics, allowed, found.passing_atol, frame, codebook)


def _place(index: Array, wrong: Array) -> tuple[int | None, int | None]:
    row = index[int(np.flatnonzero(wrong)[0])]
    return int(row[0]), int(row[1]) if len(row) > 1 else None


def _missing(name: str, a: Array | None, b: Array | None, optional: bool) -> Stage:
    if (a is None) == (b is None):
        return Stage(name, Verdict.NOT_MEASURED, "neither side gives these values")
    text = f"{'a' if a is None else 'b'} does not give these values"
    return Stage(name, Verdict.NOT_MEASURED if optional else Verdict.ERROR, text)


def integer_stage(name: str, a: Ints | None, b: Ints | None) -> Stage:
    """Compare ids or codes [rows] or [rows, columns]; they must be equal."""
    if a is None or b is None:
        return _missing(name, a, b, optional=False)
    if not a.size and not b.size:
        return Stage(name, Verdict.NOT_MEASURED, "both are empty")
    n = min(len(a), len(b))
    if a.shape[1:] != b.shape[1:]:
        return Stage(name, Verdict.ERROR, f"a has {list(a.shape)} values, b has {list(b.shape)}")
    wrong = (a[:n] != b[:n]).reshape(n, -1)
    if wrong.any():
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        values = f"{a[:n].reshape(n, -1)[row, column]} against {b[:n].reshape(n, -1)[row, column]}"
        place = f"row {row}" + (f", column {column}" if a.ndim > 1 else "")
        lengths = "" if len(a) == len(b) else f"; {len(a)} rows against {len(b)}"
        text = f"{int(wrong.sum())} of {wrong.size} differ, first at {place}: {values}{lengths}"
        return Stage(name, Verdict.DIVERGENT, text, frame=row)
    if len(a) != len(b):
        return Stage(name, Verdict.DIVERGENT, f"{len(a)} rows against {len(b)}, the common part is equal", frame=n)
    return Stage(name, Verdict.EXACT, f"{a.size} numbers are equal")


def _rows_stage(a: Recording, b: Recording) -> Stage:
    """The prompt; where the reference codes differ, its text rows alone, so that the stage that parted is named."""
    if a.reference_codes is None or b.reference_codes is None or np.array_equal(a.reference_codes, b.reference_codes):
        return integer_stage("prompt rows", a.rows, b.rows)

    def text_rows(rows: Ints) -> Ints:  # the first row is text: its code columns hold the pad
        return np.asarray(rows[(rows[:, 1:] == rows[0, 1]).all(axis=1)], np.int32)

    return integer_stage("prompt rows", text_rows(a.rows), text_rows(b.rows))


def _reference_stage(a: Recording, b: Recording, limits: Limits) -> Stage:
    name = "reference codes"
    if a.reference_codes is None and b.reference_codes is None:
        return Stage(name, Verdict.NOT_MEASURED, "no voice was given")
    if a.plan.stored_voice is not None and a.plan.stored_voice == b.plan.stored_voice:
        return Stage(name, Verdict.NOT_MEASURED, f"{a.plan.stored_voice} is a stored voice: no side encoded a clip")
    stage = integer_stage(name, a.reference_codes, b.reference_codes)
    if stage.verdict is Verdict.EXACT:
        return dataclasses.replace(stage, share=1.0)
    if stage.verdict is not Verdict.DIVERGENT or a.reference_codes is None or b.reference_codes is None:
        return stage
    n = min(len(a.reference_codes), len(b.reference_codes))
    wrong = a.reference_codes[:n] != b.reference_codes[:n]
    if not wrong.any():
        return stage
    share = float(1 - wrong.mean())
    frame, codebook = (int(i) for i in np.argwhere(wrong)[0])
    text = f"{stage.text}; equal per codebook: {', '.join(f'{s:.0%}' for s in 1 - wrong.mean(axis=0))}"
    same_length = len(a.reference_codes) == len(b.reference_codes)
    verdict = Verdict.WITHIN_TOLERANCE if same_length and share >= limits.reference_share else Verdict.DIVERGENT
    return Stage(name, verdict, text, frame=frame, codebook=codebook, share=share)


def _cache_stage(a: Recording, b: Recording, common: Common, limits: Limits) -> Stage:
    name = "prefill cache"
    if not common.same_prompt or common.source.startswith("greedy"):
        return Stage(name, Verdict.NOT_MEASURED, "the sides read different prompts")
    if a.cache is None or b.cache is None:
        return _missing(name, a.cache, b.cache, optional=False)
    stage = tensor_stage(name, a.cache, b.cache, limits.hidden, np.arange(len(a.cache))[:, None])
    if stage.frame is None:
        return stage
    kind = "value" if stage.frame % 2 else "key"  # the first axis counts key_0, value_0, key_1, …
    text = f"{stage.text}; first in the {kind}s of layer {stage.frame // 2}"
    return Stage(name, stage.verdict, text, stage.metrics, stage.allowed, stage.passing)


def _code_logits_stage(common: Common, limits: Limits) -> Stage:
    a, b = common.a.code_logits, common.b.code_logits
    if a is None or b is None:
        return _missing("code logits", a, b, optional=False)
    if a.shape[1:] != b.shape[1:]:
        return Stage("code logits", Verdict.ERROR, f"a has {list(a.shape[1:])} logits a frame, b {list(b.shape[1:])}")
    index = np.argwhere(common.counts)
    picked = a[: common.frames][common.counts], b[: common.frames][common.counts]
    return tensor_stage("code logits", *picked, limits.logits, index)


def _decoded_stage(
    name: str, a: Array | None, b: Array | None, side_a: Recording, side_b: Recording, limits: Limits
) -> Stage:
    """What the codec makes of the replayed codes: the same codes on both sides."""
    failed = [f"{s}: {r.failures[name]}" for s, r in (("a", side_a), ("b", side_b)) if name in r.failures]
    if failed:
        return Stage(name, Verdict.ERROR, "; ".join(failed))
    if not np.array_equal(side_a.replay_codes, side_b.replay_codes):
        return Stage(name, Verdict.NOT_MEASURED, "the sides decoded different codes")
    latents = name == "codec latents"
    if a is None or b is None:
        return _missing(name, a, b, optional=latents)
    if latents:
        return tensor_stage(name, a, b, limits.hidden, np.arange(len(a))[:, None], optional=True)
    return waveform_stage(a, b, len(side_a.replay_codes), limits)


def waveform_stage(a: Array, b: Array, num_frames: int, limits: Limits) -> Stage:
    """Two waveforms [channels, samples] of the same `num_frames` frames of codes."""
    if a.shape != b.shape:
        return Stage("waveform", Verdict.DIVERGENT, f"a has {list(a.shape)} samples, b has {list(b.shape)}")
    rows = np.arange(a.shape[-1])[:, None]  # a row is one sample of all channels
    stage = tensor_stage("waveform", a.T, b.T, limits.waveform, rows)
    samples = a.shape[-1] // max(num_frames, 1)
    frame = None if stage.frame is None or not samples else stage.frame // samples
    return dataclasses.replace(stage, frame=frame, codebook=None)


# -- modes


def free_mode(name: str, a: Recording, b: Recording, limits: Limits) -> Mode:
    """Greedy or seeded, each side on its own."""
    if name not in a.traces or name not in b.traces:
        return Mode(name, Verdict.NOT_MEASURED, "not recorded on both sides")
    sampling = GREEDY if name == "greedy" else a.plan.sampling
    return compare_traces(name, a.traces[name], b.traces[name], Rule(sampling, a.plan.seed, limits.tie_margin))


def compare_traces(name: str, first: Trace, second: Trace, rule: Rule) -> Mode:
    """Two free runs of one request, up to their first different choice."""
    if first.codes.shape[1:] != second.codes.shape[1:]:
        return Mode(
            name, Verdict.ERROR, f"a has frames of {first.codes.shape[1:]} codes, b of {second.codes.shape[1:]}"
        )
    found = next(differences(first, second, rule, None), None)
    n = min(first.num_frames, second.num_frames)
    equal = first.codes[:n] == second.codes[:n]
    shared = {
        "frames": (first.num_frames, second.num_frames),
        "same_codes": int(equal.sum()),
        "compared": int(equal.size),
        "per_codebook": tuple(float(x) for x in equal.mean(axis=0)) if n else (),
        "first": found,
    }
    if found is not None:
        verdict = Verdict.NEAR_TIE if found.tie else Verdict.DIVERGENT
        return Mode(name, verdict, str(found), **shared)  # type: ignore[arg-type]  # names and types are those of Mode
    if first.num_frames != second.num_frames:
        text = f"{first.num_frames} frames against {second.num_frames}, the common part is equal"
        return Mode(name, Verdict.ERROR, text, **shared)  # type: ignore[arg-type]
    if not n:
        return Mode(name, Verdict.NOT_MEASURED, "both sides ended before the first frame", **shared)  # type: ignore[arg-type]
    return Mode(name, Verdict.EXACT, f"{equal.size} codes in {n} frames are equal", **shared)  # type: ignore[arg-type]


def replay_mode(common: Common, a: Recording, limits: Limits) -> Mode:
    """Both sides fed a's codes: every frame is a comparison of its own."""
    if not common.frames or not common.source.startswith("replay"):
        return Mode("replay", Verdict.NOT_MEASURED, f"no replay of the same codes on both sides; used: {common.source}")
    if len(common.a.codes) != len(common.b.codes):
        text = f"{len(common.a.codes)} replayed frames against {len(common.b.codes)}"
        return Mode("replay", Verdict.ERROR, text)
    rule = Rule(GREEDY, a.plan.seed, limits.tie_margin)
    found = list(differences(common.a, common.b, rule, a.replay_codes))
    ties = sum(d.tie for d in found)
    equal = common.a.codes == common.b.codes
    if not found:
        verdict, text = Verdict.EXACT, f"{equal.size} codes in {common.frames} frames are equal"
    else:
        verdict = Verdict.NEAR_TIE if ties == len(found) else Verdict.DIVERGENT
        text = f"{len(found)} of {common.frames} frames differ, {ties} of them by a tie; first: {named(found)}"
    if is_constant(common.a.codes) and verdict is Verdict.EXACT:
        verdict, text = Verdict.NOT_MEASURED, f"every code is {common.a.codes.flat[0]}: agreement proves nothing"
    return Mode(
        "replay",
        verdict,
        text,
        (common.frames, common.frames),
        int(equal.sum()),
        int(equal.size),
        tuple(float(x) for x in equal.mean(axis=0)),
        named(found),
        ties,
        len(found) - ties,
    )


def named(found: list[CodeDifference]) -> CodeDifference | None:
    """The difference to talk about: the first that is no tie, else the first."""
    return next((d for d in found if not d.tie), found[0] if found else None)


def error_growth(common: Common, limits: Limits) -> Growth:
    """Fit a line through the relative error of the hidden states over the frames.

    It grows when the slope is significant (four standard errors) and would leave the tolerance before MAX_FRAMES.
    """
    a, b = common.a.hidden, common.b.hidden
    if a is None or b is None or a.shape[1:] != b.shape[1:] or common.frames < MIN_FRAMES_FOR_GROWTH:
        needed = f"needs hidden states of at least {MIN_FRAMES_FOR_GROWTH} common frames"
        return Growth(Verdict.NOT_MEASURED, needed)
    x, y = a[: common.frames].astype(np.float64), b[: common.frames].astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return Growth(Verdict.NOT_MEASURED, "NaN or infinity in the hidden states")
    norms = np.linalg.norm(x, axis=1)
    errors = np.linalg.norm(x - y, axis=1) / np.maximum(norms, 1e-30)
    per_frame = tuple(float(e) for e in errors)
    if not errors.any():
        return Growth(Verdict.EXACT, "no error in any frame", 0.0, per_frame)
    slope, intercept, standard_error = _fit(errors)
    largest = float(np.abs(x).max())
    allowed = (limits.hidden.atol + limits.hidden.rtol * largest) * np.sqrt(x.shape[1]) / float(norms.mean() or 1.0)
    reached = intercept + slope * MAX_FRAMES
    grows = slope > 4 * standard_error and reached > 4 * max(float(errors[0]), intercept, 0.0)
    if grows and reached > allowed:
        text = f"the error grows by {slope:.3g} a frame and would be {reached:.3g} at frame {MAX_FRAMES}"
        return Growth(Verdict.DIVERGENT, f"{text}, beyond {allowed:.3g}", slope, per_frame)
    said = f"grows by {slope:.3g} a frame, harmless" if grows else "does not grow with the position"
    text = f"the error {said} (mean {errors.mean():.3g}, largest {errors.max():.3g})"
    return Growth(Verdict.WITHIN_TOLERANCE, text, slope, per_frame)


def _fit(errors: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Slope, intercept, and standard error of the slope."""
    t = np.arange(len(errors), dtype=np.float64)
    spread = float(np.sum((t - t.mean()) ** 2))
    slope = float(np.sum((t - t.mean()) * (errors - errors.mean()))) / spread
    intercept = float(errors.mean() - slope * t.mean())
    residuals = errors - intercept - slope * t
    return slope, intercept, float(np.sqrt(np.sum(residuals**2) / (len(errors) - 2) / spread))
