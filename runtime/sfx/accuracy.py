"""Two backends on the same rows, stage by stage: how far apart, and is that what the precision explains.

The reference generates; then both read the same rows ("teacher forcing"), so that one different code does not fork the
rest. Stages and verdicts are those of the parity tool (runtime/parity_verdict.py): NaN is divergent, what was not
measured has not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.compare import measure
from runtime.compare_audio import measure_audio
from runtime.errors import ParityError
from runtime.parity_verdict import Stage, Verdict, worst
from runtime.sfx.codec import Decoding, decode
from runtime.sfx.config import SfxConfig
from runtime.sfx.delay import DelayState, TextChoice, segments
from runtime.sfx.generate import RowModel, generate
from runtime.sfx.prompt import SoundPrompt
from runtime.sfx.sampling import SeenCodes, SfxSampling, code_scores, probabilities
from runtime.sfx.sound_effects import SoundEffects

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one precision may differ from the float32 reference."""

    cosine: float  # of every hidden state
    top_1: float  # share of equal best candidates, close calls left out
    margin: float  # a best candidate that wins by less than this is a close call
    kl: float  # mean over the sampled distributions, in nats
    snr_db: float  # of the codec
    reason: str


# float32: rounding of sums only. bfloat16: 8 bits; the bound on the cosine is the one that reports on this model family
# use, logits near 10 are 0.06 apart. float16: 11 bits.
LIMITS = {
    "float32": Limits(0.999999, 1.0, 1e-3, 1e-4, 80.0, "float32, other order of sums"),
    "float16": Limits(0.9999, 0.99, 0.02, 1e-2, 40.0, "float16: 11 bits"),
    "bfloat16": Limits(0.999, 0.95, 0.1, 5e-2, 30.0, "bfloat16: 8 bits"),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """What a model says about prompt and rows: one entry per row that chose the next one."""

    hidden: Floats  # [1 + N, E]: after the prompt, then after each row but the last
    slots: Floats  # [1 + N, 2]
    codes: Floats  # [1 + N, n_vq, V]


def trace_rows(model: RowModel, prompt: Ints, rows: Ints) -> Trace:
    """Read the prompt, then rows [N, 1 + n_vq] one by one as generation does."""
    model.start(1, len(prompt) + len(rows))
    hidden = [model.read(prompt[None], np.array([len(prompt)], np.int32))[0]]
    for row in rows[:-1]:
        hidden.append(model.read(row[None, None], np.ones(1, np.int32))[0])
    inside = [model.inside(h[None]) for h in hidden]
    return Trace(np.stack(hidden), np.concatenate([i.slots for i in inside]), np.concatenate([i.codes for i in inside]))


def compare_traces(
    reference: Trace, other: Trace, prompt: Ints, rows: Ints, config: SfxConfig, sampling: SfxSampling, limits: Limits
) -> list[Stage]:
    """Hidden states, best candidates, and the distributions that codes are drawn from."""
    if reference.hidden.shape != other.hidden.shape or not len(reference.hidden):
        raise ParityError(f"traces of {reference.hidden.shape} and {other.hidden.shape} cannot be compared")
    replay = _Replay(config, prompt, rows)
    inside = np.array([c is TextChoice.INSIDE for c in replay.text_choices])
    return [
        _hidden("prefill hidden", reference.hidden[:1], other.hidden[:1], limits),
        _hidden("step hidden", reference.hidden[1:], other.hidden[1:], limits),
        _top_1("slot logits", reference.slots, other.slots, inside, limits),
        *(
            _top_1(f"codebook {book}", reference.codes[:, book], other.codes[:, book], used, limits, book)
            for book, used in enumerate(replay.sampled.T)
        ),
        _divergence(reference, other, replay, sampling, limits),
    ]


def compare_waveforms(reference: Floats, other: Floats, sample_rate_hz: int, limits: Limits) -> Stage:
    """The codec on the same codes [1, N], as a signal-to-noise ratio."""
    if reference.shape != other.shape or not np.isfinite(other).all():
        return Stage("waveform", Verdict.DIVERGENT, f"{other.shape} against {reference.shape} samples, or not finite")
    if np.array_equal(reference, other):
        return Stage("waveform", Verdict.EXACT, f"{reference.size} samples are equal", measure(reference, other))
    snr = measure_audio(reference, other, sample_rate_hz).snr_db
    if snr is None:
        return Stage("waveform", Verdict.NOT_MEASURED, "the reference is silent")
    text = f"SNR {snr:.1f} dB, at least {limits.snr_db:g} expected"
    return Stage("waveform", _within(snr >= limits.snr_db), text, measure(reference, other))


class _Replay:
    """The states of a run, and its seen codes, before each row."""

    def __init__(self, config: SfxConfig, prompt: Ints, rows: Ints) -> None:
        state, seen = DelayState(config, prompt), SeenCodes(1, config.n_vq, config.codebook_size)
        seen.add(0, prompt)
        self.text_choices: list[TextChoice] = []
        self.seen: list[SeenCodes] = []
        sampled = []
        for row in rows:
            self.text_choices.append(state.text_choice)
            sampled.append(state.sampled_books())
            before = SeenCodes(1, config.n_vq, config.codebook_size)
            before.table[:] = seen.table
            self.seen.append(before)
            state.advance(int(row[0]))
            seen.add(0, row[None])
        self.sampled = np.stack(sampled)


def _hidden(name: str, reference: Floats, other: Floats, limits: Limits) -> Stage:
    if not len(reference):
        return Stage(name, Verdict.NOT_MEASURED, "no rows")
    metrics = measure(reference, other)
    if np.array_equal(reference, other):
        return Stage(name, Verdict.EXACT, f"{len(reference)} states are equal", metrics)
    a, b = reference.astype(np.float64), other.astype(np.float64)
    cosine = (a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-30)
    low = int(np.argmin(np.nan_to_num(cosine, nan=-2.0)))
    text = (
        f"lowest cosine {cosine[low]:.7f}, at least {limits.cosine:g} expected; max |difference| {metrics.max_abs:.2e}"
    )
    return Stage(name, _within(cosine[low] >= limits.cosine, other), text, metrics, frame=low)


def _top_1(
    name: str, reference: Floats, other: Floats, used: Bools, limits: Limits, codebook: int | None = None
) -> Stage:
    """Equal best candidates of the rows that were used; one that led by less than the margin is a near tie."""
    if not used.any():
        return Stage(name, Verdict.NOT_MEASURED, "never sampled", codebook=codebook)
    a, b = reference[used], other[used]
    best, second = np.sort(a, axis=-1)[:, [-1, -2]].T
    equal = a.argmax(-1) == b.argmax(-1)
    sure = ~equal & (best - second > limits.margin)
    share = 1 - float(sure.mean())
    text = f"{int(equal.sum())} of {len(equal)} best candidates equal"
    if not equal.all():
        text += f", {int(sure.sum())} of the others led by more than {limits.margin:g}; {limits.top_1:.0%} expected"
    verdict = Verdict.EXACT if equal.all() else Verdict.WITHIN_TOLERANCE if sure.any() else Verdict.NEAR_TIE
    if share < limits.top_1 or not np.isfinite(b).all():
        verdict = Verdict.DIVERGENT
    first = None if equal.all() else int(np.flatnonzero(used)[~equal][0])
    return Stage(name, verdict, text, measure(a, b), frame=first, codebook=codebook)


def _divergence(reference: Trace, other: Trace, replay: _Replay, sampling: SfxSampling, limits: Limits) -> Stage:
    """KL(reference || other) on the candidates that the reference's filters keep."""
    if sampling.temperature == 0:
        return Stage("distributions", Verdict.NOT_MEASURED, "greedy decoding draws nothing")
    found = []
    for i, books in enumerate(replay.sampled):
        if not books.any():
            continue
        seen = replay.seen[i].penalised(0, sampling.penalty_scope)[books]
        p = probabilities(code_scores(reference.codes[i, books], seen, sampling), sampling.top_k, sampling.top_p)
        scores = code_scores(other.codes[i, books], seen, sampling)
        scores[p == 0] = -np.inf
        q = probabilities(scores, scores.shape[-1], 1.0)
        kept = p > 0
        p, q = (x.astype(np.float64) / x.sum(-1, keepdims=True, dtype=np.float64) for x in (p, q))
        ratio = np.log(p, where=kept, out=np.zeros_like(p)) - np.log(q, where=kept, out=np.zeros_like(q))
        found.append((p * ratio).sum(-1))
    if not found:
        return Stage("distributions", Verdict.NOT_MEASURED, "no codes")
    kl = np.concatenate(found)
    text = (
        f"KL mean {kl.mean():.2e}, largest {kl.max():.2e} nats over {len(kl)} distributions; a mean of at most "
        f"{limits.kl:g} expected"
    )
    return Stage("distributions", Verdict.EXACT if not kl.any() else _within(kl.mean() <= limits.kl, kl), text)


def _within(held: bool | np.bool_, *must_be_finite: npt.ArrayLike) -> Verdict:
    finite = all(np.isfinite(np.asarray(x)).all() for x in must_be_finite)
    return Verdict.WITHIN_TOLERANCE if held and finite else Verdict.DIVERGENT


def overall(stages: Sequence[Stage]) -> Verdict:
    """The worst of what was measured; NOT_MEASURED when nothing was."""
    return worst(s.verdict for s in stages if s.verdict is not Verdict.NOT_MEASURED)


@dataclass(frozen=True, slots=True)
class Report:
    """One comparison."""

    reference: str
    other: str
    num_rows: int
    limits: Limits
    stages: tuple[Stage, ...]

    @property
    def verdict(self) -> Verdict:
        return overall(self.stages)


def measure_accuracy(
    open_reference: Callable[[], SoundEffects],
    open_other: Callable[[], SoundEffects],
    prompt: SoundPrompt,
    seed: int,
    sampling: SfxSampling,
    max_new_tokens: int,
) -> Report:
    """Let the reference generate, close it, and let the other read the same rows: one model in memory at a time."""
    with open_reference() as effects:
        rows = effects.encoder.rows(prompt)
        [run] = generate(effects.model, [rows], sampling, [seed], max_new_tokens)
        reference, reference_name = trace_rows(effects.model, rows, run.rows), effects.model.backend_name
        codec_name, codes = effects.codec_name, segments(run.rows, effects.model.config).codes
        waveforms = [decode(effects.codec, c, Decoding.UPSTREAM) for c in codes]
    with open_other() as effects:
        other, other_name = trace_rows(effects.model, rows, run.rows), effects.model.backend_name
        limits = LIMITS[other_name.rpartition(" ")[2]]
        stages = compare_traces(reference, other, rows, run.rows, effects.model.config, sampling, limits)
        if not codes:
            stages.append(Stage("waveform", Verdict.NOT_MEASURED, "no complete frame"))
        elif effects.codec_name == codec_name:
            stages.append(Stage("waveform", Verdict.NOT_MEASURED, f"both run {codec_name}"))
        else:
            again = [decode(effects.codec, c, Decoding.UPSTREAM) for c in codes]
            rate = effects.codec.config.sample_rate_hz
            # The codec is float32 whatever the language model is.
            stages.append(compare_waveforms(np.hstack(waveforms), np.hstack(again), rate, LIMITS["float32"]))
    return Report(reference_name, other_name, len(run.rows), limits, tuple(stages))
