"""Two backends on the same rows, stage by stage: how far apart, and is that what the precision explains.

The reference generates; then both read the same rows ("teacher forcing"), so that one different code does not fork the
rest. Until runtime/parity.py knows this model, the stages and verdicts are made here, from the same rules: NaN fails,
comparing nothing fails, what was not measured is not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from runtime.errors import ParityError
from runtime.sfx.codec import Decoding, decode
from runtime.sfx.config import SfxConfig
from runtime.sfx.delay import DelayState, TextChoice, segments
from runtime.sfx.generate import RowModel, generate
from runtime.sfx.prompt import SoundPrompt
from runtime.sfx.sampling import SeenCodes, SfxSampling, code_scores, probabilities
from runtime.sfx.sound_effects import SoundEffects

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class Verdict(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    NOT_MEASURED = "not measured"


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
class Stage:
    """One line of the report."""

    name: str
    value: str
    limit: str
    verdict: Verdict


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
    stages = [
        _hidden("hidden after the prompt", reference.hidden[:1], other.hidden[:1], limits),
        _hidden("hidden after each row", reference.hidden[1:], other.hidden[1:], limits),
    ]
    states = _Replay(config, prompt, rows)
    inside = np.array([c is TextChoice.INSIDE for c in states.text_choices])
    stages.append(_top_1("slot", reference.slots[inside], other.slots[inside], limits))
    for book in range(config.n_vq):
        used = states.sampled[:, book]
        stages.append(_top_1(f"codebook {book}", reference.codes[used, book], other.codes[used, book], limits))
    stages.append(_divergence(reference, other, states, sampling, limits))
    return stages


def compare_waveforms(reference: Floats, other: Floats, limits: Limits) -> Stage:
    """The codec on the same codes, as a signal-to-noise ratio."""
    if reference.shape != other.shape or not reference.size:
        return Stage("codec SNR", f"{other.shape} against {reference.shape}", "", Verdict.FAILED)
    noise = np.square(reference.astype(np.float64) - other).sum()
    signal = np.square(reference.astype(np.float64)).sum()
    snr = np.inf if noise == 0 else 10 * np.log10(signal / noise)
    worst = np.abs(reference - other).max()
    value = f"{snr:.1f} dB, max |difference| {worst:.2e}"
    return Stage("codec SNR", value, f">= {limits.snr_db:g} dB", _verdict(snr >= limits.snr_db, noise, signal))


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
        return Stage(name, "no rows", "", Verdict.NOT_MEASURED)
    a, b = reference.astype(np.float64), other.astype(np.float64)
    cosine = (a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-30)
    worst = np.abs(a - b).max()
    value = f"cosine {cosine.min():.7f}, max |difference| {worst:.2e} of {np.abs(a).max():.1f}"
    return Stage(name, value, f"cosine >= {limits.cosine:g}", _verdict(cosine.min() >= limits.cosine, worst))


def _top_1(name: str, reference: Floats, other: Floats, limits: Limits) -> Stage:
    """Equal best candidates; a mismatch counts only where the reference was sure by more than the margin."""
    name = f"top-1 {name}"
    if not len(reference):
        return Stage(name, "never sampled", "", Verdict.NOT_MEASURED)
    best, second = np.sort(reference, axis=-1)[:, [-1, -2]].T
    equal = reference.argmax(-1) == other.argmax(-1)
    sure = best - second > limits.margin
    share = float((equal | ~sure).mean())
    first = "" if equal.all() else f", first difference at its row {int(np.flatnonzero(~equal)[0])}"
    value = f"{int(equal.sum())} of {len(equal)} equal, {int((~equal & ~sure).sum())} close calls differ{first}"
    return Stage(name, value, f">= {limits.top_1:.0%} beyond {limits.margin:g}", _verdict(share >= limits.top_1, other))


def _divergence(reference: Trace, other: Trace, states: _Replay, sampling: SfxSampling, limits: Limits) -> Stage:
    """KL(reference || other) on the candidates that the reference's filters keep."""
    if sampling.temperature == 0:
        return Stage("KL of sampled codes", "greedy decoding draws nothing", "", Verdict.NOT_MEASURED)
    found = []
    for i, books in enumerate(states.sampled):
        if not books.any():
            continue
        seen = states.seen[i].penalised(0, sampling.penalty_scope)[books]
        p = probabilities(code_scores(reference.codes[i, books], seen, sampling), sampling.top_k, sampling.top_p)
        scores = code_scores(other.codes[i, books], seen, sampling)
        scores[p == 0] = -np.inf
        q = probabilities(scores, scores.shape[-1], 1.0)
        kept = p > 0
        ratio = np.log(p, where=kept, out=np.zeros_like(p)) - np.log(q, where=kept, out=np.zeros_like(q))
        found.append((p * ratio).sum(-1))
    if not found:
        return Stage("KL of sampled codes", "no codes", "", Verdict.NOT_MEASURED)
    kl = np.concatenate(found)
    value = f"mean {kl.mean():.2e}, largest {kl.max():.2e} nats over {len(kl)} distributions"
    return Stage("KL of sampled codes", value, f"mean <= {limits.kl:g}", _verdict(kl.mean() <= limits.kl, kl))


def _verdict(held: bool, *must_be_finite: npt.ArrayLike) -> Verdict:
    finite = all(np.isfinite(np.asarray(x)).all() for x in must_be_finite)
    return Verdict.PASSED if held and finite else Verdict.FAILED


def overall(stages: Sequence[Stage]) -> Verdict:
    """FAILED when one stage failed, PASSED when all that were measured passed, and something was."""
    verdicts = {s.verdict for s in stages}
    if Verdict.FAILED in verdicts:
        return Verdict.FAILED
    return Verdict.PASSED if Verdict.PASSED in verdicts else Verdict.NOT_MEASURED


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
            stages.append(Stage("codec SNR", "no complete frame", "", Verdict.NOT_MEASURED))
        elif effects.codec_name == codec_name:
            stages.append(Stage("codec SNR", f"both run {codec_name}", "", Verdict.NOT_MEASURED))
        else:
            again = [decode(effects.codec, c, Decoding.UPSTREAM) for c in codes]
            # The codec is float32 whatever the language model is.
            stages.append(compare_waveforms(np.hstack(waveforms), np.hstack(again), LIMITS["float32"]))
    return Report(reference_name, other_name, len(run.rows), limits, tuple(stages))
