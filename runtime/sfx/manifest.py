"""sfx.json: what an artifacts directory of MOSS-SoundEffect holds and what it was made from; written last."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config import CodecConfig, CodecStage
from runtime.errors import ManifestError
from runtime.manifest import read_manifest_json, sha256_of, write_atomically
from runtime.sfx.config import SfxConfig
from runtime.sfx.graphs import SfxPlan
from runtime.spec import GraphSpec
from runtime.weights import WeightRecord

SFX_MANIFEST_NAME = "sfx.json"
FORMAT_VERSION = 1
EMBEDDINGS_NAME = "embeddings.bin"
TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class SfxGraph:
    """One exported graph and the file with its weights, both beside the manifest."""

    spec: GraphSpec
    file: str
    weights_file: str
    sha256: str  # of `file`
    num_nodes: int
    weight_bytes: int
    max_abs_difference: dict[str, float]  # torch against ONNX Runtime, per output; empty when it was not run
    verification: str  # what was run, or why nothing was


@dataclass(frozen=True, slots=True)
class SfxManifest:
    """Everything that running the exported graphs needs."""

    directory: Path
    source: dict[str, str]  # the checkpoint directories
    config: SfxConfig
    codec: CodecConfig
    plan: SfxPlan
    graphs: dict[str, SfxGraph]
    embeddings: dict[str, WeightRecord]
    data_files: dict[str, str]  # weights, embeddings, tokenizer -> sha256
    versions: dict[str, str]

    def graph(self, name: str) -> SfxGraph:
        """The record of one graph."""
        if name not in self.graphs:
            raise ManifestError(f"{self.directory}: no graph {name}; exported: {', '.join(self.graphs)}; export again")
        return self.graphs[name]

    def check_files(self) -> None:
        """Compare every file with its recorded hash. Reads all weights: minutes at full size."""
        wanted = {g.file: g.sha256 for g in self.graphs.values()} | self.data_files
        for file, sha256 in wanted.items():
            path = self.directory / file
            if not path.is_file():
                raise ManifestError(f"{path} is missing; {SFX_MANIFEST_NAME} lists it. Export again")
            if sha256_of(path) != sha256:
                raise ManifestError(f"{path} differs from what was exported; export again")

    def save(self) -> Path:
        """Write sfx.json beside its name, then move it there."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "directory"}
        for name in ("config", "codec", "plan"):
            data[name] = dataclasses.asdict(data[name])
        data["graphs"] = {
            n: {f.name: getattr(g, f.name) for f in dataclasses.fields(g)} | {"spec": g.spec.to_dict()}
            for n, g in self.graphs.items()
        }
        data["embeddings"] = {n: dataclasses.asdict(r) for n, r in self.embeddings.items()}
        path = self.directory / SFX_MANIFEST_NAME
        write_atomically(path, json.dumps({"format_version": FORMAT_VERSION, **data}, indent=1) + "\n")
        return path

    @staticmethod
    def load(directory: Path) -> SfxManifest:
        """Read sfx.json; ManifestError when it is missing, damaged, or of another format version."""
        path = directory / SFX_MANIFEST_NAME
        data = read_manifest_json(path, FORMAT_VERSION, "convert-moss sfx-export")
        try:
            return SfxManifest(
                directory=directory,
                source=data["source"],
                config=SfxConfig(**{**data["config"], "notices": tuple(data["config"]["notices"])}),
                codec=_codec(data["codec"]),
                plan=SfxPlan(**data["plan"]),
                graphs={
                    n: SfxGraph(**{**g, "spec": GraphSpec.from_dict(g["spec"])}) for n, g in data["graphs"].items()
                },
                embeddings={
                    n: WeightRecord(r["dtype"], tuple(r["shape"]), r["offset"]) for n, r in data["embeddings"].items()
                },
                data_files=data["data_files"],
                versions=data["versions"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{path} is damaged ({type(error).__name__}: {error}); export again") from error


def _codec(data: Mapping[str, Any]) -> CodecConfig:
    stages = {side: tuple(CodecStage(**stage) for stage in data[side]) for side in ("encoder", "decoder")}
    return CodecConfig(**{**data, **stages})
