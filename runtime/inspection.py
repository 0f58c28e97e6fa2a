"""What a graph file or an artifacts directory holds: interface, target, hashes, sizes, node and engine counts.

A real .om is opaque without CANN: only its size, hash and first bytes can be read here, and what the manifest beside it
recorded when it was compiled. Engine counts are the prediction of the readiness check; `convert-moss check` gives them
in a process of its own, since runtime knows nothing of op_patches.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.backends.fake_om import is_fake_om, read_fake_om
from runtime.errors import BackendUnavailableError, ManifestError, SpecMismatchError
from runtime.manifest import MANIFEST_NAME, Manifest, OmBuild, sha256_of
from runtime.spec import GraphSpec


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output as the file has it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class FileReport:
    """One graph file. A field that this machine cannot know is None, and `remarks` says why."""

    path: str
    kind: str  # onnx, om, or fake om (what the fake atc of the tests wrote)
    num_bytes: int
    sha256: str
    inputs: tuple[Tensor, ...] | None
    outputs: tuple[Tensor, ...] | None
    target: dict[str, str] = field(default_factory=dict)  # soc, cann, precision; opset and IR version of ONNX
    external_data: dict[str, int] = field(default_factory=dict)  # file -> bytes, -1 when it is missing
    nodes: dict[str, int] | None = None  # by operator, constants left out
    engines: dict[str, int] | None = None  # predicted for a target
    remarks: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For a person to read."""
        lines = [f"{self.path}: {self.kind}, {self.num_bytes:,} bytes, sha256 {self.sha256}"]
        lines += [f"  {key}: {value}" for key, value in self.target.items()]
        for side, tensors in (("in ", self.inputs), ("out", self.outputs)):
            lines += [f"  {side}  {tensor}" for tensor in tensors or ()]
        for file, size in self.external_data.items():
            lines.append(f"  external data {file}: " + (f"{size:,} bytes" if size >= 0 else "MISSING"))
        if self.nodes is not None:
            listed = ", ".join(
                f"{op} {n}" for op, n in sorted(self.nodes.items(), key=lambda item: (-item[1], item[0]))
            )
            lines.append(f"  {sum(self.nodes.values())} nodes: {listed}")
        if self.engines is not None:
            lines.append(
                "  engines (predicted): "
                + ", ".join(f"{name} {count}" for name, count in self.engines.items() if count)
            )
        return lines + [f"  note: {remark}" for remark in self.remarks]


@dataclass(frozen=True, slots=True)
class ArtifactsReport:
    """An artifacts directory: its manifest, and every file that the manifest lists."""

    directory: str
    name: str
    notice: str | None
    cpu_weights: str
    limits: dict[str, int]
    files: tuple[FileReport, ...]

    def lines(self) -> list[str]:
        """For a person to read."""
        limits = ", ".join(f"{name} {value}" for name, value in self.limits.items())
        lines = [f"{self.directory}: {self.name} ({limits}, weights {self.cpu_weights})"]
        if self.notice:
            lines.append(f"note: {self.notice}")
        for report in self.files:
            lines += report.lines()
        return lines


def inspect_path(path: Path, target: str | None = None) -> FileReport | ArtifactsReport:
    """Look at an .om, an .onnx or an artifacts directory; `target` asks for engine counts."""
    if path.is_dir():
        return _inspect_artifacts(Manifest.load(path), target)
    if not path.is_file():
        raise ManifestError(f"{path} does not exist; expected an .om or .onnx file or an artifacts directory")
    return _inspect_file(path, _manifest_beside(path), target)


def _inspect_artifacts(manifest: Manifest, target: str | None) -> ArtifactsReport:
    listed = [graph.file for graph in manifest.graphs.values()]
    listed += [patched.file for patched in manifest.patched if patched.file not in listed]
    listed += [build.file for build in manifest.builds]
    missing = [file for file in listed if not manifest.path(file).is_file()]
    if missing:
        raise ManifestError(f"{manifest.directory}: the manifest lists {', '.join(missing)}, missing; export again")
    files = tuple(_inspect_file(manifest.path(file), manifest, target) for file in dict.fromkeys(listed))
    return ArtifactsReport(
        str(manifest.directory), manifest.name, manifest.notice, manifest.cpu_weights, dict(manifest.limits), files
    )


def _manifest_beside(path: Path) -> Manifest | None:
    """The manifest of the nearest directory above that has one: builds lie in directories of their own."""
    for directory in list(path.resolve().parents)[:3]:
        if (directory / MANIFEST_NAME).is_file():
            return Manifest.load(directory)
    return None


def _inspect_file(path: Path, manifest: Manifest | None, target: str | None) -> FileReport:
    with path.open("rb") as file:
        start = file.read(4)
    if path.suffix == ".onnx":
        return _inspect_onnx(path, manifest, target)
    return _inspect_fake_om(path, manifest) if is_fake_om(path) else _inspect_om(path, manifest, start)


def _inspect_onnx(path: Path, manifest: Manifest | None, target: str | None) -> FileReport:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise BackendUnavailableError(
            "inspecting an .onnx file needs the package onnx; run: pip install 'moss-tts-nano-ascend[convert]'"
        ) from error
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise SpecMismatchError(f"{path} is no ONNX file ({error})") from error
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    external = {
        entry.value for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    sizes = {f: (path.parent / f).stat().st_size if (path.parent / f).is_file() else -1 for f in sorted(external)}
    opsets = ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in model.opset_import)
    return FileReport(
        str(path),
        "onnx",
        path.stat().st_size,
        sha256_of(path),
        inputs=tuple(_tensor(value, onnx) for value in graph.input if value.name not in constants),
        outputs=tuple(_tensor(value, onnx) for value in graph.output),
        target={"opset": opsets, "IR version": str(model.ir_version), "initializers": str(len(constants))},
        external_data=sizes,
        nodes=dict(Counter(node.op_type for node in graph.node if node.op_type != "Constant")),
        engines=engine_counts(path, target) if target else None,
        remarks=_recorded_hash(path, manifest),
    )


def _tensor(value: Any, onnx: Any) -> Tensor:
    kind = value.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return Tensor(value.name, dtype, tuple(d.dim_param or d.dim_value for d in kind.shape.dim))


def _recorded_hash(path: Path, manifest: Manifest | None) -> tuple[str, ...]:
    """Whether the manifest knows this file, and whether it is still the same."""
    if manifest is None:
        return ("no manifest.json beside it: where it comes from is not recorded",)
    recorded = {g.file: (f"exported graph {n}", g.sha256) for n, g in manifest.graphs.items()}
    recorded |= {p.file: (f"{p.graph} patched for {p.target}", p.sha256) for p in manifest.patched}
    recorded |= {b.file: (f"{b.graph} compiled for {b.soc_version}", b.sha256) for b in manifest.builds}
    for file, (what, sha256) in recorded.items():
        if manifest.path(file).resolve() == path.resolve():
            same = sha256_of(path) == sha256
            return (what if same else f"{what}, but CHANGED since: the manifest says sha256 {sha256}",)
    return (f"not listed in {manifest.directory / MANIFEST_NAME}",)


def _inspect_fake_om(path: Path, manifest: Manifest | None) -> FileReport:
    om = read_fake_om(path)

    def tensors(side: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(Tensor(t.name, t.dtype, t.shape) for t in side)

    return FileReport(
        str(path),
        "fake om",
        path.stat().st_size,
        sha256_of(path),
        tensors(om.inputs),
        tensors(om.outputs),
        target={"soc": om.soc_version, "cann": om.cann_version, "precision": om.precision},
        external_data={w.location: w.num_bytes for w in om.weights},
        remarks=(
            "made by the fake atc of the tests: the simulator runs it, a device does not",
            *_recorded_hash(path, manifest),
        ),
    )


def _inspect_om(path: Path, manifest: Manifest | None, start: bytes) -> FileReport:
    build = _build_of(path, manifest)
    remarks = list(_recorded_hash(path, manifest))
    remarks.append(f"starts with {start!r}; without CANN nothing more of a compiled graph can be read")
    if build is None or manifest is None:
        return FileReport(
            str(path), "om", path.stat().st_size, sha256_of(path), None, None, remarks=(*remarks, _ask_atc(path))
        )
    spec = build.bound_spec(manifest.graph(build.graph).spec)
    remarks.append("interface and target as the manifest recorded them when it was compiled")
    return FileReport(
        str(path),
        "om",
        path.stat().st_size,
        sha256_of(path),
        *_interface(spec),
        target={
            "soc": build.soc_version,
            "cann": build.versions.get("cann", build.cann),
            "precision": build.precision,
            "axes": ", ".join(f"{axis} = {size}" for axis, size in build.axes.items()),
            "log": build.log,
        },
        remarks=tuple(remarks),
    )


def _ask_atc(path: Path) -> str:
    return f"on a machine with CANN ask: atc --mode=6 --om={path}"


def _build_of(path: Path, manifest: Manifest | None) -> OmBuild | None:
    builds = manifest.builds if manifest else ()
    return next((b for b in builds if manifest and manifest.path(b.file).resolve() == path.resolve()), None)


def _interface(spec: GraphSpec) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    def tensors(side: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(Tensor(t.name, t.dtype, t.shape) for t in side)

    return tensors(spec.inputs), tensors(spec.outputs)


def engine_counts(path: Path, target: str) -> dict[str, int]:
    """Nodes per engine as `convert-moss check` predicts them for a target."""
    code = "from convert.cli import cli; cli()"
    command = [sys.executable, "-c", code, "check", str(path), "--target", target, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):
        raise SpecMismatchError(f"{path}: convert-moss check could not be made: {result.stderr.strip()}")
    reports: list[Mapping[str, Any]] = json.loads(result.stdout)["reports"]
    return {name: int(count) for name, count in reports[0]["engines"].items()}


def as_data(report: FileReport | ArtifactsReport) -> dict[str, Any]:
    """As JSON data."""
    return dataclasses.asdict(report)
