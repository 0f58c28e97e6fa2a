"""The JSON body of POST /v1/audio/speech, with vLLM-Omni's fields and defaults (SERVING.md section 2)."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.server.errors import ApiError

Format = Literal["wav", "pcm", "flac", "mp3", "opus", "aac"]
Schema = TypeVar("Schema", bound="SpeechRequest")
_INT64 = 2**63


class VoiceId(BaseModel):
    """OpenAI's second way to name a voice."""

    id: str


class Reference(BaseModel):
    """Another name for ref_audio and ref_text."""

    audio_path: str
    text: str | None = None


class SpeechRequest(BaseModel):
    """One request. Unknown fields are ignored, as the published servers do."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    input: str
    model: str | None = None
    voice: str | VoiceId | None = Field(None, validation_alias=AliasChoices("voice", "speaker"))
    instructions: str | None = Field(None, max_length=500)  # no effect on this model
    response_format: Format = "wav"
    sample_rate: int | None = Field(None, gt=0)
    speed: float | None = Field(1.0, ge=0.25, le=4.0, allow_inf_nan=False)
    stream_format: Literal["sse", "audio"] | None = None
    stream: bool = False
    ref_audio: str | list[str] | None = None
    references: list[Reference] | None = None
    max_new_tokens: int | None = Field(None, ge=1, le=_INT64 - 1)  # frames of 80 ms, per segment
    seed: int | None = Field(None, ge=-_INT64, le=_INT64 - 1)
    word_timestamps: bool = False

    @model_validator(mode="after")
    def _one_reference(self) -> SpeechRequest:
        if self.references is not None and (len(self.references) != 1 or self.ref_audio is not None):
            raise ValueError("references: expected exactly one, and no ref_audio beside it")
        if isinstance(self.ref_audio, list) and len(self.ref_audio) != 1:
            raise ValueError("ref_audio: expected one clip; this model takes one voice")
        return self

    @property
    def words(self) -> str:
        """What is to be spoken."""
        return self.input

    @property
    def voice_name(self) -> str:
        """The asked-for voice as it is compared: "" when none was named."""
        voice = self.voice.id if isinstance(self.voice, VoiceId) else self.voice
        return (voice or "").strip().lower()

    @property
    def clip(self) -> str | None:
        """Where the reference clip is."""
        if self.references:
            return self.references[0].audio_path
        return self.ref_audio[0] if isinstance(self.ref_audio, list) else self.ref_audio

    @property
    def delivery(self) -> Literal["file", "audio", "sse"]:
        """How the sound leaves: as a whole, as it comes, or as events."""
        if self.stream_format == "audio":
            return "audio"
        return "sse" if self.stream or self.stream_format == "sse" else "file"


def parse_request(body: bytes, schema: type[Schema]) -> Schema:
    """The request in a body; ApiError 400 names the first field that is wrong, never its value."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise ApiError(400, *_first(error.errors(include_url=False, include_input=False))) from error


def _first(errors: list[Any]) -> tuple[str, str | None]:
    first = errors[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    return (f"{field}: {first['msg']}" if field else str(first["msg"])), (field or "").split(".")[0] or None
