"""Long texts: segment after segment, each watched, checked, and tried again when the model gets lost.

    plan ─ segments ─► speak: prompt rows ─ frames ─ codec as they come ─► watch: loop, silence, runaway
                       └── try again with a derived seed, up to `retries` ──┘
    pieces: waveform of a segment, then its pause

The first try of the first segment uses the seed itself, so a text of one segment sounds like a single request.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.audio_check import BYTES_PER_TOKEN, Finding, Problem, check_speech, refuse
from runtime.errors import GenerationError
from runtime.generate import MAX_FRAMES, FinishReason, Generation, generate
from runtime.sampling import SamplingParams
from runtime.stop_rules import StopRules, Watch
from runtime.synthesizer import Request, Synthesizer
from runtime.text import Segment, TextPlan

DECODE_FRAMES = 8  # frames per launch of the codec while frames are generated
LOST: tuple[FinishReason, ...] = ("loop", "silence", "runaway")
LENGTH_PROBLEMS = (Problem.TOO_SHORT, Problem.TOO_LONG)

OnFrame = Callable[[int], None]  # frames of this segment so far


@dataclass(frozen=True, slots=True)
class NarrationSettings:
    """Everything that decides what a narration sounds like, but for text, voice and weights."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    max_frames: int = MAX_FRAMES  # per segment
    retries: int = 2
    rules: StopRules = field(default_factory=StopRules)
    reference_text: str | None = None


@dataclass(frozen=True, slots=True)
class SpokenSegment:
    """One segment as it was accepted."""

    waveform: npt.NDArray[np.float32]  # [channels, samples], without the pause
    codes: npt.NDArray[np.int32]
    finish_reason: FinishReason
    prompt_rows: int
    attempts: int
    wall_seconds: float
    pause_seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a segment."""

    generation: Generation
    waveform: npt.NDArray[np.float32]


def derive_seed(seed: int, segment: int, attempt: int) -> int:
    """The seed of one try: the given one for the first try of the first segment, else a hash of all three."""
    if segment == 0 and attempt == 0:
        return seed
    return int(np.random.SeedSequence([seed, segment, attempt]).generate_state(1, np.uint32)[0])


class Listener(Protocol):
    """Someone who hears the pieces as they come; runtime/live.py."""

    def chunk(self) -> int:
        """Frames that the next call of the codec should take."""
        ...

    def decoded(self, waveform: npt.NDArray[np.float32], num_frames: int, codec_seconds: float) -> None:
        """A piece [channels, samples] of `num_frames` frames."""
        ...


class Narrator:
    """Speaks plans with one voice and one set of settings."""

    def __init__(
        self,
        synthesizer: Synthesizer,
        voice_codes: npt.NDArray[np.int32] | None,
        settings: NarrationSettings,
        listener: Listener | None = None,
    ) -> None:
        self._synthesizer, self._voice, self._settings, self._listener = synthesizer, voice_codes, settings, listener
        self._made_up = synthesizer.manifest.made_up

    def narrate(
        self, plan: TextPlan, finished: tuple[npt.NDArray[np.int32], ...] = (), on_frame: OnFrame = lambda n: None
    ) -> Iterator[SpokenSegment]:
        """The segments of a plan in order; those whose codes are given are decoded again instead of generated."""
        for index, segment in enumerate(plan.segments):
            if index < len(finished):
                yield self._redecoded(segment, finished[index])
            else:
                yield self._spoken(segment, index, on_frame)

    def key(self, plan: TextPlan) -> str:
        """One hash of what finished segments must share with new ones: weights, text, voice and sampling.

        Seed, retries and rules may change, so that a narration that got stuck can go on with others.
        """
        manifest = self._synthesizer.manifest
        voice = None if self._voice is None else hashlib.sha256(self._voice.tobytes()).hexdigest()
        parts = [
            manifest.data_files,
            [s.text for s in plan.segments],
            voice,
            asdict(self._settings.sampling),
            self._settings.reference_text,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _spoken(self, segment: Segment, index: int, on_frame: OnFrame) -> SpokenSegment:
        start = time.perf_counter()
        failures: list[str] = []
        for attempt in range(1 + self._settings.retries):
            seed = derive_seed(self._settings.seed, index, attempt)
            tried = self._attempt(segment, seed, on_frame)
            reason, findings = tried.generation.finish_reason, self._check(segment, tried)
            if reason not in LOST and not findings:
                notes = tuple(f"tried again after {failure}" for failure in failures)
                return SpokenSegment(
                    tried.waveform, tried.generation.codes, reason, tried.generation.prompt_rows, attempt + 1,
                    time.perf_counter() - start, segment.pause_seconds, notes,
                )  # fmt: skip
            failures.append(
                f"{reason} at frame {tried.generation.num_frames} (seed {seed})"
                if reason in LOST
                else findings[0].message
            )
        raise GenerationError(
            f"segment {index + 1} {segment.text[:40]!r} failed {len(failures)} times: {'; '.join(failures)}; "
            "try another --seed or voice, or change the limits (--loop-frames, --silence-frames, --no-runaway)"
        )

    def _attempt(self, segment: Segment, seed: int, on_frame: OnFrame) -> Attempt:
        """Generate one segment, decoding as the frames come, so that silence is noticed while it happens."""
        synthesizer, settings = self._synthesizer, self._settings
        rows = synthesizer.rows(Request(segment.text, self._voice, settings.reference_text))
        samples = synthesizer.manifest.codec.samples_per_frame
        watch = Watch(self._rules(), self._spoken_tokens(segment), samples)
        pieces: list[npt.NDArray[np.float32]] = []
        waiting: list[npt.NDArray[np.int32]] = []
        with synthesizer.codec.stream() as stream:
            if settings.reference_text is not None and self._voice is not None:
                stream.push(self._voice)  # a continuation sounds from where its prompt ended

            def decode() -> FinishReason | None:
                start, num_frames = time.perf_counter(), len(waiting)
                pieces.append(stream.push(np.stack(waiting)))
                waiting.clear()
                if self._listener is not None:
                    self._listener.decoded(pieces[-1], num_frames, time.perf_counter() - start)
                return watch.audio(pieces[-1])

            def wanted() -> int:
                return DECODE_FRAMES if self._listener is None else self._listener.chunk()

            def see(codes: npt.NDArray[np.int32]) -> FinishReason | None:
                waiting.append(codes)
                on_frame(len(waiting) + sum(p.shape[1] for p in pieces) // samples)
                return watch.codes(codes) or (decode() if len(waiting) >= wanted() else None)

            generation = generate(
                synthesizer.frame_model, rows, seed, settings.sampling, settings.max_frames, on_frame=see
            )
            if waiting:
                decode()
        channels = synthesizer.manifest.codec.num_channels
        return Attempt(generation, np.concatenate(pieces, 1) if pieces else np.zeros((channels, 0), np.float32))

    def _check(self, segment: Segment, tried: Attempt) -> tuple[Finding, ...]:
        """Why the audio is not the segment's speech. What is broken, and not only unlikely, fails at once."""
        codec = self._synthesizer.manifest.codec
        ended = tried.generation.finish_reason == "stop"
        findings = check_speech(
            tried.waveform, codec.sample_rate_hz, codec.samples_per_frame, tried.generation.num_frames,
            len(segment.token_ids), self._synthesizer.tokenizer.count_bytes(list(segment.token_ids)), ended,
        )  # fmt: skip
        if self._made_up:  # made-up weights end where they end: their length says nothing about the text
            findings = tuple(f for f in findings if f.problem not in LENGTH_PROBLEMS)
        refuse(tuple(f for f in findings if f.problem is Problem.NOT_FINITE))
        return findings

    def _redecoded(self, segment: Segment, codes: npt.NDArray[np.int32]) -> SpokenSegment:
        start = time.perf_counter()
        request = Request(segment.text, self._voice, self._settings.reference_text)
        waveform = self._synthesizer.decode(request, codes)
        return SpokenSegment(
            waveform, codes, "stop", 0, 0, time.perf_counter() - start, segment.pause_seconds, ("resumed",)
        )

    def _rules(self) -> StopRules:
        rules = self._settings.rules
        return StopRules(
            rules.loop_frames, rules.max_loop_period, rules.silence_frames, rules.runaway and not self._made_up
        )

    def _spoken_tokens(self, segment: Segment) -> float:
        num_bytes = self._synthesizer.tokenizer.count_bytes(list(segment.token_ids))
        return len(segment.token_ids) - num_bytes + num_bytes / BYTES_PER_TOKEN


def pause(segment: SpokenSegment, sample_rate_hz: int) -> npt.NDArray[np.float32]:
    """The silence behind a segment, [channels, samples]."""
    return np.zeros((len(segment.waveform), round(segment.pause_seconds * sample_rate_hz)), np.float32)
