"""What MOSS-SoundEffect makes of a speech request: `input` or `ambient_sound` is the description of a sound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.errors import CapacityError
from runtime.server.errors import ApiError
from runtime.server.jobs import SoundJob
from runtime.server.pool import Pool
from runtime.server.prompts import Usage
from runtime.server.schema import SpeechRequest, parse_request
from runtime.server.settings import ServerSettings
from runtime.sfx.codec import read_sfx_codec_config
from runtime.sfx.config import FRAME_RATE_HZ, read_sfx_config, seconds_to_tokens
from runtime.sfx.prompt import PromptEncoder, SoundPrompt
from runtime.sfx.sampling import SfxSampling
from runtime.sfx.sound_effects import MAX_NEW_TOKENS

_DEFAULTS = SfxSampling()


class SoundSampling(BaseModel):
    """The sampling fields of `extra_params`; others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    temperature: float = Field(default=_DEFAULTS.temperature, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=_DEFAULTS.top_p, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=_DEFAULTS.top_k, ge=1, le=100_000)
    repetition_penalty: float = Field(default=_DEFAULTS.repetition_penalty, gt=0, le=100, allow_inf_nan=False)


class SoundRequest(SpeechRequest):
    """One request for a sound. OpenAI's clients always send `input` and `voice`; a voice means nothing here."""

    input: str = ""
    ambient_sound: str | None = None  # wins over input
    duration_seconds: float | None = Field(None, gt=0, allow_inf_nan=False)  # a hint, as the prompt has it
    extra_params: SoundSampling = SoundSampling()

    @property
    def words(self) -> str:
        return self.input if self.ambient_sound is None else self.ambient_sound


class _Named(BaseModel):
    model: str | None = None


def named_model(body: bytes) -> str:
    """The model that a body names; "" when it names none, or is no request at all."""
    try:
        return _Named.model_validate_json(body).model or ""
    except ValidationError:
        return ""  # the schema of the speech model says what is wrong


class SoundSpeaker:
    """MOSS-SoundEffect as a Speaker (speech.py); needs config and tokenizer, not the weights."""

    def __init__(self, settings: ServerSettings, checkpoint: Path, codec: Path, pool: Pool) -> None:
        config = read_sfx_config(checkpoint)
        self.model_names = settings.sfx_model_names
        self.sample_rate_hz = read_sfx_codec_config(codec, config).sample_rate_hz
        self._settings, self._pool = settings, pool
        self._encoder = PromptEncoder(checkpoint, config)
        self._rows_around = config.n_vq + 2  # audio_start, the delay and the end, beside one row per frame

    def parse(self, body: bytes) -> SoundRequest:
        return parse_request(body, SoundRequest)

    def check(self, asked: SpeechRequest) -> None:
        assert isinstance(asked, SoundRequest), "parsed here"
        field = "input" if asked.ambient_sound is None else "ambient_sound"
        if not asked.words.strip():
            raise ApiError(400, f'{field} is empty; expected words such as "a dog barks in the rain"', field)
        if len(asked.words) > self._settings.max_characters:
            limit = self._settings.max_characters
            raise ApiError(400, f"{field} has {len(asked.words)} characters, the limit is {limit}", field)
        if asked.clip is not None:
            raise ApiError(400, "MOSS-SoundEffect clones no voice; leave out ref_audio and references", "ref_audio")
        longest = (MAX_NEW_TOKENS - self._rows_around) / FRAME_RATE_HZ
        if asked.duration_seconds is not None and asked.duration_seconds > longest:
            raise ApiError(
                400, f"duration_seconds: expected at most {longest:g}, got {asked.duration_seconds:g}",
                "duration_seconds",
            )  # fmt: skip

    async def job(self, asked: SpeechRequest, request_id: str) -> tuple[SoundJob, Usage]:
        assert isinstance(asked, SoundRequest), "parsed here"
        return await asyncio.to_thread(self._job, asked, request_id)

    def _job(self, asked: SoundRequest, request_id: str) -> tuple[SoundJob, Usage]:
        seconds = asked.duration_seconds
        prompt = SoundPrompt(asked.words, None if seconds is None else seconds_to_tokens(seconds))
        rows = len(self._encoder.rows(prompt))
        room = min(MAX_NEW_TOKENS, self._pool.capacity - rows)
        wanted = self._rows_around + (prompt.tokens or 1)
        if room < wanted:
            raise CapacityError(
                f"{rows} prompt rows and the sound need {rows + wanted} rows, the server has {self._pool.capacity}; "
                "use a shorter description, or a smaller duration_seconds"
            )
        # A wrong sign is no error: any 64-bit number is a seed.
        seed = (self._settings.default_seed if asked.seed is None else asked.seed) % 2**64
        sampling: dict[str, Any] = asked.extra_params.model_dump()
        job = SoundJob(request_id, prompt, seed, SfxSampling(**sampling), min(asked.max_new_tokens or room, room))
        return job, Usage(rows, 0)
