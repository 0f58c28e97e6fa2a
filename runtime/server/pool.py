"""The HTTP process's side of the worker: admission, queue, deadlines, and a new worker when the old one dies or hangs.

A request holds a `Place` from its first byte of work to its last byte of audio; there are slots + max_queue places, so
everything a request can make the server hold is bounded. A job that had produced nothing when its worker died is
given to the next one (once); one that had is failed: its client has bytes that cannot be taken back.

All methods run in the event loop; two threads per worker move the messages.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from runtime.errors import MossError
from runtime.server.jobs import (
    Beat,
    Broken,
    Cancel,
    Encoded,
    EncodeJob,
    Event,
    Failed,
    Finished,
    Piece,
    Ready,
    Request,
    Started,
    Work,
)

LOG = logging.getLogger(__name__)
Spec = TypeVar("Spec")
MAX_STARTS = 3  # attempts in a row that never became ready: the cause is not chance
WATCH_SECONDS = 0.2


class State(str, Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # the worker died or hung; a new one loads
    FAILED = "failed"  # no worker could be started
    STOPPED = "stopped"


class QueueFullError(MossError):
    """No place is free; try again later."""


class UnavailableError(MossError):
    """No worker, or it was lost while it spoke."""


class DeadlineError(MossError):
    """The request took longer than one may take."""


class SpeechFailedError(MossError):
    """The worker gave no audio, or not all of it."""


class WorkerProcess(Protocol):
    """What the pool needs of multiprocessing.Process."""

    @property
    def pid(self) -> int | None: ...
    def kill(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


StartWorker = Callable[[], tuple[WorkerProcess, Connection]]


def process_starter(main: Callable[[Connection, Spec], None], spec: Spec) -> StartWorker:
    """Start real workers: a fresh interpreter each that runs `main`, nothing inherited but the pipe."""

    def start() -> tuple[WorkerProcess, Connection]:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=main, args=(theirs, spec), daemon=True, name="moss-tts-worker")
        process.start()
        theirs.close()
        return process, ours

    return start


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How much may wait, and how long."""

    slots: int = 4
    max_queue: int = 32
    deadline_seconds: float = 300.0  # of a request, from its place to its last byte
    step_timeout_seconds: float = 60.0  # without a frame boundary while something runs: hung


class Ticket:
    """One job on its way: the pieces of its audio, in order."""

    def __init__(self, job: Work) -> None:
        self.job = job
        self.submitted = time.monotonic()
        self.started: float | None = None
        self.num_frames = 0
        self.reasons: tuple[str, ...] = ()
        self.has_audio = False
        self.retried = False
        self._events: asyncio.Queue[bytes | MossError | None] = asyncio.Queue()

    async def pieces(self) -> AsyncIterator[bytes]:
        """s16le mono as it comes; MossError when the rest will never come."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, MossError):
                raise event
            yield event

    def put(self, event: bytes | MossError | None) -> None:
        self._events.put_nowait(event)

    def fail(self, error: MossError) -> None:
        """Drop what was not read yet: a reader that is too slow must not hold memory."""
        self._events = _replaced(self._events, error)


def _replaced(
    old: asyncio.Queue[bytes | MossError | None], error: MossError
) -> asyncio.Queue[bytes | MossError | None]:
    with suppress(asyncio.QueueEmpty):
        while True:
            old.get_nowait()
    old.put_nowait(error)
    return old


class Place:
    """The right to make the server work; a context manager."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.ticket: Ticket | None = None

    def submit(self, job: Work) -> Ticket:
        """Queue the job of this place."""
        assert self.ticket is None, "one job per place"
        self.ticket = Ticket(job)
        self._pool.enqueue(self.ticket)
        return self.ticket

    def expire(self) -> None:
        """The deadline: give up, whatever the reader does."""
        if self.ticket is not None:
            self._pool.drop(self.ticket)
            limit = self._pool.limits.deadline_seconds
            self.ticket.fail(DeadlineError(f"the request took longer than {limit:g} s; shorten the text"))

    def __enter__(self) -> Place:
        self._pool.places_taken += 1
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._pool.limits.deadline_seconds, self.expire)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.places_taken -= 1
        self._timer.cancel()
        if self.ticket is not None:
            self._pool.drop(self.ticket)


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker process and the threads that talk to it."""

    process: WorkerProcess
    pipe: Connection
    outbox: queue.SimpleQueue[Request | None] = field(default_factory=queue.SimpleQueue)
    ready: bool = False
    hung: bool = False
    last_event: float = field(default_factory=time.monotonic)


class Pool:
    """One worker at a time, and the requests that wait for it."""

    def __init__(self, start_worker: StartWorker, limits: PoolLimits) -> None:
        self.limits = limits
        self.state = State.STOPPED
        self.message = ""  # why it is not ready
        self.backend = ""
        self.capacity = 0  # rows of one slot, as the worker loaded them
        self.places_taken = 0
        self.restarts = 0
        self._start_worker = start_worker
        self._worker: _Worker | None = None
        self._waiting: deque[Ticket] = deque()
        self._running: dict[str, Ticket] = {}
        self._encoding: dict[str, asyncio.Future[npt.NDArray[np.int32]]] = {}
        self._failed_starts = 0
        self._watchdog: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def worker_pid(self) -> int | None:
        return self._worker.process.pid if self._worker else None

    def start(self) -> None:
        """Start the first worker; requests may queue before it is ready."""
        self.state = State.STARTING
        self._launch()
        self._watchdog = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """End the worker; what still runs fails."""
        self.state = State.STOPPED
        if self._watchdog:
            self._watchdog.cancel()
        self._fail_all(UnavailableError("the server is shutting down"))
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.outbox.put(None)  # the message that ends the worker
            await asyncio.to_thread(_end, worker.process, grace_seconds)

    def place(self) -> Place:
        """A place, or QueueFullError; UnavailableError when nothing can serve it."""
        if self.state in (State.STARTING, State.FAILED, State.STOPPED):
            raise UnavailableError(f"the speech worker is not ready: {self.message or self.state.value}")
        if self.places_taken >= self.limits.slots + self.limits.max_queue:
            raise QueueFullError(f"{self.places_taken} requests are running or waiting, the limit; try again later")
        return Place(self)

    async def encode(self, waveform: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        """The codes of a reference clip."""
        if self._worker is None:
            raise UnavailableError(f"the speech worker is not running: {self.message or self.state.value}")
        job = EncodeJob(uuid.uuid4().hex, waveform)
        future: asyncio.Future[npt.NDArray[np.int32]] = asyncio.get_running_loop().create_future()
        self._encoding[job.id] = future
        try:
            self._worker.outbox.put(job)
            return await asyncio.wait_for(future, self.limits.deadline_seconds)
        except asyncio.TimeoutError as error:  # not yet TimeoutError in Python 3.10
            raise DeadlineError("encoding the reference clip took too long; use a shorter clip") from error
        finally:
            self._encoding.pop(job.id, None)

    def enqueue(self, ticket: Ticket) -> None:
        """Wait for a slot."""
        self._waiting.append(ticket)
        self._feed()

    def drop(self, ticket: Ticket) -> None:
        """Nobody wants the rest: leave the queue, or free the slot at the next frame boundary."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        elif self._running.pop(ticket.job.id, None) is not None:
            if self._worker is not None:
                self._worker.outbox.put(Cancel(ticket.job.id))
            self._feed()

    def _feed(self) -> None:
        worker = self._worker
        while worker and worker.ready and self._waiting and len(self._running) < self.limits.slots:
            ticket = self._waiting.popleft()
            if not self._running:
                worker.last_event = time.monotonic()  # the clock of the watchdog starts with the work
            self._running[ticket.job.id] = ticket
            worker.outbox.put(ticket.job)

    def _launch(self) -> None:
        try:
            process, pipe = self._start_worker()
        except OSError as error:
            self._not_started(f"cannot start a worker process ({error.strerror})")
            return
        worker = self._worker = _Worker(process, pipe)
        loop = asyncio.get_running_loop()
        threading.Thread(target=_send, args=(worker,), daemon=True, name="to-worker").start()
        threading.Thread(target=self._receive, args=(worker, loop), daemon=True, name="from-worker").start()

    def _receive(self, worker: _Worker, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: hand events to the loop until the pipe ends."""
        with suppress(RuntimeError):  # the loop is closed: the server is gone
            try:
                while True:
                    loop.call_soon_threadsafe(self._on_event, worker, worker.pipe.recv())
            except (EOFError, OSError):
                worker.pipe.close()
                loop.call_soon_threadsafe(self._on_end, worker)

    def _on_event(self, worker: _Worker, event: Event) -> None:
        if worker is not self._worker:
            return  # the last words of a worker that was given up
        worker.last_event = time.monotonic()
        match event:
            case Ready():
                worker.ready, self.state, self._failed_starts = True, State.READY, 0
                self.backend, self.capacity, self.message = event.backend, event.capacity, ""
                LOG.info("worker %s is ready: backend %s, %d slots", worker.process.pid, event.backend, event.slots)
                self._feed()
            case Broken():
                self.message = event.message
                LOG.error("worker: %s", event.message)
            case Encoded():
                self._resolve(event.id, event.codes)
            case Beat():
                pass
            case _:
                self._on_job_event(event)

    def _on_job_event(self, event: Started | Piece | Finished | Failed) -> None:
        if isinstance(event, Failed) and event.id in self._encoding:
            self._resolve(event.id, SpeechFailedError(event.message))
            return
        ticket = self._running.get(event.id)
        if ticket is None:
            return  # cancelled in the meantime
        match event:
            case Started():
                ticket.started = time.monotonic()
            case Piece():
                ticket.has_audio = True
                ticket.put(event.pcm)
            case Finished():
                ticket.num_frames, ticket.reasons = event.num_frames, event.reasons
                ticket.put(None)
            case Failed():
                ticket.put(SpeechFailedError(event.message))
        if isinstance(event, Finished | Failed):
            del self._running[event.id]
            self._feed()

    def _resolve(self, encode_id: str, result: npt.NDArray[np.int32] | MossError) -> None:
        future = self._encoding.get(encode_id)
        if future is None or future.done():
            return
        if isinstance(result, MossError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _on_end(self, worker: _Worker) -> None:
        """The worker is gone: fail what it spoke, keep what it had not begun to say, start another."""
        worker.outbox.put(None)
        if worker is not self._worker or self.state is State.STOPPED:
            return
        self._worker = None
        why = self.message or ("it hung" if worker.hung else "the process ended")
        lost = UnavailableError(f"the speech worker was lost while it spoke ({why}); try again")
        again = []
        for ticket in self._running.values():
            if ticket.has_audio or ticket.retried:
                ticket.put(lost)
            else:
                ticket.retried = True
                again.append(ticket)
        self._running.clear()
        self._waiting.extendleft(reversed(again))
        for encode_id in list(self._encoding):
            self._resolve(encode_id, lost)
        if worker.ready:
            self.restarts += 1
            LOG.error("worker %s was lost (%s); starting another", worker.process.pid, why)
            self.state = State.RESTARTING
            self._launch()
        else:
            self._not_started(self.message or "the process ended while it loaded")

    def _not_started(self, why: str) -> None:
        self._failed_starts += 1
        self.message = why
        if self._failed_starts >= MAX_STARTS:
            self.state = State.FAILED
            LOG.error("no worker could be started %d times; giving up: %s", self._failed_starts, why)
            self._fail_all(UnavailableError(f"the speech worker cannot start: {why}"))
        else:
            asyncio.get_running_loop().call_later(0.5 * 2**self._failed_starts, self._launch_again)

    def _launch_again(self) -> None:
        if self.state not in (State.STOPPED, State.FAILED):
            self._launch()

    def _fail_all(self, error: MossError) -> None:
        for ticket in (*self._running.values(), *self._waiting):
            ticket.put(error)
        self._running.clear()
        self._waiting.clear()
        for encode_id in list(self._encoding):
            self._resolve(encode_id, error)

    async def _watch(self) -> None:
        """Kill a worker that stopped passing frame boundaries; its end starts another."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            worker = self._worker
            if worker is None or worker.hung or not worker.ready or not self._running:
                continue
            silent = time.monotonic() - worker.last_event
            if silent > self.limits.step_timeout_seconds:
                LOG.error("worker %s hangs: no frame boundary for %.0f s", worker.process.pid, silent)
                worker.hung, self.state = True, State.RESTARTING
                worker.process.kill()


def _send(worker: _Worker) -> None:
    """In a thread: messages to the worker, so that a large clip never blocks the event loop."""
    with suppress(OSError, ValueError):  # the worker is gone; the receiving thread tells
        message: Request | None = Cancel("")
        while message is not None:
            message = worker.outbox.get()
            worker.pipe.send(message)


def _end(process: WorkerProcess, grace_seconds: float) -> None:
    process.join(grace_seconds)
    if process.is_alive():
        process.kill()
        process.join()
