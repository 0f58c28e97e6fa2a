"""artifacts/<name>/manifest.json: what was made from what. Written last and atomically: no manifest, no artifacts.

The manifest is the only place that says what a file is; no command reads meaning out of a file name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.config import CodecConfig, CodecStage, ModelConfig
from runtime.errors import ManifestError
from runtime.spec import GraphSpec

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
MADE_UP_NOTICE = "made-up weights: the sound is noise with speech-like timing, not a voice"


@dataclass(frozen=True, slots=True)
class GraphFile:
    """One exported graph: its interface, its file beside the manifest, and what was verified."""

    spec: GraphSpec
    file: str
    sha256: str
    num_nodes: int
    max_abs_difference: dict[str, float] = field(default_factory=dict)  # torch against ONNX, per output


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a command needs to know about one artifacts directory."""

    directory: Path
    name: str
    made_up: bool  # weights are a fixture: say so wherever a person could mistake the sound for a voice
    source: dict[str, Any]  # where the checkpoints came from, with the sha256 of each file
    model: ModelConfig
    codec: CodecConfig
    limits: dict[str, int]  # max_positions, top_k_max: what the graphs were exported for
    graphs: dict[str, GraphFile]
    data_files: dict[str, str]  # weights and tokenizer: file -> sha256
    versions: dict[str, str]
    builds: list[dict[str, Any]] = field(default_factory=list)  # one record per .om, written by the ATC step

    @property
    def notice(self) -> str | None:
        """The sentence that must stand beside every result of made-up weights."""
        return MADE_UP_NOTICE if self.made_up else None

    def graph(self, name: str) -> GraphFile:
        """The record of one graph; ManifestError names what is there instead."""
        if name not in self.graphs:
            raise ManifestError(
                f"{self.directory}: no graph {name}; exported: {', '.join(self.graphs)}. "
                f"Run: convert-moss export … --only {name}"
            )
        return self.graphs[name]

    def path(self, file: str) -> Path:
        return self.directory / file

    def check_hashes(self, graph_names: Iterable[str] | None = None) -> None:
        """Compare the files with the recorded sha256; all graphs unless names are given."""
        names = self.graphs if graph_names is None else graph_names
        wanted = {self.graph(n).file: self.graph(n).sha256 for n in names} | self.data_files
        for file, sha256 in wanted.items():
            path = self.path(file)
            if not path.is_file():
                raise ManifestError(f"{path} is missing; the manifest lists it. Export again")
            got = sha256_of(path)
            if got != sha256:
                raise ManifestError(f"{path}: sha256 {got[:12]}…, the manifest says {sha256[:12]}…. Export again")

    def save(self) -> Path:
        """Write manifest.json beside the final name, then move it there."""
        data: dict[str, Any] = {"format_version": FORMAT_VERSION}
        for f in dataclasses.fields(self):
            if f.name != "directory":
                data[f.name] = getattr(self, f.name)
        data["model"], data["codec"] = dataclasses.asdict(self.model), dataclasses.asdict(self.codec)
        data["graphs"] = {
            n: {
                **{k: getattr(g, k) for k in ("file", "sha256", "num_nodes", "max_abs_difference")},
                "spec": g.spec.to_dict(),
            }
            for n, g in self.graphs.items()
        }
        path = self.directory / MANIFEST_NAME
        write_atomically(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        return path

    @staticmethod
    def load(directory: Path) -> Manifest:
        """Read a manifest; ManifestError when it is missing, damaged, or of another format version."""
        path = directory / MANIFEST_NAME
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ManifestError(
                f"{directory} holds no {MANIFEST_NAME}; expected a directory that convert-moss export wrote"
            ) from error
        except (OSError, ValueError) as error:
            raise ManifestError(f"{path} is not readable JSON ({error}); export again") from error
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise ManifestError(f"{path}: format version {version!r}, expected {FORMAT_VERSION}; export again")
        try:
            return Manifest(
                directory=directory,
                name=data["name"],
                made_up=data["made_up"],
                source=data["source"],
                model=ModelConfig(**_tuples(data["model"])),
                codec=_codec(data["codec"]),
                limits=data["limits"],
                graphs={
                    n: GraphFile(**{**g, "spec": GraphSpec.from_dict(g["spec"])}) for n, g in data["graphs"].items()
                },
                data_files=data["data_files"],
                versions=data["versions"],
                builds=data["builds"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{path} is damaged ({type(error).__name__}: {error}); export again") from error


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def _codec(data: Mapping[str, Any]) -> CodecConfig:
    stages = {k: tuple(CodecStage(**s) for s in data[k]) for k in ("encoder", "decoder")}
    return CodecConfig(**{**data, **stages})


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside `path`, then move: a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(scratch, 0o666 & ~umask)  # mkstemp makes 0600  # noqa: PTH101
        os.replace(scratch, path)  # noqa: PTH105
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
