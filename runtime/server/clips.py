"""ref_audio -> a reference clip in the codec's format. What a request says is never used as a path unchecked.

    data:<mime>;base64,…    always            file://…    only below the allowed directory, links resolved
    http(s)://…             only when allowed (fetch.py)

All of it runs in threads, a few at a time. Size is limited before decoding, length while decoding.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from runtime.audio import Clip, ClipRules, read_clip
from runtime.config import CodecConfig
from runtime.errors import AudioError
from runtime.server.errors import ApiError
from runtime.server.fetch import FetchLimits, fetch
from runtime.server.settings import ServerSettings

MAX_RATE_TIMES_CHANNELS = 384_000  # 192 kHz stereo; 30 s of it are 46 MB as float
WRONG_FORM = (
    "ref_audio must be a URL (http/https), base64 data URL (data:...), or file URI (file://...); a bare path or raw "
    "base64 is refused"
)
_NOT_LOCAL = "Cannot load local files without `--allowed-local-media-path`, or the file is not an audio file below it."
# First bytes of what libsndfile cannot read and PyAV can: Matroska/WebM, ADTS.
_EBML, _ADTS = b"\x1aE\xdf\xa3", (b"\xff\xf1", b"\xff\xf9")


class ClipReader:
    """Reads the clips of requests, a bounded number at a time."""

    def __init__(self, settings: ServerSettings, codec: CodecConfig, workers: int = 2) -> None:
        self._settings, self._codec = settings, codec
        self._workers = asyncio.Semaphore(workers)

    async def read(self, locator: str) -> bytes:
        """The bytes behind ref_audio; ApiError 400 when it may not be read."""
        if locator.startswith("data:"):
            return decode_data_url(locator, self._settings.max_clip_bytes)
        async with self._workers:
            if locator.startswith("file:"):
                return await asyncio.to_thread(self._local, locator)
            if locator.startswith(("http:", "https:")):
                return await asyncio.to_thread(self._fetched, locator)
        raise ApiError(400, WRONG_FORM, "ref_audio")

    async def decode(self, data: bytes) -> Clip:
        """The clip in the codec's format; ApiError 400 when it cannot serve as a voice."""
        async with self._workers:
            return await asyncio.to_thread(decode_clip, data, self._codec, self._settings.max_clip_seconds)

    def _fetched(self, url: str) -> bytes:
        if not self._settings.allow_media_urls:
            raise ApiError(
                400, "this server fetches no URLs (it was started without --allow-media-urls); send a data URL",
                "ref_audio",
            )  # fmt: skip
        return fetch(url, FetchLimits(self._settings.max_clip_bytes, self._settings.fetch_timeout_seconds))

    def _local(self, uri: str) -> bytes:
        return read_local(uri, self._settings.allowed_local_media_path, self._settings.max_clip_bytes)


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of data:<mime>;base64,…; strict, and measured before they are decoded."""
    head, comma, payload = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ApiError(400, "ref_audio: expected data:<media type>;base64,<data>", "ref_audio")
    if len(payload) > 4 * (max_bytes + 2) // 3 + 4:
        raise ApiError(400, f"ref_audio is larger than {max_bytes} bytes", "ref_audio")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, "ref_audio: the data URL is not valid base64", "ref_audio") from error


def read_local(uri: str, allowed: Path | None, max_bytes: int) -> bytes:
    """A file below `allowed`; one answer for everything else, so that nobody learns which files exist."""
    refused = ApiError(400, _NOT_LOCAL, "ref_audio")
    if allowed is None:
        raise refused
    try:
        parts = urlsplit(uri)
        if parts.netloc not in ("", "localhost"):
            raise refused
        root, path = allowed.resolve(strict=True), Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(root) or not path.is_file():  # a FIFO would block the thread for ever
            raise refused
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise refused from error
    if len(data) > max_bytes:
        raise ApiError(400, f"ref_audio is larger than {max_bytes} bytes", "ref_audio")
    return data


def decode_clip(data: bytes, codec: CodecConfig, max_seconds: float) -> Clip:
    """Decode hostile bytes: containers are recognised, rate, channels and length are bounded."""
    if data[:4] == _EBML or data[4:8] == b"ftyp" or data[:2] in _ADTS:
        data = _as_wav(data, max_seconds)
    _check_header(data)
    with tempfile.TemporaryDirectory(prefix="moss-tts-clip-") as scratch:
        path = Path(scratch) / "clip"
        path.write_bytes(data)
        try:
            return read_clip(path, codec.sample_rate_hz, codec.num_channels, ClipRules(max_seconds))
        except AudioError as error:
            reason = str(error).replace(str(path), "the clip")
            kind = "too long: " if "longer than" in reason else "too short: " if "at least 1 s" in reason else ""
            raise ApiError(400, f"Reference audio {kind}{reason}", "ref_audio") from error


def _check_header(data: bytes) -> None:
    import soundfile

    with suppress(soundfile.SoundFileError):  # read_clip says what is wrong with what cannot be opened
        info: Any = soundfile.info(io.BytesIO(data))
        if info.samplerate * info.channels > MAX_RATE_TIMES_CHANNELS:
            raise ApiError(
                400,
                f"Reference audio: {info.samplerate} Hz, {info.channels} channels; expected at most 192 kHz stereo",
                "ref_audio",
            )


def _as_wav(data: bytes, max_seconds: float) -> bytes:
    """MP4, WebM and AAC through PyAV, as far as one second beyond the limit."""
    import av
    import soundfile

    blocks: list[npt.NDArray[np.float32]] = []
    num_samples, rate_hz = 0, 0
    try:
        with av.open(io.BytesIO(data), "r") as container:
            if not container.streams.audio:
                raise ApiError(400, "Reference audio: the file holds no sound", "ref_audio")
            rate_hz = container.streams.audio[0].rate
            if not 0 < rate_hz <= MAX_RATE_TIMES_CHANNELS // 2:
                raise ApiError(400, f"Reference audio: {rate_hz} Hz; expected at most 192 kHz", "ref_audio")
            resampler = av.AudioResampler(format="flt", layout="mono", rate=rate_hz)
            for frame in container.decode(audio=0):
                for mono in resampler.resample(frame):
                    blocks.append(mono.to_ndarray().ravel().astype(np.float32))
                    num_samples += blocks[-1].size
                if num_samples > (max_seconds + 1) * rate_hz:
                    break
    except (av.FFmpegError, ValueError, MemoryError) as error:
        raise ApiError(400, "Reference audio cannot be decoded; expected WAV, FLAC, OGG, MP3, MP4, WebM or AAC",
                       "ref_audio") from error  # fmt: skip
    sink = io.BytesIO()
    soundfile.write(sink, np.concatenate(blocks) if blocks else np.zeros(1), rate_hz, format="WAV", subtype="FLOAT")
    return sink.getvalue()
