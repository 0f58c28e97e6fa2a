"""What a client sees when something is wrong: {"error": {"message", "type", "param", "code"}} with a true status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from runtime.errors import AudioError, CapacityError, MossError, TextError
from runtime.server.pool import DeadlineError, QueueFullError, UnavailableError

_TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 408: "RequestTimeoutError", 413: "RequestTooLargeError", 429: "RateLimitError",
    500: "InternalServerError", 503: "ServiceUnavailableError", 504: "DeadlineExceededError",
}  # fmt: skip


class ApiError(MossError):
    """A request that is refused: status, message, and the field that is to blame."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.headers = status, param, dict(headers or {})


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The envelope of SERVING.md section 7."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(error: ApiError, request_id: str | None = None) -> JSONResponse:
    """An ApiError as a response."""
    headers = {**error.headers, **({"x-request-id": request_id} if request_id else {})}
    return JSONResponse(error_body(error.status, str(error), error.param), error.status, headers)


def as_api_error(error: MossError, retry_after_seconds: int = 1) -> ApiError:
    """What an expected failure means for the client; a failure that time may heal asks it to come back."""
    if isinstance(error, ApiError):
        return error
    later = {"Retry-After": str(retry_after_seconds)}
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), headers=later)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), headers=later)
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), headers={"x-should-retry": "false"})
    if isinstance(error, AudioError | TextError | CapacityError):
        return ApiError(400, str(error), "ref_audio" if isinstance(error, AudioError) else "input")
    return ApiError(500, str(error), headers={"x-should-retry": "false"})  # the same seed fails the same way
