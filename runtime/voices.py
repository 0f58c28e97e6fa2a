"""Stored voices: the codes of a reference clip under a name, encoded once.

A voice belongs to the codec that encoded it; another codec's codes are noise, so a stale voice is refused. One JSON
file per voice, in the first of: the option of the command, $MOSS_TTS_VOICES,
$XDG_DATA_HOME/moss-tts-nano-ascend/voices, ~/.local/share/moss-tts-nano-ascend/voices.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.audio import ClipRules, read_clip
from runtime.config import CodecConfig
from runtime.errors import AudioError, ManifestError
from runtime.manifest import Manifest, sha256_of, write_atomically

VOICES_ENV = "MOSS_TTS_VOICES"
FORMAT_VERSION = 1
_NAME = re.compile(r"[^\W_][\w-]{0,63}")  # letters of any script, digits, "_" and "-": never a path or a file name

Codes = npt.NDArray[np.int32]


class ClipEncoder(Protocol):
    """What adding a voice needs of the codec; runtime.codec.Codec is one."""

    @property
    def config(self) -> CodecConfig: ...
    def encode(self, waveform: npt.NDArray[np.float32]) -> Codes: ...


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """Reference codes [F, n_vq] and where they come from."""

    name: str  # "" for a clip that was not stored
    codes: Codes
    clip: str  # file name of the clip
    clip_sha256: str
    codec_id: str
    seconds: float
    text: str | None = None  # what the clip says, for continuation
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON data, codes included."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format_version": FORMAT_VERSION, **values, "codes": self.codes.tolist()}


def codec_id(manifest: Manifest) -> str:
    """What identifies the codec of an artifacts directory."""
    files = manifest.source.get("codec", {}).get("files", {})
    if not files:
        raise ManifestError(f"{manifest.directory}: the manifest does not say which codec it was made of; export again")
    return codec_files_id(files)


def codec_files_id(files: Mapping[str, str]) -> str:
    """What identifies a codec checkpoint: a hash of the hashes of its weight files."""
    weights = {name: sha256 for name, sha256 in files.items() if not name.endswith(".json")} or files
    return hashlib.sha256(json.dumps(sorted(weights.values())).encode()).hexdigest()


def encode_clip(
    path: Path,
    encoder: ClipEncoder,
    codec_id: str,
    rules: ClipRules | None = None,
    name: str = "",
    text: str | None = None,
) -> Voice:
    """Read and encode a clip; AudioError when it cannot serve as a voice."""
    clip = read_clip(path, encoder.config.sample_rate_hz, encoder.config.num_channels, rules)
    codes = encoder.encode(clip.waveform)
    return Voice(name, codes, path.name, sha256_of(path), codec_id, round(clip.seconds, 3), text, clip.notes)


def is_voice_name(voice: str) -> bool:
    """Whether `--voice` names a stored voice. A name with a dot or a slash is a file, always."""
    return _NAME.fullmatch(unicodedata.normalize("NFC", voice)) is not None


def find_voice(
    voice: str, store: VoiceStore, encoder: ClipEncoder, codec_id: str, rules: ClipRules | None = None
) -> Voice:
    """The voice that `--voice` names: a stored one, or a clip."""
    if is_voice_name(voice):
        found = store.load(voice)
        if found.codec_id != codec_id:
            raise AudioError(
                f"voice {voice} was encoded by another codec ({found.codec_id[:12]}…, these artifacts have "
                f"{codec_id[:12]}…); add it again: run-om voice add {voice} {found.clip} --replace"
            )
        return found
    path = Path(voice)
    if not path.is_file():
        raise AudioError(f"--voice {voice}: no such file, and not a voice name; stored voices: {store.listed()}")
    return encode_clip(path, encoder, codec_id, rules)


class VoiceStore:
    """The voices of one directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_directory()

    def add(self, voice: Voice, overwrite: bool = False) -> Path:
        """Store a voice under its name."""
        path = self.check_free(voice.name, overwrite)
        try:
            write_atomically(path, json.dumps(voice.to_dict(), ensure_ascii=False) + "\n")
        except OSError as error:
            raise AudioError(f"{path}: cannot write there ({error.strerror})") from error
        return path

    def check_free(self, name: str, overwrite: bool = False) -> Path:
        """AudioError when the name is taken or no name; asked before a clip is encoded."""
        path = self._path(name)
        if path.exists() and not overwrite:
            raise AudioError(f"voice {name} exists in {self.directory}; choose another name or give --replace")
        return path

    def load(self, name: str) -> Voice:
        """Read a stored voice; AudioError names those that exist."""
        path = self._path(name)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise AudioError(
                f"no voice named {name} in {self.directory}; stored voices: {self.listed()}. "
                f"Add it: run-om voice add {name} clip.wav, or give a clip (a name with a dot or a slash)"
            ) from error
        except (OSError, ValueError) as error:
            raise AudioError(f"{path} is not readable ({error}); remove the voice and add it again") from error
        return _from_dict(data, path)

    def names(self) -> list[str]:
        """Names of the stored voices, sorted."""
        return sorted(path.stem for path in self._files())

    def listed(self) -> str:
        return ", ".join(self.names()) or "none"

    def remove(self, name: str) -> None:
        """Forget a voice."""
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError as error:
            raise AudioError(f"no voice named {name} in {self.directory}; stored voices: {self.listed()}") from error
        except OSError as error:
            raise AudioError(f"{path}: cannot remove it ({error.strerror})") from error

    def _files(self) -> Iterator[Path]:
        return (p for p in self.directory.glob("*.json") if _NAME.fullmatch(p.stem))

    def _path(self, name: str) -> Path:
        return self.directory / f"{check_name(name)}.json"


def check_name(name: str) -> str:
    """The name in one spelling (NFC); AudioError when it is no name."""
    normal = unicodedata.normalize("NFC", name)
    if not _NAME.fullmatch(normal):
        raise AudioError(f"voice name {name!r}: expected 1 to 64 letters, digits, '-' or '_', a letter or digit first")
    return normal


def default_directory() -> Path:
    """Where voices live unless a command says otherwise."""
    if chosen := os.environ.get(VOICES_ENV):
        return Path(chosen)
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "moss-tts-nano-ascend" / "voices"


def _from_dict(data: Any, path: Path) -> Voice:
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise AudioError(
            f"{path}: format version {version!r}, expected {FORMAT_VERSION}; remove and add the voice again"
        )
    values = {name: value for name, value in data.items() if name != "format_version"}
    try:
        codes = np.asarray(values["codes"], np.int32)
        voice = Voice(**{**values, "codes": codes, "notes": tuple(values["notes"])})
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise AudioError(f"{path} is damaged ({error}); remove the voice and add it again") from error
    if codes.ndim != 2 or not codes.size:
        raise AudioError(f"{path} is damaged (codes {list(codes.shape)}); remove the voice and add it again")
    return voice
