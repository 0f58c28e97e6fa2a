"""deploy/ray_serve.py with two replicas on this machine: a Ray of its own on loopback, real proxy, real workers."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

from runtime.server.settings import ServerSettings
from tests.server.loopback import TEXT, wait_for, wav_clip

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
SLOTS = 2
LONG = " ".join(f"This is sentence number {i}, and it says something." for i in range(8))
LONGER = f"{LONG} {LONG} {LONG}"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def descendants(root: int) -> dict[int, str]:
    """Process id -> command line, of everything that `root` started."""
    parents, commands = {}, {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(directory.name)] = int((directory / "stat").read_text().rsplit(")", 1)[1].split()[1])
            commands[int(directory.name)] = (directory / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it ended meanwhile
    found, level = {}, {root}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        found.update({pid: commands[pid] for pid in level})
    return found


def replicas() -> list[int]:
    return [pid for pid, command in descendants(os.getpid()).items() if command.startswith("ray::ServeReplica")]


@pytest.fixture(scope="module")
def url(tiny_artifacts):
    """Two replicas, each with its own "NPU" as Ray counts them; the backend is ONNX Runtime."""
    from ray import serve

    from deploy.ray_serve import Arguments, app

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as root:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_SERVE_LOG_TO_STDERR", "0")
        before = set(descendants(os.getpid()))
        arguments = Arguments(
            artifacts=tiny_artifacts, npus=1, min_replicas=2, max_replicas=2,
            settings={"slots": SLOTS, "voice_directory": f"{root}/voices", "max_rows": 640},
        )  # fmt: skip
        try:
            ray.init(
                address="local", include_dashboard=False, log_to_driver=False, num_cpus=4, resources={"NPU": 2},
                object_store_memory=80 << 20, _temp_dir=root, _node_ip_address="127.0.0.1",
            )  # fmt: skip
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(app(arguments), route_prefix="/")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
            wait_for(lambda: set(descendants(os.getpid())) <= before, 20)


def speak(url: str, seed: int, text: str = TEXT) -> tuple[bytes, str]:
    """PCM, and who spoke."""
    body = {"input": text, "seed": seed, "voice": "anna", "response_format": "pcm", "stream_format": "audio"}
    response = httpx.post(f"{url}/v1/audio/speech", json=body, trust_env=False, timeout=60)
    response.raise_for_status()
    return response.content, response.headers["x-replica"]


def spoken_by_all(url: str, seeds: range, text: str = TEXT) -> dict[str, dict[int, bytes]]:
    """Replica -> seed -> audio; asked by as many clients as there are slots, until both replicas spoke every seed."""
    heard: dict[str, dict[int, bytes]] = {}
    end = time.monotonic() + 40
    while len(heard) < 2 or any(set(audio) < set(seeds) for audio in heard.values()):
        assert time.monotonic() < end, {name: sorted(audio) for name, audio in heard.items()}
        for seed in seeds:
            audio, name = speak(url, seed, text)
            assert heard.setdefault(name, {}).setdefault(seed, audio) == audio
    return heard


@pytest.fixture(scope="module")
def voice(url):
    """Stored through one replica."""
    form, clip = {"name": "anna", "consent": "yes"}, ("a.wav", wav_clip(), "audio/wav")
    answer = httpx.post(f"{url}/v1/audio/voices", data=form, files={"audio_sample": clip}, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text


def test_both_replicas_speak_the_same_bytes_and_know_a_voice_that_one_of_them_stored(url, voice):
    first, second = spoken_by_all(url, range(3)).values()
    assert first == second and len(set(first.values())) == 3


def test_each_replica_sees_an_npu_of_its_own(url):
    seen = []
    for replica in replicas():
        for pid, command in descendants(replica).items():
            if "spawn_main" in command:
                environment = Path(f"/proc/{pid}/environ").read_text()
                seen += re.findall(r"\0ASCEND_RT_VISIBLE_DEVICES=(\d+)\0", environment)
    assert sorted(seen) == ["0", "1"]


def test_the_official_client_streams_through_the_proxy(url, voice):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", http_client=httpx.Client(trust_env=False))
    wanted = {"model": "tts-1", "voice": "anna", "input": LONG, "response_format": "pcm"}
    create = client.audio.speech.with_streaming_response.create
    with create(**wanted, stream_format="audio", extra_body={"seed": 3}) as response:
        arrivals = [(time.monotonic(), piece) for piece in response.iter_bytes()]
        assert len(response.headers.get_list("x-request-id")) == 1
    whole = client.audio.speech.create(**wanted, extra_body={"seed": 3})
    assert b"".join(piece for _, piece in arrivals) == whole.content
    assert len(arrivals) > 10 and arrivals[-1][0] - arrivals[0][0] > 0.05, "it came at once"
    with pytest.raises(openai.NotFoundError):
        client.audio.speech.create(**{**wanted, "model": "unknown"})


def test_a_killed_replica_costs_its_running_requests_only_and_comes_back(url, voice):
    seeds = range(100, 103)
    expected = {seed: speak(url, seed, LONGER)[0] for seed in seeds}
    results: list[tuple[int, bytes | None]] = []
    speaking: set[int] = set()  # clients whose first audio has come and whose last has not
    stop = threading.Event()

    def client(number: int) -> None:
        turn = number
        while not stop.is_set():
            seed = seeds[turn % len(seeds)]
            turn += 1
            body = {"input": LONGER, "seed": seed, "voice": "anna", "response_format": "pcm", "stream_format": "audio"}
            try:
                with httpx.stream("POST", f"{url}/v1/audio/speech", json=body, trust_env=False, timeout=60) as response:
                    response.raise_for_status()
                    pieces = response.iter_raw()
                    audio = next(pieces)
                    speaking.add(number)
                    results.append((seed, audio + b"".join(pieces)))
            except httpx.HTTPError:
                results.append((seed, None))
            finally:
                speaking.discard(number)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in clients:
        thread.start()
    victim, survivor = replicas()
    worker = list(descendants(victim))
    wait_for(lambda: len(speaking) == 2 * SLOTS, 40)
    os.kill(victim, signal.SIGKILL)
    at_kill = len(results)
    wait_for(lambda: len(results) > at_kill + 8, 40)
    stop.set()
    for thread in clients:
        thread.join(60)
    lost = [seed for seed, audio in results if audio is None]
    assert 1 <= len(lost) <= SLOTS, Counter(lost)
    assert all(audio == expected[seed] for seed, audio in results if audio is not None)
    wait_for(lambda: len(replicas()) == 2, 40)
    assert survivor in replicas() and victim not in replicas()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in worker))
    assert all(audio == {100: expected[100]} for audio in spoken_by_all(url, range(100, 101), LONGER).values())


def test_bounds_that_contradict_each_other_are_refused(tmp_path):
    from deploy.ray_serve import Arguments

    with pytest.raises(ValueError, match="min_replicas"):
        Arguments(artifacts=tmp_path, min_replicas=3, max_replicas=2)


def test_a_replica_of_the_om_backend_has_one_npu_as_its_device_0_and_autoscales_within_the_bounds(tmp_path):
    from deploy.ray_serve import Arguments, backend_options, deployment_options

    # As `serve run … name=value` hands them over.
    arguments = Arguments.model_validate({"artifacts": str(tmp_path), "backend": "om", "max_replicas": "8"})
    options = deployment_options(arguments, ServerSettings(slots=1))
    assert (backend_options(arguments).name, backend_options(arguments).device) == ("om", "0")
    assert options["ray_actor_options"] == {"num_cpus": 1, "resources": {"NPU": 1}}
    assert options["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 1}
    assert (options["max_ongoing_requests"], options["max_queued_requests"]) == (1, 64)
    on_cpus = deployment_options(Arguments(artifacts=tmp_path, cpus=2), ServerSettings())
    assert on_cpus["ray_actor_options"] == {"num_cpus": 2, "resources": {}}
