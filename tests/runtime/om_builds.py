"""Compile graphs into fake .om files without the fake atc: what the simulator needs, in an order that is not ONNX's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from runtime.backends.fake_om import FakeOm, OmTensor, WeightsFile, write_fake_om
from runtime.manifest import Manifest, OmBuild, sha256_of
from runtime.spec import GraphSpec

SOC, CANN = "Ascend910B4", "8.5.0"


def write_om(
    path: Path,
    graph_onnx: bytes,
    spec: GraphSpec,
    weights: tuple[WeightsFile, ...] = (),
    soc: str = SOC,
    cann: str = CANN,
    device_bytes: int = 4096,
) -> None:
    """A fake .om of a bound spec; inputs and outputs come in reverse order, outputs under ATC's names."""
    outputs = [OmTensor(f"/node/{t.name}:0:{t.name}", t.name, t.dtype, t.bound_shape) for t in spec.outputs]
    om = FakeOm(
        graph_onnx=graph_onnx,
        inputs=tuple(OmTensor(t.name, t.name, t.dtype, t.bound_shape) for t in reversed(spec.inputs)),
        outputs=tuple(reversed(outputs)),
        soc_version=soc,
        cann_version=cann,
        precision="origin",
        weights_directory=str(path.parent.resolve()),
        weights=weights,
        weight_bytes=device_bytes,
        work_bytes=device_bytes,
    )
    write_fake_om(path, om)


def compile_manifest(
    manifest: Manifest, wanted: Mapping[str, list[dict[str, int]]], soc: str = SOC, cann: str = CANN
) -> Manifest:
    """Compile graphs of a manifest for the given axes and record the builds; the manifest is not saved."""
    file = "weights.bin"
    weights = WeightsFile(file, manifest.path(file).stat().st_size, sha256_of(manifest.path(file)))
    for name, bindings in wanted.items():
        graph = manifest.graph(name)
        for axes in bindings:
            om = f"{name}_{'_'.join(map(str, axes.values()))}_{soc}.om"
            path = manifest.path(om)
            write_om(path, manifest.path(graph.file).read_bytes(), graph.spec.bind(**axes), (weights,), soc, cann)
            build = OmBuild(
                graph=name,
                axes=dict(axes),
                soc_version=soc,
                cann=cann,
                precision="origin",
                file=om,
                sha256=sha256_of(path),
                num_bytes=path.stat().st_size,
                argv=("atc",),
                recipe="",
                inputs={},
                versions={"cann": cann},
                log="",
                seconds=0.0,
                fake=True,
            )
            manifest = manifest.with_build(build)
    return manifest


def compile_llm(
    manifest: Manifest, capacity: int, buckets: tuple[int, ...], soc: str = SOC, cann: str = CANN
) -> Manifest:
    """Everything that the OM frame model can use: prefill buckets, frame, step_frame and step."""
    step = [{"B": 1, "C": capacity}]
    return compile_manifest(
        manifest,
        {"prefill": [{"B": 1, "T": t} for t in buckets], "frame": [{"B": 1}], "step_frame": step, "step": step},
        soc,
        cann,
    )


def without_fused(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, builds=tuple(b for b in manifest.builds if b.graph != "step_frame"))
