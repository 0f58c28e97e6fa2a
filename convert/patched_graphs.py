"""The patch stage: the lowerings of a target on exported graphs, each compared with its original and recorded.

A patched file lies beside the weights, which both share: `step.onnx` -> `step.Ascend910B4-8.5-origin.onnx`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from convert.recorded_inputs import lowering_code
from convert.verify import TOLERANCES, example_axes, example_feeds
from op_patches.pipeline import apply_lowerings
from op_patches.report import LoweringReport
from op_patches.targets import Target
from runtime.backends.ort import OrtBackend
from runtime.compare import FLOAT32_SAME_MATH, compare_tensors
from runtime.errors import PatchError
from runtime.manifest import Manifest, PatchedGraph, sha256_of, write_atomically


def patch_reason(manifest: Manifest, graph: str, target: Target, batch: int = 1) -> str | None:
    """Why the lowerings have to run on a graph; None when the patched file is what they would make again."""
    record = next((p for p in manifest.patched if (p.graph, p.target) == (graph, str(target))), None)
    if record is None:
        return "not patched for this target yet"
    if manifest.patched_graph(graph, str(target)) is None:
        return f"{manifest.graph(graph).file} changed"
    if record.inputs.get("op_patches") != lowering_code():
        return "the lowerings or their tables changed"
    if record.inputs.get("batch") != _recorded_batch(target, batch).get("batch"):
        return f"the batch is {batch} now"
    path = manifest.path(record.file)
    if not path.is_file() or sha256_of(path) != record.sha256:
        return f"{record.file} is missing or changed"
    return None


def patch_graph(manifest: Manifest, graph: str, target: Target, batch: int = 1) -> PatchedGraph:
    """Lower one graph for a target, compare it with the original on ONNX Runtime, and write it and its report.

    A target that needs the batch as a number gets it, and the patched file is for that batch only.
    """
    exported = manifest.graph(graph)
    model, report = lower_graph(manifest, graph, target, batch)
    axes = {"B": batch} if target.needs_static_batch else {}
    key = f"{target.soc}-{target.cann}-{target.precision}"
    lowered = {rule.rule: rule.count for rule in report.rules if rule.count}
    file, differences = exported.file, dict[str, float]()
    if lowered:
        file = f"{Path(exported.file).stem}.{key}.onnx"
        differences = _write_verified(model, manifest, graph, manifest.path(file), axes)
    report_file = f"reports/{graph}.{key}.json"
    write_atomically(manifest.path(report_file), _report_text(report, differences))
    return PatchedGraph(
        graph=graph,
        target=str(target),
        file=file,
        sha256=sha256_of(manifest.path(file)),
        inputs={
            exported.file: exported.sha256,
            "op_patches": lowering_code(),
            **_recorded_batch(target, batch),
        },
        lowered=lowered,
        report=report_file,
    )


def lower_graph(
    manifest: Manifest, graph: str, target: Target, batch: int = 1
) -> tuple[onnx.ModelProto, LoweringReport]:
    """The graph that ATC would get for a target, and what was lowered; nothing is written."""
    exported = manifest.graph(graph)
    axes = {"B": batch} if target.needs_static_batch else {}
    shapes = {t.name: [d if isinstance(d, int) else axes.get(d, -1) for d in t.shape] for t in exported.spec.inputs}
    given = onnx.load(str(manifest.path(exported.file)), load_external_data=False)
    return apply_lowerings(given, target, input_shapes=shapes if axes else None)


def _recorded_batch(target: Target, batch: int) -> dict[str, str]:
    return {"batch": str(batch)} if target.needs_static_batch else {}


def _write_verified(
    model: onnx.ModelProto, manifest: Manifest, graph: str, path: Path, axes: Mapping[str, int]
) -> dict[str, float]:
    """Write the patched model beside its name, compare it with the exported graph, then move it there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".onnx")
    os.close(handle)
    scratch = Path(name)
    try:
        scratch.write_bytes(model.SerializeToString())
        differences = compare_graphs(manifest, graph, scratch, axes)
        scratch.chmod(0o644)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return differences


def compare_graphs(
    manifest: Manifest, graph: str, patched: Path, fixed: Mapping[str, int], seed: int = 0
) -> dict[str, float]:
    """Largest difference per output between the exported and the patched graph; PatchError beyond the tolerance.

    `fixed` holds the axes that the patched graph has bound.
    """
    spec = manifest.graph(graph).spec
    rng = np.random.default_rng(seed)
    worst: dict[str, float] = {}
    backend = OrtBackend()
    with (
        backend.open(spec, manifest.path(manifest.graph(graph).file)) as before,
        backend.open(spec.bind_known(fixed), patched) as after,
    ):
        for example in example_axes(graph, manifest.codec):
            axes = {**example, **fixed}
            feeds = example_feeds(spec.bind_known(axes), manifest.model, manifest.codec, rng)
            expected, got = before.run(feeds), after.run(feeds)
            for tensor in spec.outputs:
                tolerance = TOLERANCES.get(tensor.name, FLOAT32_SAME_MATH)
                found = compare_tensors(tensor.name, expected[tensor.name], got[tensor.name], tolerance)
                if not found.passed:
                    raise PatchError(f"{graph}: the patched graph differs at {axes}: {found.name}: {found.reason}")
                worst[tensor.name] = max(worst.get(tensor.name, 0.0), found.max_abs)
    return worst


def _report_text(report: LoweringReport, differences: dict[str, float]) -> str:
    return json.dumps({**report.to_dict(), "max_abs_difference_of_outputs": differences}, indent=1) + "\n"
