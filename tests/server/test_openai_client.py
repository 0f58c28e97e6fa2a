"""The official client, unmodified, against the real server."""

from __future__ import annotations

import io

import av
import openai
import pytest

TEXT = "Hello there, this is a test."
FORMATS = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def seconds_of(data: bytes, response_format: str) -> float:
    """The length of a sound, by decoding all of it."""
    if response_format == "pcm":
        return len(data) / 2 / 48_000
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        assert (stream.rate, stream.channels) == (48_000, 1)
        return sum(frame.samples for frame in container.decode(audio=0)) / 48_000


CONTAINERS = {"wav": "wav", "flac": "flac", "mp3": "mp3", "opus": "ogg", "aac": "aac"}


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("response_format", FORMATS)
def test_create_gives_a_whole_file_in_the_asked_format(client, served, response_format, seed):
    extra = {"ref_audio": served.clip_url} | ({} if seed is None else {"seed": seed})
    answer = client.audio.speech.create(
        model="tts-1", voice="alloy", input=TEXT, response_format=response_format, extra_body=extra
    )
    want = len(served.pcm(**({} if seed is None else {"seed": seed}))) / 2 / 48_000
    assert seconds_of(answer.content, response_format) == pytest.approx(want, abs=0.06)
    assert answer.response.headers["content-type"].startswith(FORMATS[response_format])
    assert int(answer.response.headers["content-length"]) == len(answer.content)
    if response_format in CONTAINERS:
        with av.open(io.BytesIO(answer.content)) as container:
            assert container.format.name == CONTAINERS[response_format]


@pytest.mark.parametrize("response_format", FORMATS)
def test_with_streaming_response_gives_the_same_sound(client, served, response_format):
    extra = {"ref_audio": served.clip_url, "stream_format": "audio"}
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input=TEXT, response_format=response_format, extra_body=extra
    ) as answer:
        pieces = list(answer.iter_bytes())
        assert answer.headers["content-type"].startswith(FORMATS[response_format])
    data = b"".join(pieces)
    want = served.pcm()
    if response_format == "pcm":
        assert data == want
    elif response_format == "wav":
        assert data[4:8] == data[40:44] == b"\xff\xff\xff\xff" and data[44:] == want
    else:
        assert seconds_of(data, response_format) == pytest.approx(len(want) / 2 / 48_000, abs=0.06)


def test_a_seed_repeats_and_another_seed_differs(client, served):
    def say(seed):
        extra = {"ref_audio": served.clip_url, "seed": seed}
        return client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, extra_body=extra).content

    assert say(5) == say(5) != say(6)


def test_errors_become_the_clients_exceptions(client, served):
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT)
    assert refused.value.param == "voice" and refused.value.request_id.startswith("speech-")
    with pytest.raises(openai.NotFoundError):
        client.audio.speech.create(model="no-such", voice="alloy", input=TEXT)


def test_models_can_be_listed_and_retrieved(client):
    names = [model.id for model in client.models.list()]
    assert "tts-1" in names and client.models.retrieve("OpenMOSS-Team/MOSS-TTS-Nano").object == "model"
