"""POST /v1/audio/speech and its neighbours: fields, defaults, headers, errors."""

from __future__ import annotations

import base64
import io
import json
import threading

import httpx
import numpy as np
import pytest
import soundfile

TEXT = "Hello there, this is a test."


def events(text: str) -> list[dict]:
    """The events of an SSE body; their names must be those of their data."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(response: httpx.Response) -> dict:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == response.status_code and response.headers["x-request-id"].startswith("speech-")
    return body["error"]


def test_the_default_is_a_wav_file_that_says_how_much_was_used(served):
    response = served.post()
    sound, rate = soundfile.read(io.BytesIO(response.content), dtype="int16")
    assert rate == 48_000 and sound.ndim == 1 and np.abs(sound).max() > 0
    headers = response.headers
    frames = len(sound) // 3840
    assert headers["content-type"] == "audio/wav" and headers["x-vllm-omni-output-tokens"] == str(frames)
    used = [int(headers[f"x-vllm-omni-{n}-tokens"]) for n in ("input-text", "input-audio", "input", "output", "total")]
    assert used[0] > 0 and used[1] == 15 and used[2] == used[0] + used[1] and used[4] == used[2] + used[3]


def test_without_a_seed_42_is_meant(served):
    assert served.pcm() == served.pcm(seed=42) == served.pcm(seed=None) != served.pcm(seed=-1)


@pytest.mark.parametrize("response_format", ["pcm", "wav", "mp3"])
def test_events_carry_the_bytes_of_the_stream_and_the_usage(served, response_format):
    raw = served.post(response_format=response_format, stream_format="audio")
    response = served.post(response_format=response_format, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    *deltas, done = events(response.text)
    pieces = [base64.b64decode(e["audio"], validate=True) for e in deltas]
    assert b"".join(pieces) == raw.content and {e["type"] for e in deltas} == {"speech.audio.delta"}
    if response_format == "wav":
        assert len(pieces[0]) == 44
    usage = done["usage"]
    assert (
        done["type"] == "speech.audio.done" and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    )
    assert response.text == served.post(response_format=response_format, stream_format="sse").text


def test_the_stream_is_the_file(served):
    assert served.pcm(stream_format="audio") == served.pcm() == served.post().content[44:]


def test_streams_come_in_pieces_and_the_first_is_one_frame(served):
    with served.client() as client, client.stream(
        "POST", "/v1/audio/speech",
        json={"input": TEXT, "ref_audio": served.clip_url, "stream_format": "audio", "response_format": "pcm"},
    ) as response:  # fmt: skip
        pieces = list(response.iter_raw())
    assert response.headers["content-type"] == "audio/pcm;rate=48000;channels=1"
    assert len(pieces) > 3 and len(pieces[0]) == 2 * 3840


def test_speed_changes_the_length_of_a_file(served):
    assert len(served.pcm(speed=2.0)) == pytest.approx(len(served.pcm()) / 2, abs=4)


def test_max_new_tokens_ends_the_sound(served):
    assert len(served.pcm(max_new_tokens=5)) == 5 * 2 * 3840


def test_long_texts_are_spoken_in_segments(served):
    text = " ".join(f"This is sentence number {i}, and it says something." for i in range(12))
    assert len(served.pcm(input=text, max_new_tokens=4)) > 2 * 4 * 2 * 3840


REFUSED = [
    ({"input": " \n"}, 400, "input"),
    ({"input": ...}, 400, "input"),
    ({"input": 7}, 400, "input"),
    ({"input": "x" * 4097}, 400, "input"),
    ({"input": "\u200b"}, 400, "input"),
    ({"model": "other"}, 404, "model"),
    ({"voice": {"name": "x"}}, 400, "voice"),
    ({"response_format": "midi"}, 400, "response_format"),
    ({"sample_rate": 24_000}, 400, "sample_rate"),
    ({"speed": 5}, 400, "speed"),
    ({"speed": 2, "stream": True}, 400, "speed"),
    ({"stream_format": "websocket"}, 400, "stream_format"),
    ({"seed": 2**63}, 400, "seed"),
    ({"max_new_tokens": 0}, 400, "max_new_tokens"),
    ({"instructions": "x" * 501}, 400, "instructions"),
    ({"word_timestamps": True}, 400, "word_timestamps"),
    ({"ref_audio": None}, 400, "ref_audio"),
    ({"ref_audio": None, "voice": "default"}, 400, "ref_audio"),
    ({"ref_audio": None, "voice": "nobody"}, 400, "voice"),
    ({"ref_audio": ["a", "b"]}, 400, None),
    ({"ref_audio": []}, 400, None),
    ({"references": [{"audio_path": "x"}]}, 400, None),
]


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_is_wrong_is_refused_with_its_field(served, fields, status, param):
    response = served.post(**fields)
    assert response.status_code == status and error_of(response)["param"] == param


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"input": "\\ud800"}', b"[" * 100_000, b"\xff\xfe", b'{"input":1e999}']
)
def test_a_body_that_is_no_request_is_refused(served, body):
    with served.client() as client:
        response = client.post("/v1/audio/speech", content=body)
    assert response.status_code == 400 and error_of(response)["type"] == "BadRequestError"


def test_an_unknown_voice_is_ignored_when_a_clip_decides(served):
    assert served.pcm(voice="nobody") == served.pcm(voice={"id": "alloy"}) == served.pcm(speaker="x", extra=1)


def test_references_are_another_name_for_the_clip(served):
    fields = {"ref_audio": ..., "references": [{"audio_path": served.clip_url, "text": "what it says"}]}
    assert served.pcm(**fields) == served.pcm()


def test_unknown_routes_and_methods_answer_in_the_envelope(served):
    with served.client() as client:
        assert error_of(client.get("/v1/nothing"))["type"] == "NotFoundError"
        assert error_of(client.get("/v1/audio/speech"))["code"] == 405
        assert error_of(client.get("/v1/models/none"))["code"] == 404


def test_concurrent_requests_get_what_they_get_alone(served):
    seeds = list(range(8))
    want = [served.pcm(seed=seed, input=f"This is number {seed}.") for seed in seeds]
    got: dict[int, bytes] = {}

    def ask(seed: int) -> None:
        got[seed] = served.pcm(seed=seed, input=f"This is number {seed}.", stream_format="audio" if seed % 2 else None)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[seed] for seed in seeds] == want


def test_voices_can_be_uploaded_used_listed_and_deleted(served):
    with served.client() as client:
        made = client.post(
            "/v1/audio/voices", data={"name": "Ann", "consent": "yes", "ref_text": "words"},
            files={"audio_sample": ("a.wav", served.clip, "audio/wav")},
        )  # fmt: skip
        assert made.status_code == 200, made.text
        assert made.json()["success"] and made.json()["id"] == "ann" and made.json()["voice"]["consent"] == "yes"
        listed = client.get("/v1/audio/voices").json()
        assert listed["voices"] == ["default", "ann"] and listed["uploaded_voices"][0]["file_size"] == len(served.clip)
        assert served.pcm(ref_audio=None, voice=" ANN ") == served.pcm()
        assert client.delete("/v1/audio/voices/ann").json()["success"]
        assert error_of(client.delete("/v1/audio/voices/ann"))["code"] == 404
        assert error_of(client.delete("/v1/audio/voices/..%2F..%2Fetc"))["code"] == 404
        assert client.get("/v1/audio/voices").json()["voices"] == ["default"]


BAD_UPLOADS = [
    ({"name": "x"}, "audio/wav", None, "consent"),
    ({"consent": "yes"}, "audio/wav", None, "name"),
    ({"name": "../x", "consent": "yes"}, "audio/wav", None, "name"),
    ({"name": "a\0b", "consent": "yes"}, "audio/wav", None, "name"),
    ({"name": "alloy", "consent": "yes"}, "audio/wav", None, "name"),
    ({"name": "x", "consent": "yes"}, "text/html", None, "audio_sample"),
    ({"name": "x", "consent": "yes"}, "audio/wav", b"", "ref_audio"),
    ({"name": "x", "consent": "yes"}, "audio/wav", b"<html>", "ref_audio"),
    ({"name": "x", "consent": "yes"}, "audio/wav", b"0" * (10 * 2**20 + 1), "audio_sample"),
]


@pytest.mark.parametrize(("form", "kind", "clip", "param"), BAD_UPLOADS, ids=range(len(BAD_UPLOADS)))
def test_a_bad_upload_is_refused(served, form, kind, clip, param):
    with served.client() as client:
        sample = ("a.wav", served.clip if clip is None else clip, kind)
        response = client.post("/v1/audio/voices", data=form, files={"audio_sample": sample})
    assert response.status_code == 400 and error_of(response)["param"] == param


def test_health_ready_and_metrics_tell_what_happens(served):
    served.pcm()
    with served.client() as client:
        assert client.get("/health").json() == {"status": "healthy", "worker": "ready"}
        assert client.get("/ready").status_code == 200
        text = client.get("/metrics").text
    model = 'model="OpenMOSS-Team/MOSS-TTS-Nano"'
    for name in (f'requests_total{{{model},status="200"}}', f"queue_wait_seconds_sum{{{model}}}",
                 f"first_audio_seconds_count{{{model}}}", "rtf_bucket", f"underrun_seconds_sum{{{model}}}",
                 f"requests_running{{{model}}} 0.0", f"worker_restarts{{{model}}} 0.0"):  # fmt: skip
        assert f"moss_tts_{name}" in text
