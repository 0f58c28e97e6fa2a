"""The stand-in for a compiled .om: what the fake `atc` of the tests writes and what the pyACL simulator executes.

A zip with two members: `om.json` (everything pyACL can tell about a model, and how it was built) and `graph.onnx` (the
graph that was "compiled"). Weights are not copied: `weights_directory` is the directory that the graph's external data
locations are relative to, and each file is pinned by its size and sha256. A real .om starts with other bytes, so
`is_fake_om` tells the two apart, and nothing that ran on a fake can pass for a device result.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import BackendError
from runtime.manifest import sha256_of, write_atomically

FORMAT = "moss-fake-om"
FORMAT_VERSION = 1
_DESCRIPTION, _GRAPH = "om.json", "graph.onnx"


@dataclass(frozen=True, slots=True)
class OmTensor:
    """One input or output as the compiled model describes it."""

    name: str  # inputs: the ONNX name; outputs: "<node>:<index>:<ONNX name>", as ATC writes them
    onnx_name: str
    dtype: str  # NumPy name; the ONNX type also in reduced precision builds, as ATC keeps it
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """An external data file of the graph, as it was when the graph was compiled."""

    location: str  # relative to weights_directory
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FakeOm:
    """A "compiled" graph; inputs and outputs are in the order of the compiled model, which need not be ONNX's."""

    graph_onnx: bytes
    inputs: tuple[OmTensor, ...]
    outputs: tuple[OmTensor, ...]
    soc_version: str  # exact, e.g. Ascend910B3: the device must be the same
    cann_version: str
    precision: str  # value of --precision_mode_v2: origin, fp16, mixed_float16, …
    weights_directory: str  # absolute
    weights: tuple[WeightsFile, ...] = ()
    options: dict[str, str] = field(default_factory=dict)  # every ATC option as given
    keep_dtype: tuple[str, ...] = ()  # lines of --keep_dtype: ONNX node names, or OpType::X
    modify_mixlist: dict[str, Any] = field(default_factory=dict)
    weight_bytes: int = 0  # what acl.mdl.query_size reports
    work_bytes: int = 0

    def check_weights(self) -> None:
        """BackendError when an external data file is missing or is not the one that was compiled."""
        for weights in self.weights:
            path = Path(self.weights_directory) / weights.location
            if not path.is_file():
                raise BackendError(f"{path} is missing; the fake .om refers to it. Compile again")
            if path.stat().st_size != weights.num_bytes or sha256_of(path) != weights.sha256:
                raise BackendError(f"{path} changed after the fake .om was made from it. Compile again")


def is_fake_om(path: Path) -> bool:
    """True for a file that `write_fake_om` made; False for anything else, a real .om included."""
    try:
        with zipfile.ZipFile(path) as archive:
            description = json.loads(archive.read(_DESCRIPTION))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return False
    return isinstance(description, dict) and description.get("format") == FORMAT


def write_fake_om(path: Path, om: FakeOm) -> None:
    """Write the container beside `path`, then move it there."""
    description = {"format": FORMAT, "format_version": FORMAT_VERSION}
    description |= {f.name: getattr(om, f.name) for f in dataclasses.fields(om) if f.name != "graph_onnx"}
    for name in ("inputs", "outputs", "weights"):
        description[name] = [dataclasses.asdict(item) for item in getattr(om, name)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        # A fixed date: the same build gives the same bytes.
        archive.writestr(zipfile.ZipInfo(_DESCRIPTION), json.dumps(description, indent=1))
        archive.writestr(zipfile.ZipInfo(_GRAPH), om.graph_onnx)
    write_atomically(path, buffer.getvalue())


def read_fake_om(path: Path) -> FakeOm:
    """Read a container; BackendError when it is a real .om, damaged, or of another format version."""
    try:
        with zipfile.ZipFile(path) as archive:
            description = json.loads(archive.read(_DESCRIPTION))
            graph = archive.read(_GRAPH)
    except FileNotFoundError as error:
        raise BackendError(f"{path} does not exist; compile it with convert-moss atc") from error
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BackendError(
            f"{path} is no fake .om ({type(error).__name__}: {error}). The simulator runs only what the fake atc of "
            "the tests wrote; a real .om needs CANN and a device"
        ) from error
    if not isinstance(description, dict):
        raise BackendError(f"{path} is damaged: {_DESCRIPTION} is no object. Compile again")
    if description.get("format") != FORMAT or description.get("format_version") != FORMAT_VERSION:
        raise BackendError(
            f"{path}: expected {FORMAT} version {FORMAT_VERSION}, got {description.get('format')} "
            f"version {description.get('format_version')}. Compile again"
        )
    try:
        return _from_description(description, graph)
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(f"{path} is damaged ({type(error).__name__}: {error}). Compile again") from error


def _from_description(data: dict[str, Any], graph: bytes) -> FakeOm:
    def tensors(rows: list[dict[str, Any]]) -> tuple[OmTensor, ...]:
        return tuple(OmTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows)

    values = {k: v for k, v in data.items() if k not in ("format", "format_version")}
    values["inputs"], values["outputs"] = tensors(data["inputs"]), tensors(data["outputs"])
    values["weights"] = tuple(WeightsFile(**row) for row in data["weights"])
    values["keep_dtype"] = tuple(data["keep_dtype"])
    return FakeOm(graph_onnx=graph, **values)
