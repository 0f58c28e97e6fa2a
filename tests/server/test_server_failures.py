"""What goes wrong: full queues, clients that leave or do not read, workers that die, hang or cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe

import httpx
import pytest

from runtime.server.jobs import Broken, Encoded, Failed, Job, Piece, Ready, Started
from runtime.server.pool import PoolLimits, State
from tests.server.loopback import serving, stopped, wait_for

LONG = " ".join(f"This is sentence number {i}, and it says something." for i in range(60))


@pytest.fixture(scope="module")
def small(tiny_artifacts, tmp_path_factory):
    """Two slots, a queue of two, and a watchdog that waits eight seconds."""
    limits = PoolLimits(slots=2, max_queue=2, deadline_seconds=60, step_timeout_seconds=8)
    with serving(tiny_artifacts, tmp_path_factory.mktemp("voices"), limits, max_rows=640) as running:
        wait_for(lambda: running.pool.state is State.READY, 60)
        running.pcm()  # the clip's codes are cached from here on
        yield running
        assert running.pool.places_taken == running.pool.num_running == running.pool.num_waiting == 0


@contextmanager
def streaming(served, **fields):
    body = {"input": LONG, "ref_audio": served.clip_url, "stream_format": "audio", "response_format": "pcm", **fields}
    with served.client() as client, client.stream("POST", "/v1/audio/speech", json=body) as response:
        assert response.status_code == 200
        yield response.iter_raw()


def test_a_full_queue_is_429_with_retry_after_and_those_inside_are_served(small):
    want = [small.pcm(seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        with stopped(small.pool):
            asked = [threads.submit(small.pcm, seed=seed) for seed in range(4)]
            wait_for(lambda: small.pool.num_running == small.pool.num_waiting == 2)
            refused = small.post()
        assert [a.result() for a in asked] == want
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "RateLimitError"


def test_clients_that_leave_free_slots_and_queue_places(small):
    with stopped(small.pool):
        bodies = [json.dumps({"input": LONG, "ref_audio": small.clip_url, "stream": i % 2 == 0}) for i in range(3)]
        sockets = [raw_request(small, body) for body in bodies]
        wait_for(lambda: small.pool.num_running == 2 and small.pool.num_waiting == 1)
        for sock in sockets:
            sock.close()
        wait_for(lambda: small.pool.places_taken == small.pool.num_running == small.pool.num_waiting == 0)
    assert small.pcm() == small.pcm()


def test_a_stream_that_is_left_in_the_middle_ends_at_once(small):
    want = small.pcm(seed=3)
    with streaming(small) as pieces:
        next(pieces)
        assert small.pool.num_running == 1
    wait_for(lambda: small.pool.num_running == small.pool.places_taken == 0, 3)
    assert small.pcm(seed=3) == want


def raw_request(served, body: str) -> socket.socket:
    """A request whose answer nobody reads."""
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30)
    sock.connect((host, int(port)))
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body.encode())
    return sock


def test_a_reader_that_does_not_read_stalls_nobody_and_still_gets_everything(small):
    text = LONG[: len(LONG) // 4]
    want, other = small.pcm(input=text), small.pcm(seed=8)
    body = {"input": text, "ref_audio": small.clip_url, "stream_format": "audio", "response_format": "pcm"}
    with raw_request(small, json.dumps(body)) as slow:
        wait_for(lambda: small.pool.num_running == 1)
        assert small.pcm(seed=8) == other
        wait_for(lambda: small.pool.num_running == 0)  # its slot is free although nothing was read
        assert small.pool.places_taken == 1
        response = httpx_like_read(slow)
    assert response == want
    wait_for(lambda: small.pool.places_taken == 0)


def httpx_like_read(sock: socket.socket) -> bytes:
    """The body of a chunked answer."""
    file = sock.makefile("rb")
    while file.readline() != b"\r\n":
        pass
    body = b""
    while size := int(file.readline(), 16):
        body += file.read(size)
        file.readline()
    return body


def test_the_deadline_ends_a_request_that_waits(small):
    limits = small.pool.limits
    small.pool.limits = replace(limits, deadline_seconds=0.5)
    try:
        with stopped(small.pool):
            response = small.post()
    finally:
        small.pool.limits = limits
    assert response.status_code == 504 and response.headers["x-should-retry"] == "false"


def test_a_worker_killed_under_load_is_replaced_and_nobody_gets_anothers_audio(small):
    texts = [f"Number {i}. {LONG[:800]}" for i in range(4)]
    want = [small.pcm(input=text, seed=i) for i, text in enumerate(texts)]
    restarts, got = small.pool.restarts, {}

    def ask(i: int) -> None:
        received = b""
        try:
            with streaming(small, input=texts[i], seed=i) as pieces:
                for piece in pieces:
                    received += piece
            got[i] = ("whole", received)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            got[i] = ("broken", received)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: any(t.has_audio for t in list(small.pool._running.values())))
    os.kill(small.pool.worker_pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    kinds = [got[i][0] for i in range(4)]
    assert "broken" in kinds and "whole" in kinds
    for i in range(4):
        kind, pcm = got[i]
        assert pcm == want[i] if kind == "whole" else (want[i].startswith(pcm) and len(pcm) < len(want[i]))
    assert small.pool.restarts == restarts + 1 and small.pool.state is State.READY
    assert small.pcm(input=texts[0], seed=0) == want[0]  # the same bytes after a restart


def test_an_event_stream_that_loses_its_worker_says_so_and_has_no_end(small):
    body = {"input": LONG, "ref_audio": small.clip_url, "stream": True, "response_format": "pcm"}
    with small.client() as client, client.stream("POST", "/v1/audio/speech", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(small.pool.worker_pid, signal.SIGKILL)
        kinds = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert kinds[-1]["type"] == "speech.audio.error" and kinds[-1]["error"]["type"] == "server_error"
    assert all(kind["type"] == "speech.audio.delta" for kind in kinds[:-1])
    wait_for(lambda: small.pool.state is State.READY)


def test_a_hung_step_turns_health_to_503_and_the_worker_is_replaced(small):
    want, limits = small.pcm(seed=4), small.pool.limits
    small.pool.limits = replace(limits, step_timeout_seconds=0.5)
    try:
        os.kill(small.pool.worker_pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads, small.client() as client:
            asked = threads.submit(small.pcm, seed=4)
            wait_for(lambda: client.get("/health").status_code == 503)
            assert client.get("/ready").status_code == 503
            wait_for(lambda: client.get("/health").status_code == 200)
            assert asked.result() == want  # nothing had been sent: the next worker speaks it
    finally:
        small.pool.limits = limits


class FakeProcess:
    """A worker that is a thread with a script."""

    pid = 0

    def __init__(self, script, pipe):
        self.pipe, self.thread = pipe, threading.Thread(target=self.run, args=(script,), daemon=True)
        self.thread.start()

    def run(self, script):
        try:
            script(self.pipe)
        except (EOFError, OSError):
            pass
        finally:
            self.pipe.close()

    def kill(self):
        pass

    def join(self, timeout=None):
        self.thread.join(timeout)

    def is_alive(self):
        return self.thread.is_alive()


def scripted(script):
    def start():
        ours, theirs = Pipe()
        return FakeProcess(script, theirs), ours

    return start


def test_before_the_warm_up_is_done_nothing_is_ready(tiny_artifacts, tmp_path):
    loaded = threading.Event()

    def load(pipe):
        loaded.wait(10)
        pipe.send(Ready("fake", 1, 640))
        pipe.recv()

    with serving(tiny_artifacts, tmp_path, start_worker=scripted(load)) as served, served.client() as client:
        assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
        refused = served.post()
        assert refused.status_code == 503 and "retry-after" in refused.headers
        loaded.set()
        wait_for(lambda: client.get("/ready").status_code == 200)


def test_a_model_that_cannot_be_loaded_is_503_with_the_reason(tiny_artifacts, tmp_path):
    def fail(pipe):
        pipe.send(Broken("no device: run npu-smi info"))

    with serving(tiny_artifacts, tmp_path, start_worker=scripted(fail)) as served, served.client() as client:
        wait_for(lambda: client.get("/health").status_code == 503)
        refused = served.post()
    assert refused.status_code == 503 and "npu-smi" in refused.json()["error"]["message"]


@pytest.mark.parametrize("delivery", [{}, {"stream": True}, {"stream_format": "audio", "response_format": "pcm"}])
def test_a_backend_that_fails_before_the_first_audio_is_500_json(tiny_artifacts, tmp_path, delivery):
    response = scripted_answer(tiny_artifacts, tmp_path, [Failed("", "aclmdlExecute: 507018")], delivery)
    assert response.status_code == 500 and "507018" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"


def test_a_file_whose_generation_fails_in_the_middle_is_500(tiny_artifacts, tmp_path):
    answer = [Piece("", b"\0\0" * 3840), Failed("", "lost")]
    assert scripted_answer(tiny_artifacts, tmp_path, answer, {}).status_code == 500


def test_a_raw_stream_that_fails_in_the_middle_never_ends_cleanly(tiny_artifacts, tmp_path):
    answer = [Piece("", b"\0\0" * 3840), Failed("", "lost")]
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        scripted_answer(tiny_artifacts, tmp_path, answer, {"stream_format": "audio", "response_format": "pcm"})


def scripted_answer(artifacts, directory, answer, delivery):
    def script(pipe):
        pipe.send(Ready("fake", 1, 640))
        import numpy as np

        while (job := pipe.recv()) is not None:
            if not isinstance(job, Job):
                pipe.send(Encoded(job.id, np.zeros((15, 16), np.int32)))
                continue
            pipe.send(Started(job.id))
            for event in answer:
                pipe.send(replace(event, id=job.id))
                time.sleep(0.05)

    with serving(artifacts, directory, start_worker=scripted(script)) as served:
        wait_for(lambda: served.pool.state is State.READY)
        return served.post(**delivery)
