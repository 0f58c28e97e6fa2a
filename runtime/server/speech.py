"""POST /v1/audio/speech: check, make a job of it, queue, and answer as a file, as raw bytes or as events.

The order of the checks is SERVING.md section 2: schema, model, voice, input, form of ref_audio; then a place; then what
costs something.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import MossError
from runtime.server.encoders import Encoder, encode_file, media_type, stream_encoder
from runtime.server.errors import ApiError, as_api_error
from runtime.server.jobs import Work
from runtime.server.metrics import Listener, Metrics
from runtime.server.pool import Place, Pool, Ticket
from runtime.server.prompts import Usage
from runtime.server.responses import (
    ClientLeftError,
    StreamedResponse,
    sse_delta,
    sse_error,
    sse_event,
    unless_client_leaves,
)
from runtime.server.schema import SpeechRequest
from runtime.server.settings import ServerSettings
from runtime.server.stretch import change_speed

LOG = logging.getLogger(__name__)
BYTES_PER_SAMPLE = 2


@dataclass(slots=True)
class _Speaking:
    """A request whose first audio is there."""

    asked: SpeechRequest
    ticket: Ticket
    usage: Usage
    first: bytes
    rest: AsyncIterator[bytes]
    listener: Listener


class Speaker(Protocol):
    """What one model makes of a request."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """What `model` may say; the first one labels its metrics."""
        ...

    def parse(self, body: bytes) -> SpeechRequest:
        """The request by the model's schema; ApiError 400 for another one."""
        ...

    def check(self, asked: SpeechRequest) -> None:
        """Refuse what can be refused without work."""
        ...

    async def job(self, asked: SpeechRequest, request_id: str) -> tuple[Work, Usage]:
        """The job of a request that holds a place, and what it counts as."""
        ...


class SpeechService:
    """Answers the requests for one model."""

    def __init__(
        self, settings: ServerSettings, pool: Pool, speaker: Speaker, metrics: Metrics, sample_rate_hz: int
    ) -> None:
        self.model, self.pool = speaker.model_names[0], pool
        self._settings, self._speaker, self._metrics = settings, speaker, metrics
        self._rate_hz = sample_rate_hz

    async def speak(self, request: Request, request_id: str) -> Response:
        """Answer one request; MossError for what is refused or fails before the first audio."""
        asked = self._speaker.parse(await request.body())
        self._check(asked)
        with ExitStack() as stack:
            place = stack.enter_context(self.pool.place())
            work = self._begin(asked, place, request_id)
            try:
                speaking = await unless_client_leaves(request.receive, work)
                if asked.delivery == "file":
                    return await unless_client_leaves(request.receive, self._file(speaking))
            except ClientLeftError:
                self._metrics.answered(self.model, "cancelled")
                return Response(status_code=499)  # nobody reads it
            return self._streamed(speaking, stack.pop_all())

    def _check(self, asked: SpeechRequest) -> None:
        """What can be refused without work."""
        if asked.model is not None and asked.model not in self._speaker.model_names:
            raise ApiError(404, "The model does not exist; see GET /v1/models.", "model")
        self._speaker.check(asked)
        if asked.sample_rate not in (None, self._rate_hz):
            raise ApiError(
                400, f"sample_rate is not supported by the current TTS model; it speaks at {self._rate_hz} Hz",
                "sample_rate",
            )  # fmt: skip
        if asked.delivery != "file" and asked.speed not in (None, 1.0):
            raise ApiError(400, "speed changes the whole clip: streaming needs speed 1.0", "speed")
        if asked.word_timestamps:
            raise ApiError(400, "word_timestamps: this server has no forced aligner", "word_timestamps")

    async def _begin(self, asked: SpeechRequest, place: Place, request_id: str) -> _Speaking:
        """From the job to the first piece of audio."""
        job, usage = await self._speaker.job(asked, request_id)
        ticket = place.submit(job)
        rest, listener = ticket.pieces(), Listener()
        try:
            first = await anext(rest)
        except StopAsyncIteration as error:
            raise ApiError(500, "the model gave no audio", headers={"x-should-retry": "false"}) from error
        self._hear(listener, first)
        return _Speaking(asked, ticket, usage, first, rest, listener)

    async def _file(self, speaking: _Speaking) -> Response:
        """The whole sound at once."""
        asked, pcm = speaking.asked, bytearray(speaking.first)
        async for piece in speaking.rest:
            self._hear(speaking.listener, piece)
            pcm += piece
        body = await asyncio.to_thread(self._encoded, asked, bytes(pcm))
        self._done(speaking, "200")
        headers = replace(speaking.usage, output_tokens=speaking.ticket.num_frames).headers()
        return Response(body, 200, headers, media_type(asked.response_format, self._rate_hz))

    def _encoded(self, asked: SpeechRequest, pcm: bytes) -> bytes:
        return encode_file(asked.response_format, change_speed(pcm, asked.speed or 1.0), self._rate_hz)

    def _streamed(self, speaking: _Speaking, place: ExitStack) -> Response:
        encoder = stream_encoder(speaking.asked.response_format, self._rate_hz)
        sse = speaking.asked.delivery == "sse"
        pieces = self._events(speaking, encoder) if sse else self._bytes(speaking, encoder)

        def end(outcome: str) -> None:
            place.close()
            self._done(speaking, outcome)

        kind = "text/event-stream" if sse else media_type(speaking.asked.response_format, self._rate_hz)
        return StreamedResponse(pieces, kind, {}, end)

    async def _bytes(self, speaking: _Speaking, encoder: Encoder) -> AsyncIterator[bytes]:
        """Encoded audio as it comes."""
        if encoded := encoder.push(speaking.first):
            yield encoded
        async for piece in speaking.rest:
            self._hear(speaking.listener, piece)
            if encoded := encoder.push(piece):
                yield encoded
        if encoded := encoder.finish():
            yield encoded

    async def _events(self, speaking: _Speaking, encoder: Encoder) -> AsyncIterator[bytes]:
        """The same bytes as events; a failure is an event too."""
        response_format = speaking.asked.response_format
        if header := encoder.push(b""):
            yield sse_delta(header, response_format)
        try:
            async for encoded in self._bytes(speaking, encoder):
                yield sse_delta(encoded, response_format)
        except MossError as error:
            self._metrics.answered(self.model, "broken")
            yield sse_error(error)
            return
        usage = replace(speaking.usage, output_tokens=speaking.ticket.num_frames)
        yield sse_event("speech.audio.done", {"usage": usage.to_dict()})

    def _hear(self, listener: Listener, pcm: bytes) -> None:
        listener.hear(len(pcm) / BYTES_PER_SAMPLE / self._rate_hz)

    def _done(self, speaking: _Speaking, outcome: str) -> None:
        """One line per request: ids, lengths and times; the words only when the operator asked for them."""
        self._metrics.answered(self.model, outcome)
        self._metrics.spoken(self.model, speaking.ticket, speaking.listener)
        ticket, listener = speaking.ticket, speaking.listener
        waited = (ticket.started or ticket.submitted) - ticket.submitted
        first = (listener.first or ticket.submitted) - ticket.submitted
        words = f" text={speaking.asked.words!r}" if self._settings.log_text else ""
        LOG.info(
            "%s characters=%d reference_frames=%d format=%s delivery=%s queue=%.3fs ttfa=%.3fs audio=%.2fs %s%s",
            ticket.job.id, len(speaking.asked.words), speaking.usage.audio_tokens, speaking.asked.response_format,
            speaking.asked.delivery, waited, first, listener.audio_seconds, outcome, words,
        )  # fmt: skip


def retry_after(pool: Pool) -> int:
    """Seconds until a place is likely free: one second per request ahead in each slot, at most half a minute."""
    return min(30, max(1, math.ceil((1 + pool.num_waiting) / pool.limits.slots)))


def refusal(error: MossError, pool: Pool) -> ApiError:
    """What a client is told; 429 and 503 say when to come back."""
    return as_api_error(error, retry_after(pool))
