"""The ASGI application: routes and the order of what stands before them.

request ─ id and last resort ─ API key ─ body limits ─ route
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import MossError
from runtime.manifest import Manifest
from runtime.server.clips import ClipReader
from runtime.server.errors import ApiError, error_body, error_response
from runtime.server.metrics import Metrics
from runtime.server.player import player_page
from runtime.server.pool import Pool, State
from runtime.server.prompts import Prompter
from runtime.server.schema import SpeechRequest
from runtime.server.security import ApiKeys, BodyLimits
from runtime.server.server_voices import CodesCache, ServerVoices, Upload
from runtime.server.settings import ServerSettings
from runtime.server.sfx_speaker import SoundSpeaker, named_model
from runtime.server.speech import SpeechService, refusal
from runtime.server.voice_speaker import VoiceSpeaker
from runtime.voices import codec_id

LOG = logging.getLogger(__name__)
CLIP_TYPES = frozenset(
    ("audio/mpeg", "audio/mp3", "audio/wav", "audio/x-wav", "audio/wave", "audio/ogg", "audio/aac", "audio/flac",
     "audio/x-flac", "audio/webm", "audio/mp4", "audio/x-m4a", "video/webm", "video/mp4")
)  # fmt: skip


def create_app(
    settings: ServerSettings, manifest: Manifest, pool: Pool, sounds: tuple[SoundSpeaker, Pool] | None = None
) -> FastAPI:
    """The application around a pool, and MOSS-SoundEffect around another; its life is the pools'."""
    pools = {settings.model_names[0]: pool}
    if sounds is not None:
        pools[sounds[0].model_names[0]] = sounds[1]
    metrics = Metrics(pools)
    voices = ServerVoices(settings.voice_directory, codec_id(manifest), settings.max_uploaded_voices)
    clips = ClipReader(settings, manifest.codec)
    speaker = VoiceSpeaker(settings, pool, Prompter(manifest, settings), voices, clips)
    speech = SpeechService(settings, pool, speaker, metrics, manifest.codec.sample_rate_hz)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for each in pools.values():
            each.start()
        yield
        await asyncio.gather(*(each.stop() for each in pools.values()))

    app = FastAPI(title="MOSS-TTS-Nano", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.pools = tuple(pools.values())
    _handle_errors(app, speech, metrics)
    names = settings.model_names
    if sounds is None:
        _add_speech(app, speech, {})
    else:
        sound = SpeechService(settings, sounds[1], sounds[0], metrics, sounds[0].sample_rate_hz)
        _add_speech(app, speech, dict.fromkeys(sounds[0].model_names, sound))
        names += sounds[0].model_names
    _add_voices(app, settings, pool, voices, speaker)
    _add_models(app, names)
    _add_operations(app, pools, metrics, player_page(manifest, settings, sounds[0] if sounds else None))
    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(ApiKeys, keys=settings.api_keys)
    app.add_middleware(RequestIds)
    return app


class RequestIds:
    """Gives each request an id and, as the last resort, an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        named = "request_id" in state  # by what stands before this application, which then tells the client too
        request_id = state.setdefault("request_id", f"speech-{uuid.uuid4().hex}")
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if not named:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # the last boundary; a traceback could quote the request: only its place is logged
            LOG.error("%s failed: %s at %s", request_id, type(error).__name__, _place(error))
            if not started:
                failed = ApiError(500, "an internal error; the log has its place under this request id")
                await error_response(failed)(scope, receive, send_with_id)


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"


def _handle_errors(app: FastAPI, speech: SpeechService, metrics: Metrics) -> None:
    async def expected(request: Request, error: Exception) -> Response:
        assert isinstance(error, MossError), "registered for MossError"
        service = getattr(request.state, "service", speech)
        refused = refusal(error, service.pool)
        if request.url.path == "/v1/audio/speech":
            metrics.answered(service.model, str(refused.status))
            LOG.info("%s refused: status %d", request.state.request_id, refused.status)
        return error_response(refused)

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException"
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)

    app.add_exception_handler(MossError, expected)
    app.add_exception_handler(HTTPException, http)


def _add_speech(app: FastAPI, speech: SpeechService, others: Mapping[str, SpeechService]) -> None:
    schema = {"content": {"application/json": {"schema": SpeechRequest.model_json_schema()}}, "required": True}

    @app.post("/v1/audio/speech", openapi_extra={"requestBody": schema}, response_class=Response)
    async def create_speech(request: Request) -> Response:
        """Speak a text, or make the sound that it describes."""
        service = request.state.service = others.get(named_model(await request.body()), speech) if others else speech
        return await service.speak(request, request.state.request_id)


def _add_voices(
    app: FastAPI, settings: ServerSettings, pool: Pool, voices: ServerVoices, speaker: VoiceSpeaker
) -> None:
    @app.get("/v1/audio/voices")
    async def list_voices() -> dict[str, Any]:
        """The stored voices; `default` stands for the clip of the request."""
        uploads = await asyncio.to_thread(voices.uploads)
        return {"voices": ["default", *(u["name"] for u in uploads)], "uploaded_voices": uploads}

    @app.post("/v1/audio/voices")
    async def add_voice(request: Request) -> dict[str, Any]:
        """Store a clip as a voice (multipart form: name, consent, audio_sample)."""
        async with request.form(max_files=1, max_fields=10) as form:
            data, upload = await _read_form(form, settings, voices)
        with pool.place():
            codes, seconds, notes = await speaker.encode(data)
        stored = await asyncio.to_thread(voices.add, upload(codes, seconds, notes))
        return {
            "success": True, "voice": stored, "object": "audio.voice", "id": stored["name"], "name": stored["name"],
            "created_at": stored["created_at"],
        }  # fmt: skip

    @app.delete("/v1/audio/voices/{name}")
    async def delete_voice(name: str) -> dict[str, Any]:
        """Forget a voice."""
        await asyncio.to_thread(voices.remove, name)
        return {"success": True, "message": "the voice was deleted"}


async def _read_form(form: FormData, settings: ServerSettings, voices: ServerVoices) -> tuple[bytes, Any]:
    """The clip of an upload, and what makes an Upload of it once it is encoded."""
    texts: dict[str, str | None] = {}
    for field, limit in (("name", 256), ("consent", 256), ("ref_text", 4096), ("speaker_description", 4096)):
        value = form.get(field)
        if value is not None and (not isinstance(value, str) or len(value) > limit):
            raise ApiError(400, f"{field}: expected at most {limit} characters", field)
        texts[field] = value
    for field in ("name", "consent"):
        if not (texts[field] or "").strip():
            raise ApiError(400, f"{field} is required", field)
    name = await asyncio.to_thread(voices.check_upload, str(texts["name"]))
    if form.get("speaker_embedding") is not None:
        raise ApiError(400, "this model clones from audio; send audio_sample", "speaker_embedding")
    sample = form.get("audio_sample")
    if not isinstance(sample, UploadFile):
        raise ApiError(400, "audio_sample is required: an audio file", "audio_sample")
    mime_type = (sample.content_type or "").split(";")[0].strip().lower()
    if mime_type not in CLIP_TYPES:
        raise ApiError(400, "audio_sample: expected audio/wav, mpeg, ogg, aac, flac, webm or mp4", "audio_sample")
    data = await sample.read(settings.max_clip_bytes + 1)
    if len(data) > settings.max_clip_bytes:
        raise ApiError(400, f"audio_sample is larger than {settings.max_clip_bytes} bytes", "audio_sample")

    def upload(codes: Any, seconds: float, notes: tuple[str, ...]) -> Upload:
        return Upload(
            name, str(texts["consent"]), mime_type, len(data), CodesCache.key(data), codes, seconds, notes,
            texts["ref_text"], texts["speaker_description"],
        )  # fmt: skip

    return data, upload


def _add_models(app: FastAPI, names: Sequence[str]) -> None:
    created = int(time.time())

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "moss-tts-nano-ascend"}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The names under which the models are served."""
        return {"object": "list", "data": [described(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """One of them."""
        if name not in names:
            raise ApiError(404, "The model does not exist; see GET /v1/models.", "model")
        return described(name)


def _add_operations(app: FastAPI, pools: Mapping[str, Pool], metrics: Metrics, page: str) -> None:
    speech, *others = pools.values()

    def states() -> dict[str, Any]:
        models = {model: pool.state.value for model, pool in pools.items()}
        return {"worker": speech.state.value, **({"models": models} if others else {})}

    @app.get("/health")
    async def health() -> JSONResponse:
        """503 while a worker cannot be expected to answer: it hung, died, or could not start."""
        healthy = all(pool.state in (State.STARTING, State.READY) for pool in pools.values())
        body = {"status": "healthy" if healthy else "unhealthy", **states()}
        return JSONResponse(body, 200 if healthy else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 once every model is loaded, warmed up and checked."""
        is_ready = all(pool.state is State.READY for pool in pools.values())
        body = {"status": "ready" if is_ready else "not ready", "backend": speech.backend, **states()}
        return JSONResponse(body, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics_text() -> Response:
        """Prometheus text."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        """A page to try the server."""
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; " \
                 "media-src blob: data:; base-uri 'none'; form-action 'none'"  # fmt: skip
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})
