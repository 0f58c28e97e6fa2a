"""An artifacts directory whose graphs are lowered for a target and rounded as a precision mode rounds them.

The directory is made to be measured on a CPU (run-om precision) and thrown away; nothing in it goes to a device.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx
from onnx import ModelProto

from op_patches.pipeline import apply_lowerings
from op_patches.precision import (
    MOVES,
    NOTHING,
    Keep,
    Mode,
    NodeRange,
    read_probes,
    reduce_precision,
    round_weights,
    with_probes,
)
from op_patches.targets import Target
from runtime.manifest import GraphFile, Manifest, sha256_of
from runtime.spec import Array

ROUNDED_NAME = "rounded.bin"


class ReducedArtifacts:
    """Lowers the graphs of a manifest once; writes them rounded as often as a search asks."""

    def __init__(self, manifest: Manifest, directory: Path, mode: Mode, target: Target, names: Iterable[str]) -> None:
        self.manifest, self.directory, self.mode, self.target = manifest, directory, mode, target
        self.lowered = {name: self._lower(name) for name in names}
        directory.mkdir(parents=True, exist_ok=True)
        weights = {e.value for m in self.lowered.values() for t in m.graph.initializer for e in t.external_data
                   if e.key == "location"}  # fmt: skip
        for file in sorted(weights | set(manifest.data_files)):
            shutil.copyfile(manifest.path(file), directory / file)  # onnx refuses weights behind links
        round_weights(self.lowered.values(), manifest.directory, directory / ROUNDED_NAME, mode)

    def _lower(self, name: str) -> ModelProto:
        """The patched file when the manifest has one for this target, else the lowerings, now."""
        patched = self.manifest.patched_graph(name, str(self.target))
        if patched is not None:
            return onnx.load(str(self.manifest.path(patched.file)), load_external_data=False)
        model = onnx.load(str(self.manifest.path(self.manifest.graph(name).file)), load_external_data=False)
        return apply_lowerings(model, self.target)[0]

    def write(self, keep: Keep = NOTHING, names: Iterable[str] | None = None) -> Manifest:
        """Write the rounded graphs; return a manifest of this directory that has them alone."""
        graphs: dict[str, GraphFile] = {}
        for name in self.lowered if names is None else names:
            reduced = reduce_precision(self.lowered[name], self.mode, self.target, keep, ROUNDED_NAME)
            path = self.directory / f"{name}.onnx"
            path.write_bytes(reduced.model.SerializeToString())
            spec = self.manifest.graph(name).spec
            graphs[name] = GraphFile(spec, path.name, sha256_of(path), len(reduced.model.graph.node))
        return dataclasses.replace(
            self.manifest, directory=self.directory, name=f"{self.manifest.name} as {self.mode.value}", graphs=graphs,
            patched=(), builds=(),
        )  # fmt: skip

    def reduced_nodes(self, names: Iterable[str]) -> dict[str, set[str]]:
        """ONNX type -> names of the nodes that compute in the mode's precision, over the named graphs."""
        found: dict[str, set[str]] = {}
        for name in names:
            reduced = reduce_precision(self.lowered[name], self.mode, self.target, NOTHING, ROUNDED_NAME)
            types = {node.name: node.op_type for node in self.lowered[name].graph.node}
            for node in reduced.nodes:
                if types[node] not in MOVES:
                    found.setdefault(types[node], set()).add(node)
        return found

    def ranges(self, name: str, feeds: Mapping[str, Array], keep: Keep = NOTHING) -> list[NodeRange]:
        """What every reduced node of a graph computes on these feeds, in order."""
        import onnxruntime

        model, probed = with_probes(reduce_precision(self.lowered[name], self.mode, self.target, keep, ROUNDED_NAME))
        path = self.directory / f"{name}.probe.onnx"
        path.write_bytes(model.SerializeToString())
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        outputs = [o.name for o in session.get_outputs() if o.name.startswith("probe/")]
        return read_probes(probed, session.run(outputs, dict(feeds)))
