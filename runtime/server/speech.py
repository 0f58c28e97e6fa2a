"""POST /v1/audio/speech: check, find the voice, queue, and answer as a file, as raw bytes or as events.

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

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import MossError
from runtime.server.clips import ClipReader
from runtime.server.encoders import Encoder, encode_file, media_type, stream_encoder
from runtime.server.errors import ApiError, as_api_error
from runtime.server.metrics import Listener, Metrics
from runtime.server.pool import Place, Pool, Ticket
from runtime.server.prompts import Prompter, Usage
from runtime.server.responses import (
    ClientLeftError,
    StreamedResponse,
    sse_delta,
    sse_error,
    sse_event,
    unless_client_leaves,
)
from runtime.server.schema import SpeechRequest, parse_request
from runtime.server.server_voices import NO_VOICE, OPENAI_VOICES, CodesCache, ServerVoices
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


class SpeechService:
    """Speaks requests; one per server."""

    def __init__(
        self, settings: ServerSettings, pool: Pool, prompter: Prompter, voices: ServerVoices, clips: ClipReader,
        metrics: Metrics, sample_rate_hz: int,
    ) -> None:  # fmt: skip
        self._settings, self._pool, self._prompter = settings, pool, prompter
        self._voices, self._clips, self._metrics = voices, clips, metrics
        self._rate_hz = sample_rate_hz
        self._cache = CodesCache()

    async def speak(self, request: Request, request_id: str) -> Response:
        """Answer one request; MossError for what is refused or fails before the first audio."""
        asked = parse_request(await request.body())
        self._check(asked)
        with ExitStack() as stack:
            place = stack.enter_context(self._pool.place())
            work = self._begin(asked, place, request_id)
            try:
                speaking = await unless_client_leaves(request.receive, work)
                if asked.delivery == "file":
                    return await unless_client_leaves(request.receive, self._file(speaking))
            except ClientLeftError:
                self._metrics.answered("cancelled")
                return Response(status_code=499)  # nobody reads it
            return self._streamed(speaking, stack.pop_all())

    async def encode(self, data: bytes) -> tuple[npt.NDArray[np.int32], float, tuple[str, ...]]:
        """The codes of a clip, its seconds, and notes on it; ApiError when it cannot serve as a voice."""
        clip = await self._clips.decode(data)
        return await self._pool.encode(clip.waveform), clip.seconds, clip.notes

    def _check(self, asked: SpeechRequest) -> None:
        """What can be refused without work."""
        if asked.model is not None and asked.model not in self._settings.model_names:
            raise ApiError(404, "The model does not exist; see GET /v1/models.", "model")
        if not asked.input.strip():
            raise ApiError(400, "Input text cannot be empty", "input")
        if len(asked.input) > self._settings.max_characters:
            raise ApiError(
                400, f"input has {len(asked.input)} characters, the limit is {self._settings.max_characters}", "input"
            )
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
        """From the voice to the first piece of audio."""
        codes = await self._voice(asked)
        job, usage = await asyncio.to_thread(self._prompter.job, asked, codes, request_id, self._pool.capacity)
        ticket = place.submit(job)
        rest, listener = ticket.pieces(), Listener()
        try:
            first = await anext(rest)
        except StopAsyncIteration as error:
            raise ApiError(500, "the model gave no audio", headers={"x-should-retry": "false"}) from error
        self._hear(listener, first)
        return _Speaking(asked, ticket, usage, first, rest, listener)

    async def _voice(self, asked: SpeechRequest) -> npt.NDArray[np.int32]:
        """Reference codes: the clip of the request, else the stored voice, else the server's own."""
        if asked.clip is not None:
            data = await self._clips.read(asked.clip)
            key = CodesCache.key(data)
            codes = self._cache.get(key)
            if codes is None:
                codes, _, _ = await self.encode(data)
                self._cache.put(key, codes)
            return codes
        name = asked.voice_name
        codes = await asyncio.to_thread(self._voices.codes, name) if name not in NO_VOICE else None
        if codes is None and (name in NO_VOICE or name in OPENAI_VOICES) and self._settings.default_voice:
            codes = await asyncio.to_thread(self._voices.codes, self._settings.default_voice)
        if codes is not None:
            return codes
        if name in NO_VOICE:
            raise ApiError(400, "MOSS-TTS-Nano requires 'ref_audio' (reference audio for voice cloning).", "ref_audio")
        raise ApiError(
            400, "Unknown voice. MOSS-TTS-Nano has no built-in speakers. Upload a voice first via POST "
            "/v1/audio/voices, or use ref_audio.", "voice",
        )  # fmt: skip

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
            self._metrics.answered("broken")
            yield sse_error(error)
            return
        usage = replace(speaking.usage, output_tokens=speaking.ticket.num_frames)
        yield sse_event("speech.audio.done", {"usage": usage.to_dict()})

    def _hear(self, listener: Listener, pcm: bytes) -> None:
        listener.hear(len(pcm) / BYTES_PER_SAMPLE / self._rate_hz)

    def _done(self, speaking: _Speaking, outcome: str) -> None:
        """One line per request: ids, lengths and times; the words only when the operator asked for them."""
        self._metrics.answered(outcome)
        self._metrics.spoken(speaking.ticket, speaking.listener)
        ticket, listener = speaking.ticket, speaking.listener
        waited = (ticket.started or ticket.submitted) - ticket.submitted
        first = (listener.first or ticket.submitted) - ticket.submitted
        words = f" text={speaking.asked.input!r}" if self._settings.log_text else ""
        LOG.info(
            "%s characters=%d reference_frames=%d format=%s delivery=%s queue=%.3fs ttfa=%.3fs audio=%.2fs %s%s",
            ticket.job.id, len(speaking.asked.input), speaking.usage.audio_tokens, speaking.asked.response_format,
            speaking.asked.delivery, waited, first, listener.audio_seconds, outcome, words,
        )  # fmt: skip


def retry_after(pool: Pool) -> int:
    """Seconds until a place is likely free: one second per request ahead in each slot, at most half a minute."""
    return min(30, max(1, math.ceil((1 + pool.num_waiting) / pool.limits.slots)))


def refusal(error: MossError, pool: Pool) -> ApiError:
    """What a client is told; 429 and 503 say when to come back."""
    return as_api_error(error, retry_after(pool))
