"""The published ONNX package as data: where its files are, what its manifests say (MODEL.md 2.3, 5.6, 6.7).

    open_package(DIR) -> OnnxPackage      DIR holds browser_poc_manifest.json itself or in a directory below

Reads JSON and ONNX Runtime's view of the graphs, nothing else. What the package does not say (layer norm epsilon, the
codec's layers) is not guessed: package_speech.describe_package leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import AudioError, CheckpointError, ManifestError
from runtime.generate import MAX_FRAMES
from runtime.manifest import sha256_of
from runtime.package_graphs import (
    CODEC_FILES,
    CODEC_META_NAME,
    LLM_FILES,
    MANIFEST_NAME,
    PACKAGE_FILES,
    TTS_META_NAME,
)
from runtime.sampling import SamplingParams

MADE_UP_KEY = "made_up_weights"  # set by convert/published_package.py when the checkpoint was a fixture
# ModelConfig field -> the name of the same id in tts_config
ID_NAMES = {
    "audio_pad_id": "audio_pad_token_id",
    "pad_id": "pad_token_id",
    "im_start_id": "im_start_token_id",
    "im_end_id": "im_end_token_id",
    "audio_start_id": "audio_start_token_id",
    "audio_end_id": "audio_end_token_id",
    "audio_user_slot_id": "audio_user_slot_token_id",
    "audio_assistant_slot_id": "audio_assistant_slot_token_id",
}
# The pieces of the published tokenizer that are these ids, for packages whose tts_config leaves them out.
_PIECES = {
    "pad_id": "<pad>",
    "im_start_id": "<|im_start|>",
    "im_end_id": "<|im_end|>",
    "audio_start_id": "<|audio_start|>",
    "audio_end_id": "<|audio_end|>",
    "audio_user_slot_id": "<|vision_pad|>",
    "audio_assistant_slot_id": "<|video_pad|>",
}
# generation_defaults -> SamplingParams
_SAMPLING_NAMES = {
    "text_temperature": "slot_temperature",
    "text_top_k": "slot_top_k",
    "text_top_p": "slot_top_p",
    "audio_temperature": "temperature",
    "audio_top_k": "top_k",
    "audio_top_p": "top_p",
    "audio_repetition_penalty": "repetition_penalty",
}


@dataclass(frozen=True)
class OnnxPackage:
    """One package; paths are checked to exist."""

    directory: Path  # where the manifest is
    manifest: Mapping[str, Any]
    tts_meta: Mapping[str, Any]
    codec_meta: Mapping[str, Any]
    graphs: dict[str, Path]  # published graph -> file; graphs that are not there are left out
    tokenizer: Path | None

    @property
    def made_up(self) -> bool:
        return bool(self.manifest.get(MADE_UP_KEY))

    def path(self, graph: str) -> Path:
        """The file of a graph; ManifestError names what is there instead."""
        if graph not in self.graphs:
            raise ManifestError(
                f"{self.directory}: the package has no {PACKAGE_FILES[graph]}; "
                f"it has {', '.join(self.graphs) or 'none'}"
            )
        return self.graphs[graph]

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special token ids by their ModelConfig names; from tts_config, else from the tokenizer's own pieces."""
        config = {**_section(self.tts_meta, "model_config"), **_section(self.manifest, "tts_config")}
        ids: dict[str, int] = {}
        for field, name in ID_NAMES.items():
            value = config.get(name)
            if value is None and field in _PIECES and self.tokenizer is not None:
                value = _piece_id(self.tokenizer, _PIECES[field])
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise CheckpointError(
                    f"{self.directory / MANIFEST_NAME}: tts_config: {name}: expected a token id, got {value!r}"
                )
            ids[field] = value
        return ids

    @property
    def codebook_sizes(self) -> tuple[int, ...] | None:
        """As tts_config says them; None when it does not."""
        config = {**_section(self.tts_meta, "model_config"), **_section(self.manifest, "tts_config")}
        sizes = config.get("audio_codebook_sizes")
        return tuple(int(s) for s in sizes) if isinstance(sizes, list) else None

    @property
    def sampling(self) -> SamplingParams:
        """The generation defaults; what the package leaves out is the published default."""
        defaults = _section(self.manifest, "generation_defaults")
        given = {theirs: value for theirs, value in defaults.items() if value is not None}
        values = {ours: given[theirs] for theirs, ours in _SAMPLING_NAMES.items() if theirs in given}
        if defaults.get("do_sample") is False or defaults.get("sample_mode") == "greedy":
            return SamplingParams.greedy(values.get("repetition_penalty", SamplingParams().repetition_penalty))
        return SamplingParams(**values)

    @property
    def max_frames(self) -> int:
        value = _section(self.manifest, "generation_defaults").get("max_new_frames", MAX_FRAMES)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ManifestError(f"{self.directory}: max_new_frames is {value!r}, expected 1 or more")
        return value

    def speak_defaults(self) -> dict[str, Any]:
        """The generation defaults by the names of run-om's options, as a manifest records them."""
        s = self.sampling
        return {
            "greedy": s.top_k == 1, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p,
            "repetition_penalty": s.repetition_penalty, "max_frames": self.max_frames,
        }  # fmt: skip

    def voices(self) -> dict[str, npt.NDArray[np.int32]]:
        """The built-in voices: name -> reference codes [F, n_vq]."""
        found: dict[str, npt.NDArray[np.int32]] = {}
        for entry in self.manifest.get("builtin_voices") or []:
            name = entry.get("voice") if isinstance(entry, dict) else None
            try:
                codes = np.asarray(entry["prompt_audio_codes"], np.int32)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise AudioError(f"{self.directory}: built-in voice {name!r}: unreadable codes ({error})") from error
            if not isinstance(name, str) or codes.ndim != 2 or not codes.size:
                raise AudioError(f"{self.directory}: built-in voice {name!r}: expected codes [frames, n_vq]")
            found[name] = codes
        return found

    def codec_value(self, *names: str) -> int:
        """A number of codec_config, under any of its names."""
        config = _section(self.codec_meta, "codec_config")
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise ManifestError(f"{CODEC_META_NAME}: codec_config has none of {', '.join(names)}; it has {sorted(config)}")

    def hashes(self, graphs: Mapping[str, str] | None = None) -> dict[str, str]:
        """sha256 of the graph files and of the data files that lie beside them."""
        files = {path for name, path in self.graphs.items() if graphs is None or name in graphs}
        files |= {data for path in files for data in path.parent.glob("*.data")}
        return {path.name: sha256_of(path) for path in sorted(files)}


def open_package(directory: Path) -> OnnxPackage:
    """Find the manifests and graphs below `directory`; ManifestError says what is missing."""
    manifest_path = _find(directory, MANIFEST_NAME)
    if manifest_path is None:
        raise ManifestError(
            f"{directory}: holds no {MANIFEST_NAME}; expected the directory of a published ONNX package"
        )
    manifest = _read(manifest_path)
    base, files = manifest_path.parent, _section(manifest, "model_files")
    tts_path = _named(base, files.get("tts_meta"), directory, TTS_META_NAME)
    codec_path = _named(base, files.get("codec_meta"), directory, CODEC_META_NAME)
    tts_meta, codec_meta = _read(tts_path), _read(codec_path)
    graphs = _graphs(tts_path.parent, tts_meta, LLM_FILES) | _graphs(codec_path.parent, codec_meta, CODEC_FILES)
    if not graphs:
        raise ManifestError(f"{base}: none of the graphs is there; expected {', '.join(PACKAGE_FILES.values())}")
    tokenizer = base / str(files.get("tokenizer_model", "tokenizer.model"))
    return OnnxPackage(base, manifest, tts_meta, codec_meta, graphs, tokenizer if tokenizer.is_file() else None)


def is_package(directory: Path) -> bool:
    """Whether a directory looks like a published package."""
    return _find(directory, MANIFEST_NAME) is not None


def _graphs(base: Path, meta: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, Path]:
    listed = _section(meta, "files")
    found = {}
    for graph, default in known.items():
        path = base / str(listed.get(graph.removeprefix("codec_"), default))
        if path.is_file():
            found[graph] = path
    return found


def _find(directory: Path, name: str) -> Path | None:
    """The file in the directory or in exactly one directory below it."""
    if (directory / name).is_file():
        return directory / name
    below = sorted(directory.glob(f"*/{name}"))
    if len(below) > 1:
        raise ManifestError(f"{directory}: {name} lies in {', '.join(p.parent.name for p in below)}; give one of them")
    return below[0] if below else None


def _named(base: Path, relative: Any, directory: Path, name: str) -> Path:
    if isinstance(relative, str) and (base / relative).is_file():
        return (base / relative).resolve()
    found = _find(base, name) or _find(directory, name) or _find(base.parent, name)
    if found is None:
        raise ManifestError(f"{base / str(relative or name)} is missing; {MANIFEST_NAME} needs it: download it")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise ManifestError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _piece_id(tokenizer: Path, piece: str) -> int | None:
    from runtime.tokenizer import Tokenizer

    return Tokenizer(tokenizer).piece_id(piece)
