"""A real server on loopback for tests: uvicorn in a thread, the worker in its own process."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import soundfile
import uvicorn

from runtime.backends.select import BackendOptions
from runtime.manifest import Manifest
from runtime.server.app import create_app
from runtime.server.pool import Pool, PoolLimits, process_starter
from runtime.server.run import PROTOCOLS, open_sounds
from runtime.server.settings import ServerSettings
from runtime.server.worker import WorkerSpec, run_worker

TEXT = "Hello there, this is a test."


@contextmanager
def stopped(pool: Pool) -> Iterator[None]:
    """The worker stands still; nothing it was given goes on."""
    pid = pool.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wav_clip(seconds: float = 1.2, rate_hz: int = 16_000) -> bytes:
    """Something that passes as speech: two tones whose level rises and falls, and a little noise."""
    t = np.arange(int(seconds * rate_hz)) / rate_hz
    level = 0.15 + 0.85 * (np.sin(2 * np.pi * 3 * t) > 0)
    noise = np.random.default_rng(1).standard_normal(t.size)
    sound = 0.3 * level * (np.sin(2 * np.pi * 180 * t) + 0.3 * np.sin(2 * np.pi * 900 * t)) + 0.003 * noise
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, rate_hz, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def data_url(clip: bytes, mime: str = "audio/wav") -> str:
    return f"data:{mime};base64,{base64.b64encode(clip).decode()}"


@dataclass
class Served:
    """A running server."""

    url: str
    pool: Pool
    server: uvicorn.Server
    clip: bytes
    clip_url: str
    sounds: Pool | None = None  # of MOSS-SoundEffect

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, **options)

    def post(self, **fields) -> httpx.Response:
        body = {"input": TEXT, "ref_audio": self.clip_url, **fields}
        with self.client() as client:
            return client.post("/v1/audio/speech", json={k: v for k, v in body.items() if v is not ...})

    def pcm(self, **fields) -> bytes:
        response = self.post(response_format="pcm", **fields)
        assert response.status_code == 200, response.text
        return response.content


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll until true; fail when it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)


@contextmanager
def serving(artifacts: Path, voices: Path, limits: PoolLimits | None = None, start_worker=None, **settings):
    """A server with its own pool, ended afterwards."""
    chosen = ServerSettings(voice_directory=voices, **settings)
    limits = limits or PoolLimits(chosen.slots, chosen.max_queue)
    spec = WorkerSpec(artifacts, BackendOptions(threads=1), limits.slots, chosen.max_rows)
    pool = Pool(start_worker or process_starter(run_worker, spec), limits)
    sounds = open_sounds(chosen)
    app = create_app(chosen, Manifest.load(artifacts), pool, sounds)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # who does not read is noticed after little audio
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, **PROTOCOLS)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    clip = wav_clip()
    url, sound_pool = f"http://127.0.0.1:{sock.getsockname()[1]}", sounds[1] if sounds else None
    served = Served(url, pool, server, clip, data_url(clip), sound_pool)
    try:
        wait_for(lambda: server.started)
        yield served
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive(), "the server did not end"
