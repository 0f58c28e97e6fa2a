"""What MOSS-TTS-Nano makes of a speech request: it finds the voice and builds the job."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from runtime.server.clips import ClipReader
from runtime.server.errors import ApiError
from runtime.server.jobs import Job
from runtime.server.pool import Pool
from runtime.server.prompts import Prompter, Usage
from runtime.server.schema import SpeechRequest, parse_request
from runtime.server.server_voices import NO_VOICE, OPENAI_VOICES, CodesCache, ServerVoices
from runtime.server.settings import ServerSettings


class VoiceSpeaker:
    """The speech model as a Speaker (speech.py)."""

    def __init__(
        self, settings: ServerSettings, pool: Pool, prompter: Prompter, voices: ServerVoices, clips: ClipReader
    ) -> None:
        self.model_names = settings.model_names
        self._settings, self._pool, self._prompter = settings, pool, prompter
        self._voices, self._clips = voices, clips
        self._cache = CodesCache()

    def parse(self, body: bytes) -> SpeechRequest:
        return parse_request(body, SpeechRequest)

    def check(self, asked: SpeechRequest) -> None:
        if not asked.input.strip():
            raise ApiError(400, "Input text cannot be empty", "input")
        if len(asked.input) > self._settings.max_characters:
            raise ApiError(
                400, f"input has {len(asked.input)} characters, the limit is {self._settings.max_characters}", "input"
            )

    async def job(self, asked: SpeechRequest, request_id: str) -> tuple[Job, Usage]:
        codes = await self._voice(asked)
        return await asyncio.to_thread(self._prompter.job, asked, codes, request_id, self._pool.capacity)

    async def encode(self, data: bytes) -> tuple[npt.NDArray[np.int32], float, tuple[str, ...]]:
        """The codes of a clip, its seconds, and notes on it; ApiError when it cannot serve as a voice."""
        clip = await self._clips.decode(data)
        return await self._pool.encode(clip.waveform), clip.seconds, clip.notes

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
