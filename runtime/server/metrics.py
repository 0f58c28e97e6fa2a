"""Prometheus figures: what runs and waits, how long it takes, and what a listener would have noticed."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from runtime.server.pool import Pool, State, Ticket

SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200)
RATIOS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.5, 2, 4, 8)


class Listener:
    """Plays audio as it arrives: how long it would have been silent after the first sound."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.underrun_seconds = 0.0
        self.audio_seconds = 0.0
        self._end = 0.0

    def hear(self, seconds: float, now: float | None = None) -> None:
        """A piece of `seconds` arrived."""
        now = time.monotonic() if now is None else now
        if self.first is None:
            self.first = self._end = now
        elif now > self._end:
            self.underrun_seconds += now - self._end
            self._end = now
        self._end += seconds
        self.audio_seconds += seconds


class Metrics:
    """The figures of one server."""

    def __init__(self, pool: Pool) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        gauges = {
            "moss_tts_requests_running": ("Requests in a slot.", lambda: pool.num_running),
            "moss_tts_requests_waiting": ("Requests that wait for a slot.", lambda: pool.num_waiting),
            "moss_tts_ready": ("1 when the worker serves.", lambda: pool.state is State.READY),
            "moss_tts_worker_restarts": ("Workers that were lost and replaced.", lambda: pool.restarts),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=registry).set_function(read)
        self._requests = Counter("moss_tts_requests", "Finished requests by status.", ["status"], registry=registry)
        self._segments = Counter("moss_tts_segments", "Finished segments by reason.", ["reason"], registry=registry)
        self._latency = Histogram("moss_tts_request_seconds", "Whole request.", buckets=SECONDS, registry=registry)
        self._queue = Histogram("moss_tts_queue_wait_seconds", "Before a slot.", buckets=SECONDS, registry=registry)
        self._ttfa = Histogram("moss_tts_first_audio_seconds", "To first audio.", buckets=SECONDS, registry=registry)
        self._audio = Histogram("moss_tts_audio_seconds", "Audio per request.", buckets=SECONDS, registry=registry)
        self._rtf = Histogram("moss_tts_rtf", "Seconds in the slot per second of audio.", buckets=RATIOS,
                              registry=registry)  # fmt: skip
        self._underrun = Histogram("moss_tts_underrun_seconds", "Silence of a live listener.", buckets=(0, *SECONDS),
                                   registry=registry)  # fmt: skip

    def answered(self, status: str) -> None:
        """A request has its answer: an HTTP status, `cancelled`, or `broken` in the middle of a stream."""
        self._requests.labels(status).inc()

    def spoken(self, ticket: Ticket, listener: Listener) -> None:
        """A job is done."""
        now = time.monotonic()
        started = ticket.started or now
        self._latency.observe(now - ticket.submitted)
        self._queue.observe(started - ticket.submitted)
        if listener.first is not None:
            self._ttfa.observe(listener.first - ticket.submitted)
        self._audio.observe(listener.audio_seconds)
        if listener.audio_seconds:
            self._rtf.observe((now - started) / listener.audio_seconds)
        self._underrun.observe(listener.underrun_seconds)
        for reason in ticket.reasons:
            self._segments.labels(reason).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
