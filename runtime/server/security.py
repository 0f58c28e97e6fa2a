"""Who may ask, and how much: API keys before anything is read, then the body within size and time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.errors import ApiError, error_response
from runtime.server.settings import ServerSettings


def key_matches(given: str, keys: tuple[str, ...]) -> bool:
    """Compare with every key in constant time; the digests make all lengths equal."""
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    matches = False
    for key in keys:  # all of them: no early end that tells which one
        matches |= hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest())
    return matches


class ApiKeys:
    """Guards /v1 with bearer keys; health, metrics and the page stay open."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._guards(scope) and not self._allowed(scope):
            refused = ApiError(401, "a valid API key is needed", headers={"WWW-Authenticate": "Bearer"})
            await error_response(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _guards(self, scope: Scope) -> bool:
        path = str(scope["path"])
        return bool(self._keys) and (path == "/v1" or path.startswith("/v1/")) and scope["method"] != "OPTIONS"

    def _allowed(self, scope: Scope) -> bool:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) != 1:
            return False
        scheme, _, key = headers[0].decode("utf-8", "surrogateescape").partition(" ")
        return scheme.lower() == "bearer" and key_matches(key.strip(), self._keys)


class BodyLimits:
    """Reads each body before the app sees the request: bounded in bytes, in time, and in all bodies together."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_seconds):
                self._check(self._announced(scope), 0)
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    piece = message.get("body", b"")
                    self._check(len(body) + len(piece), len(piece))
                    self._buffered += len(piece)
                    body += piece
                    more = message.get("more_body", False)
            await self._app(scope, _replayed(bytes(body), receive), send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except TimeoutError:
            late = ApiError(408, f"the body took longer than {self._settings.body_timeout_seconds:g} s")
            await error_response(late)(scope, receive, send)
        finally:
            self._buffered -= len(body)

    def _announced(self, scope: Scope) -> int:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        return int(length) if length.isdigit() else 0

    def _check(self, size: int, more: int) -> None:
        if size > self._settings.max_body_bytes:
            raise ApiError(
                413, f"the body is larger than {self._settings.max_body_bytes} bytes", headers={"Connection": "close"}
            )
        if self._buffered + more > self._settings.max_buffered_bytes:
            raise ApiError(429, "too much is being uploaded at once; try again later", headers={"Retry-After": "2"})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever the connection says (that the client left)."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
