"""A bounded load on a speech server: N clients in a loop for S seconds, and what a listener would have noticed.

Each client streams raw PCM; its clock starts with the request. Percentiles are of finished requests; the underrun is
the silence after the first sound of a listener who plays as the audio arrives.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from runtime.errors import MossError
from runtime.server.metrics import Listener

MAX_CONCURRENCY, MAX_SECONDS = 256, 3600.0
BYTES_PER_SECOND = 2 * 48_000
TEXT = "The quick brown fox jumps over the lazy dog, and then it says number {}."
QUEUE_WAIT = "moss_tts_queue_wait_seconds"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Who asks for what, and for how long."""

    url: str
    concurrency: int
    seconds: float
    voice: str | None = None
    clip: Path | None = None
    api_key: str | None = None
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= MAX_CONCURRENCY or not 0 < self.seconds <= MAX_SECONDS:
            raise MossError(
                f"expected 1 to {MAX_CONCURRENCY} clients for up to {MAX_SECONDS:g} s, "
                f"got {self.concurrency} for {self.seconds:g} s"
            )
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise MossError(f"{self.url}: expected http://HOST:PORT")


@dataclass(slots=True)
class _Totals:
    """What all clients saw; guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    latency: list[float] = field(default_factory=list)
    ttfa: list[float] = field(default_factory=list)
    rtf: list[float] = field(default_factory=list)
    underrun: list[float] = field(default_factory=list)
    audio_seconds: float = 0.0
    refused: int = 0  # 429: the queue was full
    errors: dict[str, int] = field(default_factory=dict)


def run_load(plan: LoadPlan) -> dict[str, Any]:
    """The figures of one run, as JSON data."""
    voice: dict[str, Any] = {"voice": plan.voice} if plan.voice else {}
    if plan.clip is not None:
        try:
            voice["ref_audio"] = "data:audio/x;base64," + base64.b64encode(plan.clip.read_bytes()).decode()
        except OSError as error:
            raise MossError(f"{plan.clip}: cannot read the clip ({error.strerror})") from error
    totals = _Totals()
    start = time.monotonic()
    threads = [
        threading.Thread(target=_client, args=(plan, voice, number, start + plan.seconds, totals), daemon=True)
        for number in range(plan.concurrency)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.monotonic() - start
    return {
        "clients": plan.concurrency,
        "seconds": round(wall, 2),
        "requests": len(totals.latency),
        "refused": totals.refused,
        "errors": totals.errors,
        "audio_seconds_per_second": round(totals.audio_seconds / wall, 3),
        **{name: _percentiles(getattr(totals, name)) for name in ("ttfa", "latency", "rtf", "underrun")},
        "queue_wait_mean": _queue_wait(plan),
    }


def _client(plan: LoadPlan, voice: dict[str, Any], number: int, end: float, totals: _Totals) -> None:
    turn = 0
    while time.monotonic() < end:
        body = {
            "input": TEXT.format(turn), "seed": number * 10_000 + turn, "stream_format": "audio",
            "response_format": "pcm", **voice,
        }  # fmt: skip
        turn += 1
        try:
            pause = _request(plan, json.dumps(body), totals)
        except (OSError, http.client.HTTPException) as error:
            pause = 0.2
            with totals.lock:
                totals.errors[type(error).__name__] = totals.errors.get(type(error).__name__, 0) + 1
        time.sleep(min(pause, max(0.0, end - time.monotonic())))


def _connection(plan: LoadPlan) -> http.client.HTTPConnection:
    parts = urlsplit(plan.url)
    return http.client.HTTPConnection(str(parts.hostname), parts.port or 80, timeout=plan.timeout_seconds)


def _request(plan: LoadPlan, body: str, totals: _Totals) -> float:
    """One request; the seconds to wait before the next one."""
    headers = {"Content-Type": "application/json"}
    if plan.api_key:
        headers["Authorization"] = f"Bearer {plan.api_key}"
    connection, listener, began = _connection(plan), Listener(), time.monotonic()
    try:
        connection.request("POST", "/v1/audio/speech", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            response.read()
            with totals.lock:
                if response.status == 429:
                    totals.refused += 1
                else:
                    name = f"status {response.status}"
                    totals.errors[name] = totals.errors.get(name, 0) + 1
            return float(response.getheader("Retry-After") or 0.2)
        while piece := response.read1(1 << 16):
            listener.hear(len(piece) / BYTES_PER_SECOND)
    finally:
        connection.close()
    latency = time.monotonic() - began
    with totals.lock:
        totals.latency.append(latency)
        totals.ttfa.append((listener.first or began) - began)
        totals.rtf.append(latency / max(listener.audio_seconds, 1e-9))
        totals.underrun.append(listener.underrun_seconds)
        totals.audio_seconds += listener.audio_seconds
    return 0.0


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 95, 99)}


def _queue_wait(plan: LoadPlan) -> float | None:
    """Mean seconds before a slot, since the server started, from its own /metrics; None when it has none."""
    connection = _connection(plan)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode("utf-8", "replace").splitlines()
        count, total = (  # of every model
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{QUEUE_WAIT}_{part}{{"))
            for part in ("count", "sum")
        )
        return round(total / count, 4) if count else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
