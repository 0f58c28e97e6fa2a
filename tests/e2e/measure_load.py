"""Load on `run-om serve`: runs with 1, 4 and 16 clients against one server, and what they cost in memory.

    .venv/bin/python tests/e2e/measure_load.py artifacts/made_up --seconds 120

Prints the table of docs/serving.md. Exit code 1 when a request was lost. Run it on a machine that does nothing else:
the clients take CPU time from the same cores.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import httpx

from runtime.server.load_test import LoadPlan, run_load

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "voice_en.flac"
HEAD = (
    "clients", "requests", "refused", "lost", "audio s per s", "first audio p50 / p95", "latency p50 / p95",
    "RTF p50 / p95", "CPU s per audio s: server, worker", "queue wait mean", "underrun p95",
    "server MB before, after", "worker MB before, after",
)  # fmt: skip
READY_SECONDS = 300


def resident_mb(pid: int) -> int:
    """Memory that a process holds, without the pages of files that it maps."""
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.split("RssAnon:")[1].split()[0]) / 1024)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads so far: what a busy machine distorts least."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def worker_of(server: int) -> int:
    """The worker's process id: the child that speaks, not multiprocessing's resource tracker."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return next(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise click.ClickException(f"the server at {url} did not become ready within {READY_SECONDS} s; its log is above")


def store_voice(url: str, clip: Path) -> None:
    form, files = {"name": "load", "consent": "yes"}, {"audio_sample": (clip.name, clip.read_bytes(), "audio/flac")}
    stored = httpx.post(f"{url}/v1/audio/voices", data=form, files=files, trust_env=False, timeout=120)
    stored.raise_for_status()


def queue_wait(url: str) -> tuple[float, float]:
    """Seconds waited, and by how many, since the server started."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    total, count = (
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"moss_tts_queue_wait_seconds_{part}{{"))
        for part in ("sum", "count")
    )
    return total, count


def run(url: str, server: int, clients: int, seconds: float) -> tuple[str, bool]:
    """One row of the table, and whether every request was answered."""
    processes = (server, worker_of(server))
    before, cpu = [resident_mb(pid) for pid in processes], [cpu_seconds(pid) for pid in processes]
    waited = queue_wait(url)
    figures: dict[str, Any] = run_load(LoadPlan(url, clients, seconds, voice="load"))
    after, waited_after = [resident_mb(pid) for pid in processes], queue_wait(url)
    finished = max(1.0, waited_after[1] - waited[1])
    audio = max(1e-9, figures["audio_seconds_per_second"] * figures["seconds"])
    cost = [f"{(cpu_seconds(pid) - used) / audio:.3g}" for pid, used in zip(processes, cpu, strict=True)]

    def both(name: str, unit: str = " s") -> str:
        values = figures[name] or {"p50": float("nan"), "p95": float("nan")}
        return f"{values['p50']:.3g} / {values['p95']:.3g}{unit}"

    memory = [f"{old}, {new}" for old, new in zip(before, after, strict=True)]
    lost = sum(figures["errors"].values())
    cells = [
        clients, figures["requests"], figures["refused"], lost, figures["audio_seconds_per_second"], both("ttfa"),
        both("latency"), both("rtf", ""), ", ".join(cost), f"{(waited_after[0] - waited[0]) / finished:.3g} s",
        f"{(figures['underrun'] or {'p95': float('nan')})['p95']:.3g} s", *memory,
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |", not lost and bool(figures["requests"])


@click.command()
@click.argument("artifacts", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--seconds", default=120.0, show_default=True, help="Of each run.")
@click.option("--clients", default="1,4,16", show_default=True)
@click.option("--batch", default=4, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--clip", type=click.Path(path_type=Path, dir_okay=False, exists=True), default=EXAMPLE)
def main(artifacts: Path, seconds: float, clients: str, batch: int, threads: int, clip: Path) -> None:
    """Measure run-om serve ARTIFACTS on ONNX Runtime."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    click.echo(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d %H:%M')}")
    with tempfile.TemporaryDirectory() as voices:
        command = [sys.executable, "-c", "from runtime.cli import cli; cli()", "serve", str(artifacts)]
        options = {"--port": port, "--batch": batch, "--threads": threads, "--voices": voices}
        command += [str(part) for option in options.items() for part in option]
        server = subprocess.Popen(command, stdout=sys.stderr)
        try:
            wait_until_ready(url, server)
            store_voice(url, clip)
            run_load(LoadPlan(url, batch, 5.0, voice="load"))  # what the first requests allocate is no leak
            click.echo(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
            complete = True
            for number in clients.split(","):
                row, answered = run(url, server.pid, int(number), seconds)
                click.echo(row)
                complete = complete and answered
        finally:
            server.terminate()
            server.wait(60)
    sys.exit(not complete)


if __name__ == "__main__":
    main()
