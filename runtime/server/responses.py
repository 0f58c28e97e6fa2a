"""Answers whose sound leaves as it is made, and the watch for clients that leave.

The status line waits for the first piece of audio: a failure before it is a JSON error. One after it breaks the
connection, or is the last event of an SSE stream; it never looks like a clean end.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.errors import MossError
from runtime.server.errors import as_api_error, error_body

Result = TypeVar("Result")


class ClientLeftError(MossError):
    """Nobody waits for the answer any more."""


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; ClientLeftError, and the work is cancelled, when the connection ends first."""
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError("the client left")
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamedResponse(Response):
    """Sends pieces as they come; `on_end` runs once, whatever happens, and hears how it ended."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        media_type: str,
        headers: Mapping[str, str],
        on_end: Callable[[str], None],
    ) -> None:
        no_buffering = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, {**headers, **no_buffering}, media_type)
        del self.headers["content-length"]
        self._pieces, self._on_end = pieces, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "cancelled"
        try:
            await unless_client_leaves(receive, self._send(send))
            outcome = "200"
        except ClientLeftError:
            pass
        except MossError:
            # Returning without the last chunk makes the server close the connection: the client sees a broken body.
            outcome = "broken"
        finally:
            self._on_end(outcome)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def sse_event(kind: str, data: Mapping[str, Any]) -> bytes:
    """One event as OpenAI's clients read it."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def sse_delta(audio: bytes, response_format: str) -> bytes:
    encoded = base64.b64encode(audio).decode()
    return sse_event("speech.audio.delta", {"audio": encoded, "response_format": response_format})


def sse_error(error: MossError) -> bytes:
    """The last event of a stream that failed; what came before is not the whole text."""
    refused = as_api_error(error)
    body = error_body(refused.status, str(refused))["error"]
    return sse_event(
        "speech.audio.error", {"error": {**body, "type": "server_error", "partial_audio": True, "action": "discard"}}
    )
