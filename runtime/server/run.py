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
from runtime.server.worker import WorkerSpec

KEEP_ALIVE_SECONDS = 5
MAX_CONNECTIONS = 1024


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
    """The application for one model."""
    manifest = Manifest.load(artifacts)
    spec = WorkerSpec(artifacts, backend, settings.slots, settings.max_rows)
    limits = PoolLimits(settings.slots, settings.max_queue, settings.deadline_seconds, settings.step_timeout_seconds)
    return create_app(settings, manifest, Pool(process_starter(spec), limits))


def run_server(artifacts: Path, backend: BackendOptions, host: str, port: int, given: Mapping[str, Any]) -> None:
    """Serve until SIGTERM or SIGINT; then finish what runs, for at most drain_seconds."""
    settings = read_settings(given)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = build_app(artifacts, backend, settings)
    uvicorn.run(
        app, host=host, port=port, log_level="info", access_log=False, server_header=False,  # access lines hold paths
        timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=settings.drain_seconds,
        limit_concurrency=MAX_CONNECTIONS,
    )  # fmt: skip
