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


OPEN_PATHS = frozenset(("/", "/health", "/ready", "/metrics"))


class ApiKeys:
    """Guards everything with bearer keys but health, metrics and the page: a path that is not known is not open."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._guards(scope) and not self._allowed(scope):
            refused = ApiError(401, "a valid API key is needed", headers={"WWW-Authenticate": "Bearer"})
            await error_response(refused)(scope, receive, send)
            return
        if scope["type"] == "http" and not self._keys and _from_another_site(scope):
            refused = ApiError(403, "a web page of another site may not use a server without API keys")
            await error_response(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _guards(self, scope: Scope) -> bool:
        return bool(self._keys) and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS"

    def _allowed(self, scope: Scope) -> bool:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) != 1:
            return False
        scheme, _, key = headers[0].decode("utf-8", "surrogateescape").partition(" ")
        return scheme.lower() == "bearer" and key_matches(key.strip(), self._keys)


def _from_another_site(scope: Scope) -> bool:
    """Whether a browser says that another site's page wants something done; with keys, a page would need one."""
    unsafe = scope["method"] not in ("GET", "HEAD", "OPTIONS")
    return unsafe and any(name == b"sec-fetch-site" and value == b"cross-site" for name, value in scope["headers"])


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
            self._check(self._announced(scope), 0)
            whole = await asyncio.wait_for(self._read(body, receive), self._settings.body_timeout_seconds)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except asyncio.TimeoutError:  # not yet TimeoutError in Python 3.10
            late = ApiError(408, f"the body took longer than {self._settings.body_timeout_seconds:g} s")
            await error_response(late)(scope, receive, send)
        else:
            if whole:
                await self._app(scope, _replayed(bytes(body), receive), send)
        finally:
            self._buffered -= len(body)

    async def _read(self, body: bytearray, receive: Receive) -> bool:
        """Fill `body`; False when the client left before its end."""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            piece = message.get("body", b"")
            self._check(len(body) + len(piece), len(piece))
            self._buffered += len(piece)
            body += piece
            more = message.get("more_body", False)
        return True

    def _announced(self, scope: Scope) -> int:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        return int(length[:18]) if length.isdigit() else 0  # 18 digits are too many bytes, and never too many for int

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
