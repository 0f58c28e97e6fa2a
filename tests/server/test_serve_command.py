"""run-om serve as a process of its own, run-om load-test against it, and the page in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from click.testing import CliRunner

from runtime.cli import cli
from tests.server.loopback import TEXT, data_url, wait_for, wav_clip

LONG = " ".join(f"This is sentence number {i}, and it says something." for i in range(40))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def process(tiny_artifacts, tmp_path):
    port = free_port()
    command = [
        sys.executable,
        "-c",
        "from runtime.cli import cli; cli()",
        "serve",
        str(tiny_artifacts),
        "--threads",
        "1",
    ]
    command += ["--port", str(port), "--voices", str(tmp_path / "voices"), "--batch", "2"]
    environment = {**os.environ, "MOSS_TTS_DRAIN_SECONDS": "20"}
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    started.url = f"http://127.0.0.1:{port}"
    started.log = tmp_path / "log"
    yield started
    started.kill()
    started.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_lets_a_running_stream_finish_and_ends_everything(process):
    wait_for(lambda: is_ready(process.url), 60)
    body = {"input": LONG, "ref_audio": data_url(wav_clip()), "stream_format": "audio", "response_format": "pcm"}
    with httpx.Client(timeout=60, trust_env=False) as client:
        whole = client.post(f"{process.url}/v1/audio/speech", json=body).content
        with client.stream("POST", f"{process.url}/v1/audio/speech", json=body) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            process.send_signal(signal.SIGTERM)
            received += b"".join(pieces)
    assert received == whole
    assert process.wait(20) in (0, -signal.SIGTERM)
    worker = int(process.log.read_text().split("worker ")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_impossible_settings_are_one_line(tiny_artifacts, monkeypatch):
    monkeypatch.setenv("MOSS_TTS_MAX_ROWS", "3")
    result = CliRunner().invoke(cli, ["serve", str(tiny_artifacts)])
    assert result.exit_code == 1 and "max_rows" in result.output and "Traceback" not in result.output


def test_load_test_counts_what_clients_heard(served, tmp_path):
    (tmp_path / "clip.wav").write_bytes(served.clip)
    arguments = [
        "load-test",
        served.url,
        "--concurrency",
        "3",
        "--duration",
        "1.5",
        "--clip",
        str(tmp_path / "clip.wav"),
    ]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert figures["requests"] >= 3 and not figures["errors"] and figures["audio_seconds_per_second"] > 0
    assert 0 < figures["ttfa"]["p50"] <= figures["latency"]["p50"] <= figures["latency"]["p99"]


def test_load_test_fails_when_nobody_answers_and_when_it_is_unbounded():
    url = f"http://127.0.0.1:{free_port()}"
    lost = CliRunner().invoke(cli, ["load-test", url, "--concurrency", "1", "--duration", "0.3", "--json"])
    assert lost.exit_code == 1 and set(json.loads(lost.output)["errors"]) == {"ConnectionRefusedError"}
    many = CliRunner().invoke(cli, ["load-test", url, "--concurrency", "1000"])
    assert many.exit_code == 1 and "256" in many.output


def test_the_page_is_self_contained(served):
    with served.client() as client:
        answer = client.get("/")
    assert (
        answer.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in answer.headers["content-security-policy"]
    )
    assert "http://" not in answer.text and "https://" not in answer.text and "made-up weights" in answer.text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")
def test_a_person_can_type_a_text_and_hear_it(served, tmp_path):
    """Loads the page, presses Speak, and waits for Done; an upload is a stored voice here."""
    with served.client() as client:
        form = {"name": "page", "consent": "yes"}
        client.post("/v1/audio/voices", data=form, files={"audio_sample": ("a.wav", served.clip, "audio/wav")})
    page = httpx.get(served.url, trust_env=False).text
    press = (
        "<script>const wait = setInterval(() => { if ($('voice').length > 1) { clearInterval(wait);"
        f"$('voice').value = 'page'; $('text').value = {json.dumps(TEXT)}; $('speak').click(); }} }}, 50);</script>"
    )
    proxy = PageProxy(served.url, page.replace("</body>", press + "</body>"))
    try:
        dom = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--mute-audio",
             "--autoplay-policy=no-user-gesture-required", f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000",
             "--timeout=20000", "--dump-dom", proxy.url],
            capture_output=True, text=True, timeout=90, check=False,
        ).stdout  # fmt: skip
    finally:
        proxy.close()
        with served.client() as client:
            client.delete("/v1/audio/voices/page")
    assert 'role="status">Done.' in dom, dom[-3000:]
    assert " ms</td>" in dom and " s</td>" in dom and 'id="rtf">–' not in dom


class PageProxy:
    """The server with another page at `/`: the only way to press a button without a browser driver."""

    def __init__(self, target: str, page: str) -> None:
        import http.server

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(page.encode() if self.path == "/" else None)

            def do_POST(self):
                self.answer(None)

            def answer(self, own):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = httpx.request(self.command, target + self.path, content=body, trust_env=False, timeout=60)
                self.send_response(200 if own else reply.status_code)
                self.send_header("Content-Type", "text/html; charset=utf-8" if own else reply.headers["content-type"])
                self.end_headers()
                self.wfile.write(own or reply.content)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
