"""The running batch: jobs take slots, every turn is one frame boundary, audio leaves as it is decoded.

A turn starts at most one job (its prompt stalls the others), draws one frame for every busy slot in one launch, and
decodes where enough frames wait. All state of a job is its own: generator, slot, seen-table, codec stream, stop rules.
The chunks of the codec follow from the frame number alone, so a stream carries the bytes of the whole file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from runtime.audio_writer import to_integers
from runtime.batch_frame_model import Draw, SlotModel
from runtime.codec import Codec
from runtime.errors import BackendError, GenerationError, MossError
from runtime.generate import FinishReason
from runtime.sampling import draw_uniforms
from runtime.server.jobs import Event, Failed, Finished, Job, Piece, SegmentJob, Started
from runtime.stop_rules import StopRules, Watch

DECODE_FRAMES = (1, 2, 4)  # frames per launch of the codec: the first sound soon, then fewer launches
BACKEND_FAILURES = 3  # prompts in a row that fail: the backend is broken, not the request


class Engine:
    """Owns the slots of a model; `emit` gets the events."""

    def __init__(
        self, model: SlotModel, codec: Codec, emit: Callable[[Event], None], rules: StopRules | None = None
    ) -> None:
        self._model, self._codec, self._emit = model, codec, emit
        self._rules = rules or StopRules()
        self._waiting: deque[Job] = deque()
        self._busy: dict[int, _Utterance] = {}  # slot -> what it speaks
        self._failures = 0

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing."""
        return not self._waiting and not self._busy

    def add(self, job: Job) -> None:
        """Queue a job; it starts when a slot is free."""
        self._waiting.append(job)

    def cancel(self, job_id: str) -> None:
        """Forget a job, wherever it is; its slot is free at once."""
        self._waiting = deque(job for job in self._waiting if job.id != job_id)
        for slot, utterance in list(self._busy.items()):
            if utterance.job.id == job_id:
                self._free(slot)

    def turn(self) -> None:
        """One frame boundary. BackendError: the model is lost, and with it every job that runs."""
        self._start_one()
        draws = {slot: utterance.draw() for slot, utterance in self._busy.items()}
        if not draws:
            return
        for slot, frame in self._model.next_frames(draws).items():
            utterance = self._busy[slot]
            try:
                done = utterance.take(frame.codes if frame.go_on else None)
                if pcm := utterance.pcm():
                    self._emit(Piece(utterance.job.id, pcm))
                if done:
                    self._next_segment(slot, utterance)
            except GenerationError as error:
                self._fail(slot, error)

    def close(self) -> None:
        """Free every slot."""
        for slot in list(self._busy):
            self._free(slot)

    def _start_one(self) -> None:
        free = next((slot for slot in range(self._model.slots) if slot not in self._busy), None)
        if free is None or not self._waiting:
            return
        job = self._waiting.popleft()
        self._emit(Started(job.id))
        self._busy[free] = _Utterance(job, self._codec, self._rules)
        self._prefill(free)

    def _prefill(self, slot: int) -> None:
        segment = self._busy[slot].segment
        try:
            self._model.prefill(slot, segment.rows)
        except MossError as error:
            self._fail(slot, error)
            self._failures += isinstance(error, BackendError)
            if self._failures >= BACKEND_FAILURES:
                raise BackendError(f"{self._failures} prompts in a row failed; the last one: {error}") from error
        else:
            self._failures = 0

    def _next_segment(self, slot: int, utterance: _Utterance) -> None:
        if utterance.begin_next():
            self._model.release(slot)
            self._prefill(slot)
            return
        job_id, frames, reasons = utterance.job.id, utterance.total_frames, tuple(utterance.reasons)
        self._free(slot)
        self._emit(
            Finished(job_id, frames, reasons)
            if frames
            else Failed(job_id, "the model ended the utterance before the first frame; try another seed or text")
        )

    def _fail(self, slot: int, error: MossError) -> None:
        job_id = self._busy[slot].job.id
        self._free(slot)
        self._emit(Failed(job_id, str(error)))

    def _free(self, slot: int) -> None:
        self._busy.pop(slot).close()
        self._model.release(slot)


class _Utterance:
    """The state of one job in its slot."""

    def __init__(self, job: Job, codec: Codec, rules: StopRules) -> None:
        self.job, self._codec, self._rules = job, codec, rules
        self.reasons: list[str] = []
        self.total_frames = 0
        self._pieces = 0
        self._pcm = bytearray()
        self._begin(0)

    @property
    def segment(self) -> SegmentJob:
        return self.job.segments[self._index]

    def draw(self) -> Draw:
        """The random numbers of the next frame."""
        n_vq = self.segment.rows.shape[1] - 1
        return Draw(draw_uniforms(self._rng, n_vq), self.job.sampling)

    def take(self, codes: npt.NDArray[np.int32] | None) -> bool:
        """Add a frame, None when the model ended the segment; return whether the segment is over."""
        reason: FinishReason | None = "stop"
        if codes is not None:
            self._undecoded.append(codes)
            self._frames += 1
            self.total_frames += 1
            reason = self._watch.codes(codes)
            if reason is None and self._frames >= self.job.max_frames:
                reason = "length"
        wanted = DECODE_FRAMES[min(self._pieces, len(DECODE_FRAMES) - 1)]
        if self._undecoded and (reason is not None or len(self._undecoded) >= wanted):
            reason = self._decode() or reason
        if reason is None:
            return False
        self.reasons.append(reason)
        return True

    def begin_next(self) -> bool:
        """Go on with the next segment, after the pause; False when there is none."""
        if self._index + 1 >= len(self.job.segments):
            return False
        self._pcm += bytes(2 * self.segment.pause_samples)
        self._stream.close()
        self._begin(self._index + 1)
        return True

    def pcm(self) -> bytes:
        """What was decoded since the last call."""
        pcm = bytes(self._pcm)
        self._pcm.clear()
        return pcm

    def close(self) -> None:
        self._stream.close()

    def _begin(self, index: int) -> None:
        self._index, self._frames = index, 0
        self._undecoded: list[npt.NDArray[np.int32]] = []
        self._rng = np.random.default_rng(self.segment.seed)
        self._watch = Watch(self._rules, self.segment.plausible_tokens, self._codec.config.samples_per_frame)
        self._stream = self._codec.stream()

    def _decode(self) -> FinishReason | None:
        waveform = self._stream.push(np.stack(self._undecoded))
        self._undecoded.clear()
        self._pieces += 1
        if not np.isfinite(waveform).all():
            raise GenerationError("the codec's waveform holds NaN or infinity")
        mono = np.clip(waveform.mean(axis=0), -1, 1)
        self._pcm += to_integers(mono, 16).astype("<i2").tobytes()
        return self._watch.audio(waveform)
