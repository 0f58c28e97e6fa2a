"""Two recordings in, one verdict out: stage by stage, mode by mode, with the first place where they part and why.

with open_synthesizer(…) as a: first = record(a, …)          # runtime/parity_record.py
with open_synthesizer(…) as b: second = record(b, …, replay_of=first)
parity = compare(first, second)
parity.verdict, parity.text, parity.verdict.exit_code
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.compare_audio import AudioMetrics, measure_audio
from runtime.parity_causes import Engine, find_cause
from runtime.parity_choices import Rule
from runtime.parity_loss import Loss, limits_between, measure_loss
from runtime.parity_record import Identity, Plan, Recording, Trace
from runtime.parity_stages import (
    REQUIRED,
    build_stages,
    common_part,
    compare_traces,
    error_growth,
    free_mode,
    replay_mode,
    waveform_stage,
)
from runtime.parity_verdict import FLOAT32_LIMITS, Cause, Growth, Limits, Mode, Stage, Verdict, worst
from runtime.synthesizer import Request, Speech

FORMAT = "moss-parity-1"


@dataclass(frozen=True, slots=True)
class Parity:
    """The result; everything that the reports show and the JSON holds."""

    verdict: Verdict
    text: str
    a: Identity
    b: Identity
    plan: Plan
    stages: tuple[Stage, ...]
    modes: tuple[Mode, ...]
    growth: Growth
    cause: Cause | None
    audio: AudioMetrics | None
    limits: Limits
    agreement: tuple[tuple[int, ...], ...]  # replay: [frame][codebook] 1 equal, 0 different
    loss: Loss | None = None  # when the sides have weights of different precision
    floor: str | None = None  # the precision floor that the limits come from
    command: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def divergence(self) -> Stage | Mode | None:
        """The first stage, else mode, that is not in agreement."""
        bad = (Verdict.DIVERGENT, Verdict.ERROR)
        found: list[Stage | Mode] = [s for s in self.stages if s.verdict in bad]
        found += [m for m in self.modes if m.verdict in bad]
        return found[0] if found else None

    def stage(self, name: str) -> Stage:
        return next(s for s in self.stages if s.name == name)

    def mode(self, name: str) -> Mode:
        return next(m for m in self.modes if m.name == name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON data; numbers that JSON does not have become the strings "inf", "-inf", "nan"."""
        data: dict[str, Any] = {"format": FORMAT, **dataclasses.asdict(self)}
        data["exit_code"] = self.verdict.exit_code
        data["plan"]["voice"] = str(self.plan.voice) if self.plan.voice else None
        found = self.divergence
        data["first_divergence"] = _place(found) if found is not None else None
        for mode, entry in zip(self.modes, data["modes"], strict=True):
            entry["agreement"] = mode.agreement
            if mode.first is not None:
                entry["first"] |= {"a_margin": mode.first.a_margin, "b_margin": mode.first.b_margin}
        plain: dict[str, Any] = plain_numbers(data)
        return plain


def compare(
    a: Recording,
    b: Recording,
    limits: Limits | None = None,
    engine: Engine | None = None,
    floor: str | None = None,
    command: str = "",
) -> Parity:
    """Compare two recordings; `engine` can rerun one side with deliberate faults to test guesses at a cause.

    Without `limits`: those of float32, or what weights of fewer bits may cost when one side has such.
    """
    limits = limits or limits_between(a, b)
    common = common_part(a, b)
    replay = replay_mode(common, a, limits)
    modes = (free_mode("greedy", a, b, limits), free_mode("seeded", a, b, limits), replay)
    stages = build_stages(a, b, common, replay, limits)
    growth = error_growth(common, limits)
    loss = measure_loss(a.identity, b.identity, common)
    verdict = _overall(stages, modes, growth, loss)
    audio = None
    if a.waveform is not None and b.waveform is not None and np.array_equal(a.replay_codes, b.replay_codes):
        audio = measure_audio(a.waveform, b.waveform, a.sample_rate_hz)
    cause = None if verdict.agrees else find_cause(a, b, common, stages, modes, audio, engine)
    agreement: tuple[tuple[int, ...], ...] = ()
    if common.source.startswith("replay") and common.frames:
        n = common.frames
        agreement = tuple(map(tuple, (common.a.codes[:n] == common.b.codes[:n]).astype(int).tolist()))
    notes = [f"a: {n}" for n in a.notes] + [f"b: {n}" for n in b.notes] + _repeatability(a)
    return Parity(
        verdict,
        _sentence(verdict, stages, modes, growth, cause, limits, loss),
        a.identity,
        b.identity,
        a.plan,
        stages,
        modes,
        growth,
        cause,
        audio,
        limits,
        agreement,
        loss,
        floor,
        command,
        tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class SpeechParity:
    """What can be said of two finished requests: their codes, and their waveforms while the codes are equal."""

    codes: Mode
    waveform: Stage
    audio: AudioMetrics | None

    @property
    def verdict(self) -> Verdict:
        return (
            self.codes.verdict if self.codes.first is not None else worst((self.codes.verdict, self.waveform.verdict))
        )


def compare_speeches(a: Speech, b: Speech, request: Request, limits: Limits = FLOAT32_LIMITS) -> SpeechParity:
    """Compare two results of one request. With the logits kept (Synthesizer.say(…, keep_logits=True)) a tie is told
    apart from a divergence; without them every different code is a divergence."""
    mode = compare_traces("codes", _trace(a), _trace(b), Rule(request.sampling, request.seed, limits.tie_margin))
    if not np.array_equal(a.generation.codes, b.generation.codes):
        return SpeechParity(mode, Stage("waveform", Verdict.NOT_MEASURED, "the sides decoded different codes"), None)
    return SpeechParity(
        mode,
        waveform_stage(a.waveform, b.waveform, a.generation.num_frames, limits),
        measure_audio(a.waveform, b.waveform, a.sample_rate_hz),
    )


def _trace(speech: Speech) -> Trace:
    generation = speech.generation
    if generation.frames:
        return Trace.of(list(generation.frames))
    ended = generation.finish_reason == "stop"  # the decision that ended it has no codes that count
    codes = np.concatenate([generation.codes, generation.codes[-1:]]) if ended else generation.codes
    go_on = np.arange(len(codes)) < generation.num_frames
    return Trace(codes, go_on, None, None, None)


def _overall(stages: tuple[Stage, ...], modes: tuple[Mode, ...], growth: Growth, loss: Loss | None) -> Verdict:
    """The worst of all; what is not measured counts only where nothing can be said without it."""
    verdicts = [s.verdict for s in stages if s.verdict is not Verdict.NOT_MEASURED or s.name in REQUIRED]
    verdicts += [m.verdict for m in modes if m.verdict is not Verdict.NOT_MEASURED]
    verdicts += [growth.verdict] if growth.verdict is Verdict.DIVERGENT else []
    verdicts += [loss.verdict] if loss is not None else []
    if any(v is Verdict.DIVERGENT for v in verdicts):  # found apart: an error elsewhere does not hide it
        return Verdict.DIVERGENT
    return worst(verdicts)


def _sentence(
    verdict: Verdict,
    stages: tuple[Stage, ...],
    modes: tuple[Mode, ...],
    growth: Growth,
    cause: Cause | None,
    limits: Limits,
    loss: Loss | None,
) -> str:
    missing = [s.name for s in stages if s.verdict is Verdict.NOT_MEASURED]
    missing += [f"{m.name} run" for m in modes if m.verdict is Verdict.NOT_MEASURED]
    without = f" Loss: {loss.text}." if loss is not None else ""
    without += f" Not measured: {', '.join(missing)}." if missing else ""
    found: tuple[Stage | Mode, ...] = (*stages, *modes)
    bad = [x for x in found if x.verdict in (Verdict.DIVERGENT, Verdict.ERROR)]
    if bad:
        where = _place(bad[0])
        place = "".join(f", {k} {where[k]}" for k in ("frame", "codebook") if where[k] is not None)
        guess = f" Likely cause: {cause.text}." if cause is not None else ""
        codes = next((m for m in (modes[-1], *modes) if m.first is not None), None)
        named = (
            f" First different code, {codes.name}: {codes.first}."
            if codes and str(codes.first) not in bad[0].text
            else ""
        )
        return f"The sides part at {where['name']}{place}: {bad[0].text}.{named}{guess}{without}"
    if growth.verdict is Verdict.DIVERGENT:
        return f"All stages agree, but {growth.text}.{without}"
    if loss is not None and loss.verdict is Verdict.DIVERGENT:
        return f"All stages agree, but the loss is beyond what such weights may cost.{without}"
    if verdict is Verdict.NOT_MEASURED:
        return f"Nothing can be said.{without}"
    if verdict is Verdict.NEAR_TIE:
        tie = next(m for m in modes if m.verdict is Verdict.NEAR_TIE)
        return (
            f"The sides agree within {limits.source}; they part where two codes tie within {limits.tie_margin:g}: "
            f"{tie.name}, {tie.first}.{without}"
        )
    exact = "to the bit" if verdict is Verdict.EXACT else f"within the tolerances of {limits.source}"
    return f"The sides agree {exact}, in every code of every run.{without}"


def _place(found: Stage | Mode) -> dict[str, Any]:
    if isinstance(found, Stage):
        return {"name": found.name, "frame": found.frame, "codebook": found.codebook, "text": found.text}
    first = found.first
    frame, codebook = (first.frame, first.codebook) if first is not None else (None, None)
    return {"name": f"the {found.name} run", "frame": frame, "codebook": codebook, "text": found.text}


def _repeatability(a: Recording) -> list[str]:
    """A's replay of its own codes must choose them again."""
    if "replay" not in a.traces or len(a.traces["replay"].codes) != len(a.replay_codes):
        return []
    again = a.traces["replay"].codes
    own = a.traces["greedy"].codes[a.traces["greedy"].go_on]
    if np.array_equal(a.replay_codes, own) and not np.array_equal(again, own):
        return ["a does not repeat itself: the replay of its own codes chose others"]
    return []


def plain_numbers(value: Any) -> Any:
    """The same data with numbers that strict JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: plain_numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(v) for v in value]
    return value
