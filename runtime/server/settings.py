"""Everything an operator can choose, from the command line or from MOSS_TTS_… in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints
from pydantic_settings import BaseSettings, SettingsConfigDict

MiB = 1 << 20
# Not empty: --api-key "$UNSET" must not open the server to whoever sends `Bearer `. No spaces: a header loses them.
ApiKey = Annotated[str, StringConstraints(pattern=r"^[!-~]+$")]


class ServerSettings(BaseSettings):
    """Defaults are safe: no files, no fetching, bounded everything."""

    model_config = SettingsConfigDict(env_prefix="MOSS_TTS_", frozen=True)

    api_keys: tuple[ApiKey, ...] = ()  # none: everything is open
    model_names: tuple[str, ...] = ("OpenMOSS-Team/MOSS-TTS-Nano", "moss-tts-nano", "tts-1", "gpt-4o-mini-tts")
    default_voice: str | None = None  # a stored voice for requests that name none, or one of OpenAI's
    default_seed: int = 42  # as vLLM-Omni: requests without a seed repeat too

    sfx_checkpoint: Path | None = None  # MOSS-SoundEffect as a second model, with sfx_codec
    sfx_codec: Path | None = None
    sfx_device: str = "cpu"
    sfx_dtype: str | None = None  # None: as stored
    sfx_codec_device: str = "cpu"
    sfx_model_names: tuple[str, ...] = ("OpenMOSS-Team/MOSS-SoundEffect", "moss-soundeffect")

    slots: int = Field(4, ge=1, le=64)
    max_queue: int = Field(32, ge=0, le=10_000)
    max_rows: int = Field(1024, ge=128)  # prompt and frames of one segment
    max_characters: int = Field(4096, ge=1)
    max_segments: int = Field(40, ge=1)
    deadline_seconds: float = Field(300.0, gt=0)
    step_timeout_seconds: float = Field(60.0, gt=0)
    drain_seconds: int = Field(30, ge=0)  # after SIGTERM

    max_body_bytes: int = Field(15 * MiB, ge=1024)  # a clip of 10 MiB as base64, and the rest
    max_buffered_bytes: int = Field(256 * MiB, ge=1024)  # all bodies together
    body_timeout_seconds: float = Field(30.0, gt=0)
    max_clip_bytes: int = Field(10 * MiB, ge=1024)
    max_clip_seconds: float = Field(30.0, gt=1)
    max_uploaded_voices: int = Field(1000, ge=0)

    voice_directory: Path | None = None  # None: where run-om voice keeps its voices
    allowed_local_media_path: Path | None = None  # file:// below it
    allow_media_urls: bool = False  # http(s)://, public addresses only
    fetch_timeout_seconds: float = Field(10.0, gt=0)
    log_text: bool = False  # the words of requests in the log
