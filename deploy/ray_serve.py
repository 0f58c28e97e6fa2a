"""The speech server as replicas under Ray Serve: each has one NPU, or a share of the CPUs, and a worker of its own.

serve run deploy.ray_serve:app artifacts=artifacts/demo backend=om max_replicas=8      # from a clone, on a Ray cluster

Arguments are the fields of `Arguments`; settings of the server come from MOSS_TTS_… as for run-om serve. Artifacts and
voices are read by every replica: give directories that every node sees under the same path.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field, model_validator
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.backends.select import BackendOptions
from runtime.server.pool import State
from runtime.server.run import build_app, read_settings
from runtime.server.settings import ServerSettings

WORKER_GRACE_SECONDS = 5
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Arguments(BaseModel):
    """What `serve run` takes as name=value, and a config file as `args`."""

    artifacts: Path
    backend: str = "ort"
    cpus: float = Field(1, gt=0)  # of each replica; whole ones are also the threads of a CPU backend
    npus: int | None = Field(None, ge=0, le=1)  # of each replica; None: 1 for om
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    max_waiting: int = Field(64, ge=0)  # requests before all replicas together; one more gets Ray's 503
    settings: dict[str, Any] = {}  # fields of ServerSettings, over those of the environment

    @model_validator(mode="after")
    def _bounds(self) -> Arguments:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"expected max_replicas >= min_replicas, got {self.max_replicas} and {self.min_replicas}")
        return self


@serve.ingress()
class Speech:
    """One replica. Ray has set ASCEND_RT_VISIBLE_DEVICES to its NPU, so that NPU is device 0 here."""

    def __init__(self, artifacts: Path, backend: BackendOptions, settings: ServerSettings) -> None:
        self._app = build_app(artifacts, backend, settings)
        self._app.add_middleware(RayNames, replica=serve.get_replica_context().replica_id.unique_id)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Ray sends requests after the first success; an error ends the replica, and Ray starts another."""
        pools = self._app.state.pools
        while any(pool.state is State.STARTING for pool in pools):
            await asyncio.sleep(0.1)
        if failed := [pool.message for pool in pools if pool.state is State.FAILED]:
            raise RuntimeError(failed[0])


class RayNames:
    """Says in `x-replica` who answered; the log has the request under the id that Ray's proxy gives the client."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app, self._header = app, (b"x-replica", replica.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"x-request-id", b"").decode("latin-1")
        if scope["type"] == "http":  # a client may choose the id, so not every one goes into the log
            scope.setdefault("state", {})["request_id"] = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], self._header]
            await send(message)

        await self._app(scope, receive, send_named)


def backend_options(arguments: Arguments) -> BackendOptions:
    """The backend of one replica."""
    device = {"om": "0", "torch": "npu:0"}.get(arguments.backend) if _npus(arguments) else None
    return BackendOptions(arguments.backend, device=device, threads=max(1, int(arguments.cpus)))


def deployment_options(arguments: Arguments, settings: ServerSettings) -> dict[str, Any]:
    """What Ray gives each replica, how many there are, and how many requests they get."""
    npus = _npus(arguments)
    return {
        "ray_actor_options": {"num_cpus": arguments.cpus, "resources": {"NPU": npus} if npus else {}},
        # No more than it can speak: what waits, waits before all replicas, and outlives each.
        "max_ongoing_requests": settings.slots,
        "max_queued_requests": arguments.max_waiting,
        "autoscaling_config": {
            "min_replicas": arguments.min_replicas,
            "max_replicas": arguments.max_replicas,
            "target_ongoing_requests": settings.slots,
        },
        "graceful_shutdown_timeout_s": settings.drain_seconds + WORKER_GRACE_SECONDS,
    }


def app(arguments: Arguments) -> Application:
    """The application for `serve run` and `serve deploy`."""
    settings = read_settings(arguments.settings)
    deployment = serve.deployment(name="speech", **deployment_options(arguments, settings))(Speech)
    return deployment.bind(arguments.artifacts.resolve(), backend_options(arguments), settings)


def _npus(arguments: Arguments) -> int:
    return int(arguments.backend == "om") if arguments.npus is None else arguments.npus
