"""Compiled .om graphs through pyACL: load, compare with the spec, run with persistent buffers.

`OmModel` is a loaded file whose tensors are resolved by name; `OmSession` runs it with NumPy in and out; the
frame model of runtime/om_frame_model.py uses OmModel directly and keeps everything on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.backends.acl_api import ModelTensor, release_number
from runtime.backends.om_device import OmDevice, OmStream, Releases, Traffic, open_device
from runtime.backends.om_layout import pack
from runtime.errors import BackendError, BackendUnavailableError, SpecMismatchError
from runtime.manifest import Manifest, OmBuild
from runtime.spec import Array, GraphSpec, TensorSpec, numpy_dtype

GEAR_INPUT = "ascend_mbatch_shape_data"  # the extra input of a model compiled with --dynamic_dims
SIZE_TOLERANCE = 64  # the runtime accepts a buffer that is up to 64 bytes smaller than the model asks (C.5)


def check_build(build: OmBuild, device: OmDevice) -> None:
    """Refuse, before loading, a file that the manifest says was built for something else."""
    simulated = device.acl.simulated
    if build.fake and not simulated:
        raise BackendUnavailableError(
            f"{build.file} was made by the fake atc of the tests; a device cannot run it. "
            "Compile it with CANN (convert-moss atc), or run it with --simulate"
        )
    if simulated and not build.fake:
        raise BackendUnavailableError(
            f"{build.file} is a real .om; the simulator runs only what the fake atc made. Run it on a device"
        )
    if build.soc_version != device.soc:
        raise SpecMismatchError(
            f"{build.file} was compiled for {build.soc_version}, device {device.id} is {device.soc}. "
            f"Compile again: convert-moss atc … --target soc={device.soc}"
        )
    built_by = build.versions.get("cann", build.cann)
    if device.cann != "unknown" and release_number(built_by) > release_number(device.cann):
        raise SpecMismatchError(
            f"{build.file} was compiled by CANN {built_by}, this machine runs CANN {device.cann}: the runtime must not "
            "be older than the compiler. Update CANN here or compile with this release"
        )


class OmModel:
    """One loaded .om; `releases` of the owner frees it."""

    def __init__(self, device: OmDevice, spec: GraphSpec, path: Path, releases: Releases) -> None:
        if not path.is_file():
            raise BackendError(f"{path} does not exist; compile it with convert-moss atc")
        acl = device.acl
        work, weights = acl.query_model_size(str(path))
        free, total = acl.memory_info()
        if work + weights > free:
            raise BackendError(
                f"{path.name} needs {work + weights:,} bytes on device {device.id}, {free:,} of {total:,} are free; "
                "end other processes on it, or load fewer prefill buckets"
            )
        self.device, self.device_bytes = device, work + weights
        self.handle = acl.load_model(str(path))
        releases.add(acl.unload_model, self.handle)
        description = acl.create_description()
        releases.add(acl.destroy_description, description)
        acl.describe(description, self.handle)
        inputs, outputs = acl.model_tensors(description, "input"), acl.model_tensors(description, "output")
        self.spec = match_interface(spec, inputs, outputs, path)
        self._order = {"input": [t.name for t in inputs], "output": [_onnx_name(t.name) for t in outputs]}

    def order(self, side: str) -> list[str]:
        """ONNX names of the inputs or outputs in the order of the compiled model."""
        return list(self._order[side])

    def create_dataset(self, releases: Releases) -> int:
        """An empty dataset; create it before the memory that it will point to, so that it is freed after it."""
        dataset = self.device.acl.create_dataset()
        releases.add(self.device.acl.destroy_dataset, dataset)
        return dataset

    def fill_dataset(self, dataset: int, side: str, pointers: Mapping[str, int], releases: Releases) -> None:
        """Point a dataset at device memory, by tensor name, in the order of the compiled model."""
        acl = self.device.acl
        tensors = {t.name: t for t in (self.spec.inputs if side == "input" else self.spec.outputs)}
        for name in self._order[side]:
            buffer = acl.create_data_buffer(pointers[name], tensors[name].num_bytes)
            releases.add(acl.destroy_data_buffer, buffer)
            acl.add_dataset_buffer(dataset, buffer)


def match_interface(
    spec: GraphSpec, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor], path: Path
) -> GraphSpec:
    """Compare a loaded model with the spec, by name; return the spec with the axes that the model was compiled for."""
    if any(t.name == GEAR_INPUT for t in inputs):
        raise SpecMismatchError(f"{path} was compiled with --dynamic_dims; compile it with fixed shapes")
    axes: dict[str, int] = {}
    named_outputs = [ModelTensor(_onnx_name(t.name), t.dtype, t.shape, t.num_bytes) for t in outputs]
    for side, expected, found in (("input", spec.inputs, list(inputs)), ("output", spec.outputs, named_outputs)):
        by_name = {t.name: t for t in found}
        missing = [t.name for t in expected if t.name not in by_name]
        extra = [name for name in by_name if name not in {t.name for t in expected}]
        if missing or extra:
            raise SpecMismatchError(
                f"{path}: {side}s differ from {spec.name}: missing {missing or 'none'}, unexpected {extra or 'none'} "
                "(ATC prunes inputs that nothing reads). Export and compile again"
            )
        for tensor in expected:
            _match_tensor(tensor, by_name[tensor.name], axes, path)
    return spec.bind(**{axis: axes[axis] for axis in spec.dynamic_axes()})


def _match_tensor(tensor: TensorSpec, found: ModelTensor, axes: dict[str, int], path: Path) -> None:
    got = f"{found.dtype}[{', '.join(map(str, found.shape))}]"
    mismatch = SpecMismatchError(
        f"{path}: {tensor.name}: expected {tensor.bind(axes)}, the file was compiled for {got}; compile again"
    )
    if found.dtype != tensor.dtype or len(found.shape) != len(tensor.shape):
        raise mismatch
    for axis, size in zip(tensor.shape, found.shape, strict=True):
        if size < 1 or (axis if isinstance(axis, int) else axes.setdefault(axis, size)) != size:
            raise mismatch
    need = tensor.bind(axes).num_bytes
    if not need <= found.num_bytes <= need + SIZE_TOLERANCE:
        raise SpecMismatchError(
            f"{path}: {tensor.name}: {got} takes {need} bytes, the file asks for {found.num_bytes} (0 means a dynamic "
            "shape); compile with fixed shapes"
        )


def _onnx_name(output: str) -> str:
    """ATC names outputs "<node>:<index>:<ONNX name>" (A.6)."""
    return output.split(":", 2)[-1]


@dataclass(frozen=True, slots=True)
class _Side:
    """Inputs or outputs of a session: a layout, the same in pinned and in device memory."""

    tensors: tuple[TensorSpec, ...]
    offsets: dict[str, int]
    num_bytes: int

    @staticmethod
    def of(tensors: tuple[TensorSpec, ...]) -> _Side:
        block = pack({t.name: t.num_bytes for t in tensors})
        return _Side(tensors, block.offsets, block.num_bytes)


class OmSession:
    """One .om with NumPy feeds and results: one copy up, one launch, one copy down, one synchronize per run.

    Sessions may be used from any thread; runs of one session take turns.
    """

    def __init__(self, device: OmDevice, spec: GraphSpec, path: Path) -> None:
        self.device = device.share()
        self._lock = threading.Lock()
        self._releases = Releases()
        self._releases.add(self.device.close)
        self._closed = False
        try:
            self.device.activate()
            self._open(spec, path)
        except BaseException:
            self._releases.abandon()
            raise

    def _open(self, spec: GraphSpec, path: Path) -> None:
        releases, device = self._releases, self.device
        self._stream = OmStream(device, releases)
        self._model = OmModel(device, spec, path, releases)
        self.spec = self._model.spec
        self._datasets = {side: self._model.create_dataset(releases) for side in ("input", "output")}
        self._sides = {"input": _Side.of(self.spec.inputs), "output": _Side.of(self.spec.outputs)}
        self._pinned = {s: device.malloc_host(side.num_bytes, releases) for s, side in self._sides.items()}
        self._device_memory = {s: device.malloc(side.num_bytes, releases) for s, side in self._sides.items()}
        for s, side in self._sides.items():
            pointers = {name: self._device_memory[s] + offset for name, offset in side.offsets.items()}
            self._model.fill_dataset(self._datasets[s], s, pointers, releases)
        self._releases.add(self._stream.drain)

    @property
    def traffic(self) -> Traffic:
        return self._stream.traffic

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        with self._lock:
            if self._closed:
                raise BackendError(f"{self.spec.name}: the session is closed; open it again")
            self.spec.check_feeds(feeds)
            self.device.activate()
            for tensor in self.spec.inputs:
                self._view("input", tensor)[...] = feeds[tensor.name]
            try:
                self._run()
            except BackendError:
                self._stream.recover()
                raise
            return {tensor.name: self._view("output", tensor).copy() for tensor in self.spec.outputs}

    def _run(self) -> None:
        stream, memory, pinned = self._stream, self._device_memory, self._pinned
        stream.upload(memory["input"], pinned["input"], self._sides["input"].num_bytes)
        stream.launch(self._model.handle, self._datasets["input"], self._datasets["output"])
        stream.download(pinned["output"], memory["output"], self._sides["output"].num_bytes)
        stream.synchronize()

    def _view(self, side: str, tensor: TensorSpec) -> Array:
        start = self._sides[side].offsets[tensor.name]
        raw = self._pinned[side].data[start : start + tensor.num_bytes]
        return raw.view(numpy_dtype(tensor.dtype)).reshape(tensor.bound_shape)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._releases.add(self.device.activate)
                self._releases.close()

    def __enter__(self) -> OmSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OmBackend:
    """Opens .om files on one device: given ones, or those that a manifest lists for this device.

    Axes that a spec leaves open are bound to what the file was compiled for. `opened` says what was loaded.
    """

    def __init__(self, device_id: int = 0, manifest: Manifest | None = None, precision: str | None = None) -> None:
        self.device = open_device(device_id)
        self.name = self.device.label
        self.opened: list[str] = []
        self._manifest = manifest
        try:
            self._builds = [] if manifest is None else choose_builds(manifest, self.device, precision)
        except BaseException:
            self.device.close()
            raise

    def open(self, spec: GraphSpec, path: Path) -> OmSession:
        session = OmSession(self.device, spec, path)
        self.opened.append(f"{spec.name}: {self.name} {self.device.soc}, {path.name}")
        return session

    def compiled(self, name: str) -> list[tuple[GraphSpec, Path]]:
        """Bound spec and checked file of every compiled size of a graph, the smallest first."""
        builds = [build for build in self._builds if build.graph == name]
        if self._manifest is None or not builds:
            raise BackendUnavailableError(
                f"{name} is not compiled for {self.device.soc}; run: convert-moss atc … --graphs {name}"
            )
        exported = self._manifest.graph(name).spec
        found = sorted(builds, key=lambda build: tuple(build.axes.values()))
        return [(build.bound_spec(exported), self._manifest.check_build(build)) for build in found]

    def close(self) -> None:
        self.device.close()

    def __enter__(self) -> OmBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def choose_builds(manifest: Manifest, device: OmDevice, precision: str | None) -> list[OmBuild]:
    """The builds for this device, of one precision; each is checked before anything is loaded."""
    for_soc = [build for build in manifest.builds if build.soc_version == device.soc]
    if not for_soc:
        compiled = ", ".join(sorted({build.soc_version for build in manifest.builds})) or "nothing"
        raise BackendUnavailableError(
            f"{manifest.directory} has no .om for {device.soc} (compiled: {compiled}); "
            f"run: convert-moss atc {manifest.directory} --target soc={device.soc},cann={device.cann}"
        )
    precisions = sorted({build.precision for build in for_soc})
    chosen = precision or ("origin" if "origin" in precisions else precisions[0])
    if chosen not in precisions or (precision is None and len(precisions) > 1 and "origin" not in precisions):
        raise BackendUnavailableError(
            f"{manifest.directory}: expected one of the precisions compiled for {device.soc}, {', '.join(precisions)}, "
            f"got {precision}; give it with --precision"
        )
    builds = [build for build in for_soc if build.precision == chosen]
    for build in builds:
        check_build(build, device)
    return builds
