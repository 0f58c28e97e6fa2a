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
from runtime.weights import WeightRecord

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
FLOAT32 = "float32"
CPU_WEIGHTS = ("int8", "int4")  # what the weights of an export for ONNX Runtime on a CPU may be instead
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
class OmBuild:
    """One compiled .om: what ATC made, from what, with which command. Written when the file is in its place."""

    graph: str
    axes: dict[str, int]  # every axis of the graph, bound: {"B": 1, "T": 128}
    soc_version: str  # exact, as --soc_version had it: Ascend910B3
    cann: str  # the CANN release that the target names; `versions` says which one ran
    precision: str  # as --precision_mode_v2 had it: origin (float32 kept), fp16, mixed_float16 …
    file: str  # beside the manifest
    sha256: str
    num_bytes: int
    argv: tuple[str, ...]
    inputs: dict[str, str]  # what went in: file -> sha256
    recipe: str  # one hash of interface, inputs and settings: unchanged means that compiling again gives the same
    versions: dict[str, str]  # what ran: cann, atc, host
    log: str  # ATC's whole output, beside the manifest
    seconds: float
    fake: bool = False  # made by the fake atc of the tests: only the simulator runs it, no result is a device result

    def __post_init__(self) -> None:
        unbound = [axis for axis, size in self.axes.items() if not isinstance(size, int) or size < 1]
        if unbound or not self.argv:
            raise ManifestError(f"{self.graph}: a build needs bound axes and a command, got {self.axes}, {self.argv}")

    @property
    def key(self) -> tuple[str, tuple[tuple[str, int], ...], str, str]:
        """What may exist once: graph, axes, SoC and precision."""
        return self.graph, tuple(sorted(self.axes.items())), self.soc_version, self.precision

    def bound_spec(self, spec: GraphSpec) -> GraphSpec:
        """The interface of the compiled graph: the exported one with this build's axes."""
        return spec.bind(**self.axes)

    def to_dict(self) -> dict[str, Any]:
        """As JSON data, for the manifest."""
        return {**dataclasses.asdict(self), "argv": list(self.argv)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> OmBuild:
        """The inverse of to_dict."""
        return OmBuild(**{**data, "argv": tuple(data["argv"])})


@dataclass(frozen=True, slots=True)
class PatchedGraph:
    """One exported graph after the lowerings of a target; the interface is that of the exported graph."""

    graph: str
    target: str  # cann=…,soc=…,precision=…
    file: str  # beside the manifest and the weights; the exported file itself when nothing had to be lowered
    sha256: str
    inputs: dict[str, str]  # the exported file, and "op_patches" for the code -> sha256
    lowered: dict[str, int]  # lowering -> nodes it replaced
    report: str  # the whole report, beside the manifest


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
    weights: dict[str, WeightRecord]  # where each state tensor lies in weights.bin
    versions: dict[str, str]
    patched: tuple[PatchedGraph, ...] = ()
    builds: tuple[OmBuild, ...] = ()  # one record per .om, written by the ATC step
    cpu_weights: str = FLOAT32  # int8, int4: for ONNX Runtime on a CPU alone (convert/cpu_weights.py)

    @property
    def notice(self) -> str | None:
        """The sentence that must stand beside every result of made-up weights."""
        return MADE_UP_NOTICE if self.made_up else None

    def require_float32(self, reader: str) -> None:
        """Refuse reduced weights for everything but ONNX Runtime on a CPU, whose own operators read them."""
        if self.cpu_weights != FLOAT32:
            raise ManifestError(
                f"{self.directory} has {self.cpu_weights} weights, which only operators of ONNX Runtime on a CPU read; "
                f"{reader} needs float32: convert-moss export … without --cpu-weights"
            )

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

    def builds_of(self, graph: str, soc_version: str | None = None, precision: str | None = None) -> list[OmBuild]:
        """The compiled forms of one graph, smallest axes first; all SoCs and precisions unless given."""
        found = [
            b
            for b in self.builds
            if b.graph == graph and soc_version in (None, b.soc_version) and precision in (None, b.precision)
        ]
        return sorted(found, key=lambda b: b.key)

    def check_build(self, build: OmBuild) -> Path:
        """The path of a compiled graph; ManifestError when it is missing or is not what ATC wrote."""
        path = self.path(build.file)
        if not path.is_file():
            raise ManifestError(f"{path} is missing; the manifest lists it. Compile again: convert-moss atc")
        got = sha256_of(path)
        if got != build.sha256:
            raise ManifestError(
                f"{path}: sha256 {got[:12]}…, the manifest says {build.sha256[:12]}…. Compile again: convert-moss atc"
            )
        return path

    def patched_graph(self, graph: str, target: str) -> PatchedGraph | None:
        """What the lowerings of `target` made of a graph; None when they never ran on the graph as it is now."""
        exported = self.graph(graph)
        for patched in self.patched:
            if (patched.graph, patched.target) == (graph, target):
                return patched if patched.inputs.get(exported.file) == exported.sha256 else None
        return None

    def with_patched(self, patched: PatchedGraph) -> Manifest:
        """This manifest with `patched` added; it replaces the one of the same graph and target."""
        key = (patched.graph, patched.target)
        kept = tuple(p for p in self.patched if (p.graph, p.target) != key)
        return dataclasses.replace(self, patched=(*kept, patched))

    def with_build(self, build: OmBuild) -> Manifest:
        """This manifest with `build` added; it replaces the one with the same key."""
        kept = tuple(b for b in self.builds if b.key != build.key)
        return dataclasses.replace(self, builds=(*kept, build))

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
        data["patched"] = [dataclasses.asdict(patched) for patched in self.patched]
        data["weights"] = {n: dataclasses.asdict(w) for n, w in self.weights.items()}
        data["builds"] = [build.to_dict() for build in self.builds]
        path = self.directory / MANIFEST_NAME
        write_atomically(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        return path

    @staticmethod
    def load(directory: Path) -> Manifest:
        """Read a manifest; ManifestError when it is missing, damaged, or of another format version."""
        path = directory / MANIFEST_NAME
        data = read_manifest_json(path, FORMAT_VERSION, "convert-moss export")
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
                weights={n: WeightRecord(**_tuples(w)) for n, w in data["weights"].items()},
                versions=data["versions"],
                patched=tuple(PatchedGraph(**patched) for patched in data["patched"]),
                builds=tuple(OmBuild.from_dict(build) for build in data["builds"]),
                cpu_weights=data.get("cpu_weights", FLOAT32),  # manifests before 2026-12 have no such field
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{path} is damaged ({type(error).__name__}: {error}); export again") from error


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def _codec(data: Mapping[str, Any]) -> CodecConfig:
    stages = {k: tuple(CodecStage(**s) for s in data[k]) for k in ("encoder", "decoder")}
    return CodecConfig(**{**data, **stages})


def read_manifest_json(path: Path, format_version: int, writer: str) -> dict[str, Any]:
    """The JSON of a manifest that `writer` wrote; ManifestError when it is missing, damaged or of another version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ManifestError(f"{path.parent} holds no {path.name}; expected a directory that {writer} wrote") from error
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} is not readable JSON ({error}); export again") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != format_version:
        raise ManifestError(f"{path}: format version {version!r}, expected {format_version}; export again")
    return dict(data)


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
