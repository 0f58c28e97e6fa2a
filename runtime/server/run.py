"""Start the server: settings, manifest, pool, application, uvicorn."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from pydantic_settings import SettingsError

from runtime.backends.select import BackendOptions
from runtime.errors import MossError
from runtime.manifest import Manifest
from runtime.server.app import create_app
from runtime.server.pool import Pool, PoolLimits, process_starter
from runtime.server.settings import ServerSettings
from runtime.server.sfx_speaker import SoundSpeaker
from runtime.server.sfx_worker import SoundWorkerSpec, run_sound_worker
from runtime.server.worker import WorkerSpec, run_worker

KEEP_ALIVE_SECONDS = 5
MAX_CONNECTIONS = 1024
# Uvicorn would take others where a package happens to bring them, as Ray does: one server, tested as it runs.
PROTOCOLS: dict[str, Any] = {"loop": "asyncio", "http": "h11", "ws": "none"}


def read_settings(given: Mapping[str, Any]) -> ServerSettings:
    """Settings from the command line over those of the environment; MossError names what is impossible."""
    try:
        return ServerSettings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise MossError(f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except SettingsError as error:  # it names the field and never the value
        raise MossError(f"{error}: lists in the environment are JSON, such as '[\"one\"]'") from error


def build_app(artifacts: Path, backend: BackendOptions, settings: ServerSettings) -> FastAPI:
    """The application for the speech model, and for MOSS-SoundEffect when the settings name it."""
    manifest = Manifest.load(artifacts)
    spec = WorkerSpec(artifacts, backend, settings.slots, settings.max_rows)
    limits = PoolLimits(settings.slots, settings.max_queue, settings.deadline_seconds, settings.step_timeout_seconds)
    return create_app(settings, manifest, Pool(process_starter(run_worker, spec), limits), open_sounds(settings))


def open_sounds(settings: ServerSettings) -> tuple[SoundSpeaker, Pool] | None:
    """MOSS-SoundEffect with a worker and a queue of its own; None when no checkpoint is named."""
    if settings.sfx_checkpoint is None and settings.sfx_codec is None:
        return None
    if settings.sfx_checkpoint is None or settings.sfx_codec is None:
        raise MossError("MOSS-SoundEffect needs --sfx-checkpoint and --sfx-codec, got one of them; give both or none")
    if shared := set(settings.sfx_model_names) & set(settings.model_names):
        raise MossError(f"the name {min(shared)!r} stands for both models; choose others with --model-name")
    spec = SoundWorkerSpec(
        settings.sfx_checkpoint, settings.sfx_codec, settings.sfx_device, settings.sfx_dtype, settings.sfx_codec_device
    )
    limits = PoolLimits(1, settings.max_queue, settings.deadline_seconds, settings.step_timeout_seconds)
    pool = Pool(process_starter(run_sound_worker, spec), limits)
    return SoundSpeaker(settings, spec.checkpoint, spec.codec, pool), pool


def run_server(artifacts: Path, backend: BackendOptions, host: str, port: int, given: Mapping[str, Any]) -> None:
    """Serve until SIGTERM or SIGINT; then finish what runs, for at most drain_seconds."""
    settings = read_settings(given)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = build_app(artifacts, backend, settings)
    uvicorn.run(
        app, host=host, port=port, log_level="info", access_log=False, server_header=False,  # access lines hold paths
        timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=settings.drain_seconds,
        limit_concurrency=MAX_CONNECTIONS, **PROTOCOLS,
    )  # fmt: skip
