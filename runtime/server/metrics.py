"""Prometheus figures: what runs and waits, how long it takes, and what a listener would have noticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

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
    """The figures of one server, labelled by model; `pools` has one per model."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        gauges: dict[str, tuple[str, Callable[[Pool], float]]] = {
            "moss_tts_requests_running": ("Requests in a slot.", lambda pool: pool.num_running),
            "moss_tts_requests_waiting": ("Requests that wait for a slot.", lambda pool: pool.num_waiting),
            "moss_tts_ready": ("1 when the worker serves.", lambda pool: pool.state is State.READY),
            "moss_tts_worker_restarts": ("Workers that were lost and replaced.", lambda pool: pool.restarts),
        }
        for name, (text, read) in gauges.items():
            gauge = Gauge(name, text, ["model"], registry=registry)
            for model, pool in pools.items():
                gauge.labels(model).set_function(partial(read, pool))

        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, ["model", label], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            made = Histogram(name, text, ["model"], buckets=buckets, registry=registry)
            for model in pools:
                made.labels(model)  # a model nobody asked yet is 0, not missing
            return made

        self._requests = counter("moss_tts_requests", "Finished requests by status.", "status")
        self._segments = counter("moss_tts_segments", "Finished segments by reason.", "reason")
        self._latency = histogram("moss_tts_request_seconds", "Whole request.")
        self._queue = histogram("moss_tts_queue_wait_seconds", "Before a slot.")
        self._ttfa = histogram("moss_tts_first_audio_seconds", "To first audio.")
        self._audio = histogram("moss_tts_audio_seconds", "Audio per request.")
        self._rtf = histogram("moss_tts_rtf", "Seconds in the slot per second of audio.", RATIOS)
        self._underrun = histogram("moss_tts_underrun_seconds", "Silence of a live listener.", (0, *SECONDS))

    def answered(self, model: str, status: str) -> None:
        """A request has its answer: an HTTP status, `cancelled`, or `broken` in the middle of a stream."""
        self._requests.labels(model, status).inc()

    def spoken(self, model: str, ticket: Ticket, listener: Listener) -> None:
        """A job is done."""
        now = time.monotonic()
        started = ticket.started or now
        self._latency.labels(model).observe(now - ticket.submitted)
        self._queue.labels(model).observe(started - ticket.submitted)
        if listener.first is not None:
            self._ttfa.labels(model).observe(listener.first - ticket.submitted)
        self._audio.labels(model).observe(listener.audio_seconds)
        if listener.audio_seconds:
            self._rtf.labels(model).observe((now - started) / listener.audio_seconds)
        self._underrun.labels(model).observe(listener.underrun_seconds)
        for reason in ticket.reasons:
            self._segments.labels(model, reason).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
