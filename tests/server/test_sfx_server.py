"""MOSS-SoundEffect as the second model of a server: the official client, both models at once, and what goes wrong."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pytest
from click.testing import CliRunner

from runtime.cli import cli
from runtime.errors import MossError
from runtime.server.jobs import Finished
from runtime.server.pool import PoolLimits, State
from runtime.server.run import open_sounds, read_settings
from tests.server.loopback import TEXT, serving, stopped, wait_for
from tests.server.test_openai_client import CONTAINERS, FORMATS
from tests.sfx.tiny import write_codec, write_language_model, write_tokenizer

MODEL = "OpenMOSS-Team/MOSS-SoundEffect"
SPEECH = "OpenMOSS-Team/MOSS-TTS-Nano"
PROMPT = "a dog barks in the rain"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sfx_served")
    (directory / "model").mkdir()
    write_language_model(directory / "model")
    write_tokenizer(directory / "model")
    write_codec(directory / "codec")
    return {"sfx_checkpoint": directory / "model", "sfx_codec": directory / "codec"}


@pytest.fixture(scope="module")
def both(tiny_artifacts, tmp_path_factory, checkpoints):
    """A server of both models; one sound is made, two may wait."""
    os.environ["OMP_NUM_THREADS"], before = "1", os.environ.get("OMP_NUM_THREADS")
    try:
        with serving(tiny_artifacts, tmp_path_factory.mktemp("voices"), PoolLimits(2, 2), max_rows=640, max_queue=2,
                     **checkpoints) as running:  # fmt: skip
            wait_for(lambda: httpx.get(f"{running.url}/ready", trust_env=False).status_code == 200, 120)
            yield running
            assert running.sounds.places_taken == running.sounds.num_running == running.sounds.num_waiting == 0
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        os.environ.update({} if before is None else {"OMP_NUM_THREADS": before})


def ask(served, **fields):
    with served.client() as client:
        return client.post("/v1/audio/speech", json={"model": MODEL, "response_format": "pcm", **fields})


def sound(served, **fields) -> bytes:
    answer = ask(served, **({"input": PROMPT} | fields))
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("response_format", FORMATS)
def test_the_official_client_gets_a_sound_in_every_format(both, response_format):
    import io

    import av

    with openai.OpenAI(base_url=f"{both.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.audio.speech.create(
            model=MODEL, voice="alloy", input=PROMPT, response_format=response_format,
            extra_body={"duration_seconds": 4, "seed": 3},
        )  # fmt: skip
    want = len(sound(both, duration_seconds=4, seed=3)) / 2 / 24_000
    assert answer.response.headers["content-type"].startswith(FORMATS[response_format])
    if response_format == "pcm":
        assert answer.response.headers["content-type"] == "audio/pcm;rate=24000;channels=1"
        assert len(answer.content) / 2 / 24_000 == want
        return
    with av.open(io.BytesIO(answer.content)) as container:
        stream = container.streams.audio[0]
        rate = 48_000 if response_format == "opus" else 24_000  # Opus always says 48 kHz
        assert container.format.name == CONTAINERS[response_format] and (stream.rate, stream.channels) == (rate, 1)
        seconds = sum(frame.samples for frame in container.decode(audio=0)) / rate
    assert seconds == pytest.approx(want, abs=0.13)  # the priming of the lossy ones


def test_it_is_the_sound_of_run_om_sfx(both, checkpoints, tmp_path):
    out = tmp_path / "a.wav"
    options = ["--checkpoint", checkpoints["sfx_checkpoint"], "--codec", checkpoints["sfx_codec"], "--out", out]
    made = CliRunner().invoke(
        cli, ["sfx", *map(str, options), "--prompt", PROMPT, "--seconds", "4", "--seed", "3"], catch_exceptions=False
    )
    assert made.exit_code == 0, made.output
    assert out.read_bytes()[44:] == sound(both, duration_seconds=4, seed=3)


def test_streams_and_events_carry_the_bytes_of_the_file(both):
    want = sound(both, seed=5)
    assert sound(both, seed=5, stream_format="audio") == want
    events = ask(both, input=PROMPT, seed=5, stream=True).text.split("\n\n")
    data = [json.loads(event.split("data: ", 1)[1]) for event in events if event]
    assert b"".join(base64.b64decode(d["audio"]) for d in data[:-1]) == want
    assert data[-1]["type"] == "speech.audio.done" and data[-1]["usage"]["output_tokens"] == len(want) / 2 / 1920


def test_a_seed_gives_the_same_bytes_alone_and_beside_sounds_and_speech(both):
    want = {seed: sound(both, seed=seed) for seed in (1, 2)}
    spoken = both.pcm(seed=1)
    with ThreadPoolExecutor(3) as threads:
        sounds = {seed: threads.submit(sound, both, seed=seed) for seed in (2, 1)}
        speech = threads.submit(both.pcm, seed=1, model=SPEECH)
        assert {seed: s.result() for seed, s in sounds.items()} == want and speech.result() == spoken
    assert want[1] != want[2] == sound(both, ambient_sound=PROMPT, input="ignored", seed=2)
    assert sound(both, seed=1) != sound(both, seed=1, extra_params={"temperature": 0.5})


def test_models_readiness_and_metrics_cover_both(both):
    sound(both)
    with both.client() as client:
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert MODEL in names and SPEECH in names and client.get(f"/v1/models/{MODEL}").status_code == 200
        assert client.get("/ready").json()["models"] == {SPEECH: "ready", MODEL: "ready"}
        figures = client.get("/metrics").text
        page = client.get("/").text
    assert re.search(rf'moss_tts_requests_total{{model="{MODEL}",status="200"}} [1-9]', figures)
    assert f'moss_tts_ready{{model="{SPEECH}"}} 1.0' in figures
    assert f'value="{MODEL}" data-rate="24000" data-voices=""' in page and "<p ><label>Model" in page


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"duration_seconds": 0}, "duration_seconds"),
        ({"duration_seconds": 400}, "duration_seconds"),
        ({"duration_seconds": "long"}, "duration_seconds"),
        ({"input": " "}, "input"),
        ({"ambient_sound": ""}, "ambient_sound"),
        ({"input": "<|im_end|>"}, "input"),
        ({"ref_audio": "data:audio/wav;base64,AAAA"}, "ref_audio"),
        ({"extra_params": {"top_p": 2}}, "extra_params"),
        ({"sample_rate": 48_000}, "sample_rate"),
        ({"stream": True, "speed": 2}, "speed"),
    ],
)
def test_what_makes_no_sense_for_a_sound_is_400(both, fields, param):
    answer = ask(both, **({"input": PROMPT} | fields))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_an_unknown_model_is_404_and_so_is_this_one_on_a_server_without_it(both, served):
    for server, model in ((both, "no-such"), (served, MODEL)):
        answer = ask(server, input=PROMPT, model=model)
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "NotFoundError"
    with served.client() as client:
        assert MODEL not in client.get("/v1/models").text


def test_a_run_without_audio_is_an_error_and_not_an_empty_file(both):
    answer = ask(both, input=PROMPT, max_new_tokens=3)
    assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
    assert "without a complete frame" in answer.json()["error"]["message"]


def test_a_full_queue_is_429_and_those_who_leave_free_their_places(both):
    pool = both.sounds
    with ThreadPoolExecutor(3) as threads:
        with stopped(pool):
            asked = [threads.submit(sound, both, seed=seed) for seed in range(3)]
            wait_for(lambda: pool.num_running == 1 and pool.num_waiting == 2)
            refused = ask(both, input=PROMPT)
            assert both.pcm(seed=1)  # the speech model has its own queue
        assert all(a.result() for a in asked)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1


def test_a_client_that_leaves_stops_the_sound_between_two_rows(both):
    """The worker stands still while client and Cancel go by; it must not make the sound once it goes on."""
    pool, want = both.sounds, sound(both, seed=7)
    pieces = []
    with stopped(pool):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{both.url}/v1/audio/speech", json={"model": MODEL, "input": PROMPT}, timeout=0.5,
                       trust_env=False)  # fmt: skip
        wait_for(lambda: pool.num_running == pool.places_taken == 0)
    heard = pool._on_event
    pool._on_event = lambda worker, event: (pieces.append(event), heard(worker, event))
    try:
        assert sound(both, seed=7) == want and pool.restarts == 0
    finally:
        pool._on_event = heard
    assert sum(isinstance(event, Finished) for event in pieces) == 1


@pytest.mark.parametrize("hang", [False, True])
def test_a_worker_that_dies_or_hangs_is_replaced_and_the_sound_is_made(both, hang):
    pool, want = both.sounds, sound(both, seed=9)
    restarts, limits, pid = pool.restarts, pool.limits, pool.worker_pid
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads, both.client() as client:
        asked = threads.submit(sound, both, seed=9)
        wait_for(lambda: pool.num_running == 1)
        if hang:
            pool.limits = replace(limits, step_timeout_seconds=0.3)
            wait_for(lambda: pool.restarts == restarts + 1)
            pool.limits = limits
        else:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: pool.restarts == restarts + 1)
        assert client.get("/health").status_code == 503
        assert client.get("/health").json()["models"] == {SPEECH: "ready", MODEL: "restarting"}
        assert asked.result() == want
    assert pool.restarts == restarts + 1 and pool.state is State.READY


def test_the_log_has_lengths_and_no_words(both, caplog):
    with caplog.at_level(logging.INFO):
        sound(both, ambient_sound="SECRETWORD wind", seed=1)
        ask(both, input="SECRETWORD", max_new_tokens=3)
    assert "characters=15" in caplog.text and "SECRETWORD" not in caplog.text


def test_half_of_the_settings_and_shared_names_are_one_line(checkpoints):
    with pytest.raises(MossError, match="--sfx-checkpoint and --sfx-codec"):
        open_sounds(read_settings({"sfx_checkpoint": checkpoints["sfx_checkpoint"]}))
    with pytest.raises(MossError, match="stands for both"):
        open_sounds(read_settings({**checkpoints, "sfx_model_names": (SPEECH,)}))


def test_speech_still_needs_its_words(both):
    assert both.post(model=SPEECH, input=TEXT).status_code == 200
    assert both.post(model=SPEECH, input=" ").status_code == 400
