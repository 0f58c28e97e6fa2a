"""The worker process of MOSS-SoundEffect: one sound at a time, so that no sound depends on another.

It speaks the language of worker.py: Ready, Started, Beat, Piece, Finished and Failed go to the parent, SoundJob and
Cancel come. Between two rows, and between two chunks of the codec, it looks into the pipe and beats; a job that was
cancelled ends there. The audio of a sound begins when its last row is drawn: pieces are the codec's chunks of 8 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.audio_writer import to_integers
from runtime.errors import BackendError, GenerationError, MossError
from runtime.server.jobs import Beat, Cancel, Event, Failed, Finished, Piece, Ready, SoundJob, Started
from runtime.server.worker import run_guarded
from runtime.sfx.generate import generate
from runtime.sfx.prompt import SoundPrompt
from runtime.sfx.sampling import SfxSampling
from runtime.sfx.sound_effects import SoundEffects

Emit = Callable[[Event], None]
WARM_UP_ROWS = 2


@dataclass(frozen=True, slots=True)
class SoundWorkerSpec:
    """What a worker serves, and where it runs."""

    checkpoint: Path
    codec: Path
    device: str
    dtype: str | None
    codec_device: str


def run_sound_worker(pipe: Connection, spec: SoundWorkerSpec) -> None:
    """The main function of the process."""

    def work(emit: Emit) -> None:
        with SoundEffects.open(spec.checkpoint, spec.codec, spec.device, spec.dtype, spec.codec_device) as effects:
            prompt = effects.encoder.rows(SoundPrompt("rain"))
            generate(effects.model, [prompt], SfxSampling(), [0], WARM_UP_ROWS)
            effects.codec.decode(np.zeros((2, effects.model.config.n_vq), np.int32))
            emit(Ready(effects.model.backend_name, 1, effects.model.max_rows))
            _Sounds(pipe, effects, emit).run()

    run_guarded(pipe, work)


class _CancelledError(Exception):
    """Nobody listens to the sound that is being made."""


class _EndedError(Exception):
    """The parent asked the worker to end."""


class _Sounds:
    """Makes the sounds that the parent asks for."""

    def __init__(self, pipe: Connection, effects: SoundEffects, emit: Emit) -> None:
        self._pipe, self._effects, self._emit = pipe, effects, emit
        self._waiting: deque[SoundJob] = deque()
        self._current: str | None = None

    def run(self) -> None:
        """Until the parent sends None or the pipe ends."""
        try:
            while True:
                self._hear()
                if self._waiting:
                    self._make(self._waiting.popleft())
        except _EndedError:
            return

    def _hear(self) -> None:
        """Take the messages that are there; with nothing to do, wait for one."""
        while self._pipe.poll(0 if self._waiting or self._current else None):
            request = self._pipe.recv()
            if request is None:
                raise _EndedError
            if isinstance(request, SoundJob):
                self._waiting.append(request)
            elif isinstance(request, Cancel):
                self._waiting = deque(job for job in self._waiting if job.id != request.id)
                if request.id == self._current:
                    raise _CancelledError

    def _make(self, job: SoundJob) -> None:
        self._current = job.id
        self._emit(Started(job.id))
        try:
            (sound,) = self._effects.create(
                [job.prompt], [job.seed], job.sampling, job.max_new_tokens,
                on_row=lambda _: self._boundary(), on_piece=lambda waveform: self._piece(job.id, waveform),
            )  # fmt: skip
        except _CancelledError:
            pass
        except BackendError:
            raise  # the model is lost, not only this sound
        except MossError as error:
            self._emit(Failed(job.id, str(error)))
        else:
            self._emit(Finished(job.id, sound.num_frames, (sound.finish_reason.value,)))
        finally:
            self._current = None

    def _boundary(self) -> None:
        self._emit(Beat())
        self._hear()

    def _piece(self, job_id: str, waveform: npt.NDArray[np.float32]) -> None:
        if not np.isfinite(waveform).all():
            raise GenerationError("the codec's waveform holds NaN or infinity")
        mono = np.clip(waveform[0], -1, 1)
        self._emit(Piece(job_id, to_integers(mono, 16).astype("<i2").tobytes()))
        self._boundary()
