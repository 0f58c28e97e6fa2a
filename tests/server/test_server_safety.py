"""What a request can talk the server into: nothing. Clips, URLs, files, keys, sizes; fuzzed parser and decoder."""

from __future__ import annotations

import http.server
import io
import ipaddress
import json
import logging
import socket
import threading
import time

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.audio import Clip
from runtime.manifest import Manifest
from runtime.server.clips import decode_clip, decode_data_url, read_local
from runtime.server.errors import ApiError
from runtime.server.fetch import FetchLimits, fetch, is_public
from runtime.server.jobs import Ready
from runtime.server.schema import SpeechRequest, parse_request
from runtime.server.security import key_matches
from tests.server.loopback import data_url, serving, wait_for, wav_clip
from tests.server.test_server_failures import scripted

CLIP = wav_clip()
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def codec(tiny_artifacts):
    return Manifest.load(tiny_artifacts).codec


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::1",
        "64:ff9b::7f00:1",
        "2001:0:1::1",
    ],
)
def test_addresses_that_are_not_the_internet_are_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


def test_addresses_of_the_internet_are_public():
    assert all(is_public(ipaddress.ip_address(a)) for a in ("1.1.1.1", "93.184.216.34", "2606:4700::1111"))


@pytest.fixture
def site():
    """A web site on loopback; its paths are what a fetch may meet."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            site.paths.append(self.path)
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path[4:])
                self.end_headers()
            elif self.path == "/missing":
                self.send_error(404)
            else:
                self.send_response(200)
                self.end_headers()
                for _ in range({"/clip": 1, "/large": 50, "/slow": 100}[self.path]):
                    self.wfile.write(CLIP if self.path != "/slow" else b"x")
                    if self.path == "/slow":
                        time.sleep(0.05)

        def log_message(self, *_):
            pass

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, *_):
            pass  # the client closed the connection: what these tests want

    server = Quiet(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = server
    site.paths = []
    site.url = f"http://127.0.0.1:{server.server_port}"
    yield site
    server.shutdown()
    server.server_close()


def allowed(address):
    return str(address) == "127.0.0.1"


LIMITS = FetchLimits(max_bytes=200_000, timeout_seconds=1.0)


def test_fetch_brings_the_body_and_follows_redirects(site):
    assert fetch(f"{site.url}/clip", LIMITS, allowed) == CLIP
    assert fetch(f"{site.url}/to//clip", LIMITS, allowed) == CLIP


@pytest.mark.parametrize("path", ["/missing", "/large", "/slow", "/to/http://127.0.0.2:1/clip", "/to/file:///etc/passwd",
                                  "/to//to//to//to//to//clip"])  # fmt: skip
def test_fetch_refuses_what_is_missing_large_slow_or_leads_elsewhere(site, path):
    start = time.monotonic()
    with pytest.raises(ApiError) as refused:
        fetch(site.url + path, LIMITS, allowed)
    assert refused.value.status == 400 and time.monotonic() - start < 3


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/clip", "http://localhost:{port}/clip",
                                 "http://[::ffff:127.0.0.1]:{port}/",
                                 "http://2130706433:{port}/clip", "http://0x7f.1:{port}/clip",
                                 "http://a:b@127.0.0.1:{port}/clip",
                                 "ftp://127.0.0.1/", "http:///clip", "http://127.0.0.1:99999/",
                                 "http://x y/"])  # fmt: skip
def test_fetch_never_connects_to_a_private_address(site, url):
    with pytest.raises(ApiError):
        fetch(url.format(port=site.server_port), LIMITS)
    assert not site.paths


def test_a_name_is_resolved_once_and_the_checked_address_is_used(site, monkeypatch):
    answers = iter([[(0, 0, 0, "", ("127.0.0.1", 0))]])
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: next(answers) if host == "rebind.test" else real(host, *_, **__)
    )
    assert fetch(f"http://rebind.test:{site.server_port}/clip", LIMITS, allowed) == CLIP


real = socket.getaddrinfo


def test_one_private_address_among_several_refuses_the_name(site, monkeypatch):
    found = [(0, 0, 0, "", ("127.0.0.1", 0)), (0, 0, 0, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ApiError, match="public"):
        fetch(f"http://mixed.test:{site.server_port}/clip", LIMITS, allowed)


def test_urls_and_files_are_off_by_default(served, site, tmp_path):
    (tmp_path / "clip.wav").write_bytes(CLIP)
    for locator in (
        f"{site.url}/clip",
        f"file://{tmp_path}/clip.wav",
        "file:///etc/passwd",
        str(tmp_path / "clip.wav"),
    ):
        assert served.post(ref_audio=locator).status_code == 400
    assert not site.paths


def test_files_are_read_below_the_allowed_directory_only(tmp_path):
    import os

    root = tmp_path / "media"
    root.mkdir()
    (root / "my clip.wav").write_bytes(CLIP)
    (tmp_path / "secret.wav").write_bytes(CLIP)
    (root / "link.wav").symlink_to(tmp_path / "secret.wav")
    os.mkfifo(root / "fifo")
    assert read_local(f"file://{root}/my%20clip.wav", root, 10**6) == CLIP
    messages = set()
    for path in (f"{root}/../secret.wav", f"{root}/link.wav", f"{root}/%2e%2e/secret.wav", f"{root}/fifo", f"{root}",
                 f"{root}/none", f"{tmp_path}/media-2", "/etc/passwd", f"{root}/a%00b"):  # fmt: skip
        with pytest.raises(ApiError) as refused:
            read_local(f"file://{path}", root, 10**6)
        messages.add(str(refused.value))
    with pytest.raises(ApiError):
        read_local(f"file://evil.test{root}/my%20clip.wav", root, 10**6)
    assert len(messages) == 1  # missing and forbidden look the same
    with pytest.raises(ApiError, match="larger"):
        read_local(f"file://{root}/my%20clip.wav", root, 100)


@pytest.mark.parametrize("url", ["data:audio/wav,abc", "data:;base64", "data:audio/wav;base64,a$b=",
                                 "data:audio/wav;base64,abc",
                                 "data:audio/wav;base64," + "A" * 2000])  # fmt: skip
def test_data_urls_are_strict_and_bounded(url):
    with pytest.raises(ApiError):
        decode_data_url(url, 1000)


@pytest.mark.parametrize(("kind", "subtype"), [("WAV", "FLOAT"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("MP3", None)])
def test_clips_of_every_format_are_read(codec, kind, subtype):
    sound, rate = soundfile.read(io.BytesIO(CLIP))
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, rate, format=kind, subtype=subtype)
    assert decode_clip(buffer.getvalue(), codec, 30).seconds == pytest.approx(1.2, abs=0.1)


@pytest.mark.parametrize("container", ["mp4", "webm", "adts"])
def test_clips_that_libsndfile_cannot_read_go_through_pyav(codec, container):
    import av

    buffer = io.BytesIO()
    pcm, rate = soundfile.read(io.BytesIO(CLIP), dtype="int16")
    with av.open(buffer, "w", format=container) as out:
        stream = out.add_stream("libopus" if container == "webm" else "aac", rate=48_000)
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format, stream.layout, 48_000, stream.codec_context.frame_size or 960)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    assert decode_clip(buffer.getvalue(), codec, 30).seconds == pytest.approx(1.2, abs=0.15)


def test_long_short_and_oversampled_clips_are_refused(codec):
    with pytest.raises(ApiError, match="too long"):
        decode_clip(wav_clip(3.0), codec, 2)
    with pytest.raises(ApiError, match="too short"):
        decode_clip(wav_clip(0.5), codec, 30)
    bomb = io.BytesIO()
    soundfile.write(bomb, np.zeros((1000, 8)), 384_000, format="FLAC")
    with pytest.raises(ApiError, match="192 kHz"):
        decode_clip(bomb.getvalue(), codec, 30)


@FUZZ
@given(st.data())
def test_the_decoder_survives_damaged_clips(codec, data):
    clip = bytearray(CLIP[: data.draw(st.integers(0, 4000))] if data.draw(st.booleans()) else CLIP)
    for _ in range(data.draw(st.integers(0, 8))):
        if clip:
            clip[data.draw(st.integers(0, min(len(clip), 64) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode_clip(bytes(clip), codec, 30), Clip)
    except ApiError as error:
        assert error.status == 400 and "/tmp" not in str(error)


@FUZZ
@given(
    st.sampled_from([b"RIFF", b"fLaC", b"OggS", b"\x1aE\xdf\xa3", b"\0\0\0 ftypM4A ", b"\xff\xf1", b"ID3"]),
    st.binary(max_size=300),
)
def test_the_decoder_survives_garbage_behind_every_magic(codec, magic, garbage):
    with pytest.raises(ApiError):
        decode_clip(magic + garbage, codec, 30)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(FUZZ, max_examples=300)
@given(st.dictionaries(st.sampled_from(list(SpeechRequest.model_fields)), JSON), JSON)
def test_the_parser_takes_any_json_and_quotes_none_of_it(fields, text):
    secret = "MARKER-7f3a"
    body = json.dumps({"input": text, **fields, "response_format": secret}).encode()
    with pytest.raises(ApiError) as refused:
        parse_request(body, SpeechRequest)
    assert refused.value.status == 400 and secret not in str(refused.value)


@FUZZ
@given(st.binary(max_size=200))
def test_the_parser_takes_any_bytes(body):
    with pytest.raises(ApiError):
        parse_request(body, SpeechRequest)


def test_keys_are_compared_whole():
    assert key_matches("second", ("first", "second"))
    assert not any(key_matches(given, ("first", "second")) for given in ("", "secon", "seconds", "FIRST", "\udcff"))


@pytest.fixture(scope="module")
def guarded(tiny_artifacts, tmp_path_factory):
    def ready(pipe):
        pipe.send(Ready("fake", 1, 640))
        while pipe.recv() is not None:
            pass

    with serving(tiny_artifacts, tmp_path_factory.mktemp("voices"), start_worker=scripted(ready), api_keys=("sesame",),
                 max_body_bytes=5000, max_buffered_bytes=6000, body_timeout_seconds=0.5) as running:  # fmt: skip
        yield running


def test_v1_needs_a_key_and_operations_do_not(guarded):
    with guarded.client() as client:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "sesame"}, {"Authorization": "Bearer"}):
            refused = client.post("/v1/audio/speech", json={"input": "x"}, headers=headers)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["type"] == "AuthenticationError"
        assert client.get("/v1/models").status_code == 401
        for path in ("/health", "/ready", "/metrics", "/"):
            assert client.get(path).status_code == 200
        assert client.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_large_and_slow_bodies_are_refused(guarded):
    key = {"Authorization": "Bearer sesame"}
    with guarded.client(headers=key) as client:
        assert client.post("/v1/audio/speech", content=b"x" * 6000).status_code == 413
        chunked = client.post("/v1/audio/speech", content=(b"x" * 1000 for _ in range(6)))
        assert chunked.status_code == 413
    host, port = guarded.url.removeprefix("http://").split(":")

    def send(length, body):
        sock = socket.create_connection((host, int(port)))
        head = "POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n"
        head += f"Content-Length: {length}\r\n\r\n"
        sock.sendall(head.encode() + body)
        return sock

    with send(4000, b"x" * 3500) as slow, send(4000, b"x" * 3500) as one_too_many:
        answers = {sock.recv(12) for sock in (slow, one_too_many)}
    assert answers == {b"HTTP/1.1 408", b"HTTP/1.1 429"}


def test_nothing_of_a_request_is_logged(served, caplog):
    marker = "Xylophone"
    with caplog.at_level(logging.DEBUG):
        served.post(input=f"{marker} music.")
        served.post(input=f"{marker}", voice=marker, ref_audio=f"file:///{marker}")
        served.post(input=f"{marker}", ref_audio=data_url(marker.encode()))
        wait_for(lambda: "audio=" in caplog.text)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith(("runtime", "uvicorn", "asyncio"))]
    assert ours and not any(marker in line for line in ours)
