"""Voices of the server: the store of run-om voice, looked up without regard to case, and what an upload adds to it.

What the form of an upload said (consent, type, size) lies beside the voice in <name>.upload.json; a name with a dot is
no voice, so the store does not see it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import AudioError
from runtime.manifest import write_atomically
from runtime.server.errors import ApiError
from runtime.voices import Voice, VoiceStore, check_name

# OpenAI's own voices: its SDK makes the field mandatory, so these names mean "any".
OPENAI_VOICES = frozenset(
    "alloy ash ballad coral echo fable onyx nova sage shimmer verse marin cedar".split()  # noqa: SIM905
)
NO_VOICE = frozenset(("", "default"))


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """What the form said about a clip, and the clip as it was read."""

    name: str
    consent: str
    mime_type: str
    file_size: int
    clip_sha256: str
    codes: npt.NDArray[np.int32]
    seconds: float
    notes: tuple[str, ...] = ()
    ref_text: str | None = None
    speaker_description: str | None = None


class ServerVoices:
    """One directory of voices."""

    def __init__(self, directory: Path | None, codec_id: str, max_uploads: int) -> None:
        self._store, self._codec_id, self._max_uploads = VoiceStore(directory), codec_id, max_uploads

    def codes(self, name: str) -> npt.NDArray[np.int32] | None:
        """The codes of a stored voice; None when there is none of that name."""
        stored = self._stored(name)
        if stored is None:
            return None
        voice = self._store.load(stored)
        if voice.codec_id != self._codec_id:
            raise ApiError(400, "this voice was encoded by another codec; upload it again", "voice")
        return voice.codes

    def names(self) -> list[str]:
        return self._store.names()

    def uploads(self) -> list[dict[str, Any]]:
        """What is known about each stored voice."""
        return [self._described(name) for name in self._store.names()]

    def check_upload(self, name: str) -> str:
        """The name as it will be stored; ApiError 400 when it cannot be."""
        try:
            normal = check_name(name.strip().lower())
        except AudioError as error:
            raise ApiError(400, "name: expected 1 to 64 letters, digits, '-' or '_', a letter or digit first", "name") \
                from error  # fmt: skip
        if normal in NO_VOICE or normal in OPENAI_VOICES:
            raise ApiError(400, "name: this name means no voice in particular; choose another", "name")
        if self._stored(normal) is None and len(self._store.names()) >= self._max_uploads:
            raise ApiError(400, f"the server keeps {self._max_uploads} voices at most; delete one first", "name")
        return normal

    def add(self, upload: Upload) -> dict[str, Any]:
        """Store an upload; the same name overwrites."""
        stored = self._stored(upload.name) or upload.name
        voice = Voice(
            stored, upload.codes, "upload", upload.clip_sha256, self._codec_id, round(upload.seconds, 3),
            upload.ref_text, upload.notes,
        )  # fmt: skip
        self._store.add(voice, overwrite=True)
        facts = {name: getattr(upload, name) for name in ("consent", "mime_type", "file_size", "speaker_description")}
        write_atomically(self._facts(stored), json.dumps({**facts, "created_at": int(time.time())}) + "\n")
        return self._described(stored)

    def remove(self, name: str) -> None:
        """Forget a voice; ApiError 404 when there is none."""
        stored = self._stored(name)
        if stored is None:
            raise ApiError(404, "no such voice", "name")
        self._facts(stored).unlink(missing_ok=True)
        self._store.remove(stored)

    def _stored(self, name: str) -> str | None:
        wanted = name.strip().lower()
        return next((stored for stored in self._store.names() if stored.lower() == wanted), None)

    def _facts(self, stored: str) -> Path:
        return self._store.directory / f"{check_name(stored)}.upload.json"

    def _described(self, stored: str) -> dict[str, Any]:
        """As GET /v1/audio/voices shows it; a voice that run-om voice stored has no upload facts."""
        try:
            facts = json.loads(self._facts(stored).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            facts = {"consent": None, "created_at": None, "file_size": None, "mime_type": None}
        return {"name": stored, "embedding_source": "audio", "embedding_dim": None, **facts}


class CodesCache:
    """The codes of recent clips by the hash of their bytes; the oldest leaves."""

    def __init__(self, max_entries: int = 256) -> None:
        self._codes: dict[str, npt.NDArray[np.int32]] = {}
        self._max_entries = max_entries

    @staticmethod
    def key(clip: bytes) -> str:
        return hashlib.sha256(clip).hexdigest()

    def get(self, key: str) -> npt.NDArray[np.int32] | None:
        codes = self._codes.pop(key, None)
        if codes is not None:
            self._codes[key] = codes  # the newest again
        return codes

    def put(self, key: str, codes: npt.NDArray[np.int32]) -> None:
        self._codes[key] = codes
        while len(self._codes) > self._max_entries:
            self._codes.pop(next(iter(self._codes)))
