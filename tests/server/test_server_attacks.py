"""Attacks that a reading of fetch.py, security.py and settings.py suggested; each of them once worked."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from runtime.cli import cli
from runtime.errors import MossError
from runtime.server.errors import ApiError
from runtime.server.fetch import FetchLimits, fetch
from runtime.server.run import read_settings
from runtime.server.security import ApiKeys, BodyLimits
from runtime.server.settings import ServerSettings


@pytest.mark.parametrize("answer", ["HTTP/1.1 200 OK\r\nX: ", "HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "body"])
def test_an_answer_that_drips_byte_by_byte_ends_at_the_deadline(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server, answer.encode()), daemon=True).start()
        start = time.monotonic()
        with pytest.raises(ApiError, match="too long"):
            fetch(f"http://127.0.0.1:{server.getsockname()[1]}/", FetchLimits(10_000, 0.5), lambda _: True)
        assert time.monotonic() - start < 2


def drip(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        try:
            connection.sendall(answer)
            for _ in range(100):
                connection.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            pass  # the client has gone


def test_a_silent_tls_handshake_ends_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server, b"\x16\x03\x03\x3f\xff"), daemon=True).start()
        start = time.monotonic()
        with pytest.raises(ApiError):
            fetch(f"https://127.0.0.1:{server.getsockname()[1]}/", FetchLimits(10_000, 0.5), lambda _: True)
        assert time.monotonic() - start < 2


@pytest.mark.parametrize("key", ["", " ", "two words", "line\n", "schl\u00fcssel"])
def test_a_key_that_opens_to_everybody_or_to_nobody_is_refused(key):
    with pytest.raises(MossError, match="api_keys"):
        read_settings({"api_keys": (key,)})


def test_keys_in_the_environment_that_are_no_list_are_one_line_without_the_key(monkeypatch):
    monkeypatch.setenv("MOSS_TTS_API_KEYS", "sesame")
    with pytest.raises(MossError, match="JSON") as refused:
        read_settings({})
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    "path", ["/v1/audio/speech", "/prefix/v1/audio/speech", "//v1/models", "/V1/models", "/openapi.json"]
)
def test_what_is_not_known_to_be_open_needs_a_key(path):
    assert answer_of(ApiKeys(reached, ("sesame",)), path=path) == 401


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics"])
def test_operations_are_open(path):
    assert answer_of(ApiKeys(reached, ("sesame",)), path=path) == 200


@pytest.mark.parametrize(("site", "keys", "status"), [
    (b"cross-site", (), 403), (b"same-origin", (), 200), (b"none", (), 200), (b"cross-site", ("sesame",), 200),
])  # fmt: skip
def test_a_page_of_another_site_cannot_use_a_server_without_keys(site, keys, status):
    headers = [(b"sec-fetch-site", site), (b"authorization", b"Bearer sesame")]
    assert answer_of(ApiKeys(reached, keys), headers=headers) == status


def test_a_timeout_of_the_application_is_not_blamed_on_the_body():
    async def late(scope, receive, send):
        raise TimeoutError

    with pytest.raises(TimeoutError):
        answer_of(BodyLimits(late, ServerSettings()))


def test_an_announced_length_of_thousands_of_digits_is_too_large():
    assert answer_of(BodyLimits(reached, ServerSettings()), headers=[(b"content-length", b"9" * 5000)]) == 413


async def reached(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


def answer_of(app, path="/v1/audio/speech", headers=()) -> int:
    """The status of a POST."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": json.dumps({}).encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": list(headers)}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"]


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "runtime.server.run")
    result = CliRunner().invoke(cli, ["serve", str(tmp_path)])
    assert result.exit_code == 1 and "[serve]" in result.output and result.output.count("\n") == 1
