"""The worker process: it owns the backend, and with it everything that can crash or hang.

    parent ── Job, Cancel, EncodeJob ──► worker ── Ready, Started, Piece, Finished, Failed, Encoded, Beat ──► parent

The model is opened, used and closed in one thread, as an NPU context demands. Clips are encoded in a second thread
where the backend allows it (its sessions are not those of the loop), so a long clip does not stop running streams. The
end of the pipe ends the worker.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from runtime.backends.select import BackendOptions
from runtime.batch_frame_model import BatchFrameModel, SerialSlotModel, SlotModel, settle
from runtime.codec import Codec
from runtime.errors import BackendError, MossError
from runtime.server.engine import Engine
from runtime.server.jobs import Beat, Broken, Cancel, Encoded, EncodeJob, Event, Failed, Job, Ready
from runtime.stop_rules import StopRules

WARM_UP_TEXT_ID = 5  # any id that every vocabulary has


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker serves, and how."""

    artifacts: Path
    backend: BackendOptions
    slots: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """An open model; `one_context` when every call must come from the thread that opened it."""

    model: SlotModel
    codec: Codec
    rules: StopRules
    one_context: bool


def run_worker(pipe: Connection, spec: WorkerSpec) -> None:
    """The main function of the process."""

    def speak(emit: Callable[[Event], None]) -> None:
        loaded = load(spec)
        emit(Ready(loaded.model.backend_name, loaded.model.slots, loaded.model.capacity))
        try:
            serve(pipe, loaded, emit)
        finally:
            loaded.model.close()
            loaded.codec.close()

    run_guarded(pipe, speak)


def run_guarded(pipe: Connection, work: Callable[[Callable[[Event], None]], None]) -> None:
    """Do the work of a worker process; what ends it is told to the parent, if there still is one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to end
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            pipe.send(event)

    try:
        work(emit)
    except MossError as error:
        emit(Broken(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone: nobody to serve


def load(spec: WorkerSpec) -> Loaded:
    """Open the model, warm it up, and make sure that it does not mix requests."""
    from runtime.assembly import open_codec, open_frame_model
    from runtime.backends.om import OmBackend
    from runtime.backends.select import open_backend
    from runtime.manifest import Manifest

    manifest = Manifest.load(spec.artifacts)
    manifest.check_hashes([])
    backend = open_backend(spec.backend.name, manifest, options=spec.backend)
    one_context = isinstance(backend, OmBackend)
    model: SlotModel
    if one_context or spec.backend.split:
        if spec.slots != 1:
            raise BackendError(
                f"backend {backend.name}: its step runs one request at a time; serve with --batch 1 (or with another "
                "backend), and more devices as more servers"
            )
        model = SerialSlotModel(open_frame_model(manifest, backend, not spec.backend.split, spec.max_rows))
    else:
        model = BatchFrameModel(manifest, backend, spec.slots, spec.max_rows)
    codec = open_codec(manifest, backend)
    rows = np.full((2, 1 + manifest.model.n_vq), manifest.model.audio_pad_id, np.int32)
    rows[:, 0] = WARM_UP_TEXT_ID
    settle(model, rows)
    codec.decode(np.zeros((7, manifest.model.n_vq), np.int32))
    codec.encode(np.zeros((manifest.codec.num_channels, manifest.codec.samples_per_frame), np.float32))
    # Made-up weights end where they end: their length says nothing about the text.
    return Loaded(model, codec, StopRules(runaway=not manifest.made_up), one_context)


def serve(pipe: Connection, loaded: Loaded, emit: Callable[[Event], None]) -> None:
    """Speak until the parent sends None, the pipe ends, or the backend fails."""
    engine = Engine(loaded.model, loaded.codec, emit, loaded.rules)
    encoder = _Encoder(loaded.codec, emit, threaded=not loaded.one_context)
    while True:
        while pipe.poll(0 if not engine.idle else None):
            request = pipe.recv()
            if request is None:
                engine.close()
                return
            if isinstance(request, Job):
                engine.add(request)
            elif isinstance(request, Cancel):
                engine.cancel(request.id)
            elif isinstance(request, EncodeJob):
                encoder.add(request)
        engine.turn()
        emit(Beat())


class _Encoder:
    """Encodes clips one after the other, in a thread of its own when the backend allows it."""

    def __init__(self, codec: Codec, emit: Callable[[Event], None], threaded: bool) -> None:
        self._codec, self._emit = codec, emit
        self._queue: queue.Queue[EncodeJob] | None = queue.Queue() if threaded else None
        if self._queue is not None:
            threading.Thread(target=self._run, args=(self._queue,), daemon=True, name="encoder").start()

    def add(self, job: EncodeJob) -> None:
        if self._queue is None:
            self._encode(job)
        else:
            self._queue.put(job)

    def _run(self, jobs: queue.Queue[EncodeJob]) -> None:
        try:
            while True:
                self._encode(jobs.get())
        except (BrokenPipeError, ConnectionResetError):
            pass  # the parent is gone; the main thread notices too

    def _encode(self, job: EncodeJob) -> None:
        try:
            self._emit(Encoded(job.id, self._codec.encode(job.waveform)))
        except MossError as error:
            self._emit(Failed(job.id, str(error)))
