"""The FrameModel of the OM backend: weights, KV cache, seen-table and the row stay on the device.

Per frame the host sends the uniforms and the position (one copy) and one element of the mask, launches
`step_frame` once (or `step`, then `frame`), and reads back `go_on` and `codes` (one copy). On the device, in the
order of the stream: the new key and value rows go into the cache at `position` (one 2-D copy), the codes become the
next row behind the slot token that stays there. The seen-table goes back and forth between two buffers; a dataset is
prebuilt for each direction, since an output must not lie over an input (ATC_AND_ACL.md C.6, section J 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.backends.om import OmBackend, OmModel
from runtime.backends.om_device import OmDevice, OmStream, Releases, Traffic
from runtime.backends.om_layout import HeadRows, pack, spare_heads
from runtime.backends.om_rows import RowCopier, RowCopy
from runtime.config import ModelConfig
from runtime.errors import BackendError, CapacityError, GenerationError, SpecMismatchError
from runtime.frame_model import Floats, Frame, Ints, check_prompt_fits
from runtime.manifest import Manifest
from runtime.sampling import MASKED, SamplingParams
from runtime.spec import GraphSpec

FRAME_RESULTS = ("go_on", "codes", "slot_logits", "hidden", "code_logits")  # the first two are read every frame
SETTINGS = ("temperature", "top_k", "top_p", "penalty")


@dataclass(frozen=True, slots=True)
class OmGraph:
    """A compiled graph: its interface and its file."""

    spec: GraphSpec
    path: Path


@dataclass(frozen=True, slots=True)
class OmGraphs:
    """What the frame model needs: prefill buckets, `frame`, and either `step_frame` or `step`."""

    prefill: tuple[OmGraph, ...]
    frame: OmGraph
    step_frame: OmGraph | None = None
    step: OmGraph | None = None

    def __post_init__(self) -> None:
        if not self.prefill or (self.step_frame is None) == (self.step is None):
            raise SpecMismatchError(
                "the OM frame model needs at least one prefill bucket and either step_frame or step; compile them with "
                "convert-moss atc"
            )


@dataclass(frozen=True, slots=True)
class OmStats:
    """What ran and what moved, for `--stats` and the bench."""

    backend: str
    graph_per_frame: str
    row_copy: str
    model_bytes: int  # device memory that the loaded models take
    cache_bytes: int
    prefill: Traffic  # of the last prefill
    first_frame: Traffic  # the frame after a prefill, which needs no step
    frame: Traffic  # of the last frame that stepped

    def lines(self) -> list[str]:
        """For a person to read."""
        return [
            f"backend: {self.backend}, {self.graph_per_frame} per frame, new rows by {self.row_copy}",
            f"device memory: models {self.model_bytes:,} B, cache {self.cache_bytes:,} B",
            f"prefill: {self.prefill}",
            f"first frame: {self.first_frame}",
            f"each frame: {self.frame}",
        ]


class _Memory:
    """All device and pinned memory of the frame model, and where each tensor lies in it."""

    def __init__(self, device: OmDevice, model: ModelConfig, loaded: _Loaded, releases: Releases) -> None:
        step, frame = loaded.step.spec, loaded.frame.spec
        sizes = {t.name: t.num_bytes for t in (*step.inputs, *step.outputs, *frame.inputs, *frame.outputs)}
        self.capacity = _capacity(step)  # C of the graph

        row_bytes = model.head_size * 4
        spare = spare_heads(model.num_heads, row_bytes)
        tensors = 2 * model.num_layers

        def layout(rows: int) -> HeadRows:
            return HeadRows(tensors, model.num_heads, spare, rows * row_bytes)

        self.row_bytes, self.cache, self.new_rows = row_bytes, layout(self.capacity), layout(1)
        self.prefill_rows = {bucket: layout(bucket) for bucket in loaded.prefill}
        self.prompt = {
            bucket: pack({t.name: t.num_bytes for t in m.spec.inputs}) for bucket, m in loaded.prefill.items()
        }
        self.control = pack({name: sizes[name] for name in ("position", "uniforms")})
        self.settings = pack({name: sizes[name] for name in SETTINGS})
        self.results = pack({name: sizes[name] for name in FRAME_RESULTS})
        self.row = pack({"row": sizes["row"]})
        self.mask = pack({"cache_mask": sizes["cache_mask"]})
        self.seen = pack({"seen": sizes["seen"]})
        prompt_bytes = max(block.num_bytes for block in self.prompt.values())

        def on_device(num_bytes: int) -> int:
            return device.malloc(num_bytes, releases)

        self.cache_at, self.new_rows_at = on_device(self.cache.num_bytes), on_device(self.new_rows.num_bytes)
        # One prefill runs at a time: all buckets share the memory of the largest.
        self.prefill_at = on_device(max(rows.num_bytes for rows in self.prefill_rows.values()))
        self.prompt_at = on_device(prompt_bytes)
        self.control_at, self.settings_at = on_device(self.control.num_bytes), on_device(self.settings.num_bytes)
        self.results_at, self.row_at = on_device(self.results.num_bytes), on_device(self.row.num_bytes)
        self.mask_at = on_device(self.mask.num_bytes)
        self.seen_at = (on_device(self.seen.num_bytes), on_device(self.seen.num_bytes))

        self.host_prompt = device.malloc_host(prompt_bytes, releases)
        self.host_control = device.malloc_host(self.control.num_bytes, releases)
        self.host_settings = device.malloc_host(self.settings.num_bytes, releases)
        self.host_results = device.malloc_host(self.results.num_bytes, releases)
        self.host_row = device.malloc_host(self.row.num_bytes, releases)
        self.host_mask = device.malloc_host(self.mask.num_bytes, releases)
        self.host_open = device.malloc_host(4, releases)  # the mask element of a row that counts
        self.host_open.data[:] = 0
        self.host_one = device.malloc_host(4, releases)  # the seen-table's element of a code that was used
        self.host_one.data.view(np.float32)[:] = 1
        device.acl.memset(self.cache_at, self.cache.num_bytes, 0)  # masked rows must not be NaN: 0 x NaN is NaN

    def pointers(self, direction: int) -> dict[str, int]:
        """Where the tensors of step, frame and step_frame lie; `direction` says which seen-table is read."""
        found = {"row": self.row_at, "cache_mask": self.mask_at}
        for block, base in (
            (self.control, self.control_at),
            (self.settings, self.settings_at),
            (self.results, self.results_at),
        ):
            found |= {name: base + offset for name, offset in block.offsets.items()}
        found |= {"seen": self.seen_at[direction], "seen_next": self.seen_at[1 - direction]}
        for index, name in enumerate(self._cache_names()):
            found[f"past_{name}"] = self.cache_at + self.cache.offset(index)
            found[f"new_{name}"] = self.new_rows_at + self.new_rows.offset(index)
        return found

    def prefill_pointers(self, bucket: int) -> dict[str, int]:
        """Where the tensors of one prefill bucket lie."""
        found = {name: self.prompt_at + offset for name, offset in self.prompt[bucket].offsets.items()}
        found["hidden"] = self.results_at + self.results.offsets["hidden"]
        rows = self.prefill_rows[bucket]
        return found | {name: self.prefill_at + rows.offset(i) for i, name in enumerate(self._cache_names())}

    def _cache_names(self) -> list[str]:
        return [f"{kind}_{layer}" for layer in range(self.cache.num_tensors // 2) for kind in ("key", "value")]


class _Loaded:
    """The models of the graphs, checked against each other, and their (still empty) datasets."""

    def __init__(self, device: OmDevice, graphs: OmGraphs, releases: Releases) -> None:
        def load(graph: OmGraph) -> OmModel:
            model = OmModel(device, graph.spec, graph.path, releases)
            if model.spec.inputs[0].bound_shape[0] != 1:
                raise SpecMismatchError(
                    f"{graph.path} was compiled for a batch of {model.spec.inputs[0].bound_shape[0]}; the OM frame "
                    "model runs one utterance: compile with --batch 1"
                )
            return model

        prefill = [load(graph) for graph in graphs.prefill]
        self.prefill = {m.spec.inputs[0].bound_shape[1]: m for m in sorted(prefill, key=_bucket)}
        self.frame = load(graphs.frame)
        self.fused = graphs.step_frame is not None
        self.step = load(graphs.step_frame or graphs.step)  # type: ignore[arg-type]  # OmGraphs holds one of them
        self.models = [*self.prefill.values(), self.frame, self.step]

        def datasets(model: OmModel) -> tuple[int, int]:
            return model.create_dataset(releases), model.create_dataset(releases)

        self.prefill_datasets = {bucket: datasets(m) for bucket, m in self.prefill.items()}
        self.frame_datasets = (datasets(self.frame), datasets(self.frame))  # one pair per direction of the seen-table
        self.step_datasets = (datasets(self.step), datasets(self.step))


def _bucket(model: OmModel) -> int:
    return model.spec.inputs[0].bound_shape[1]


class OmFrameModel:
    """One utterance at a time on one device; one thread at a time."""

    def __init__(
        self,
        device: OmDevice,
        model: ModelConfig,
        graphs: OmGraphs,
        row_copy: RowCopy = RowCopy.AUTO,
        capacity: int | None = None,
        num_codebooks: int | None = None,
    ) -> None:
        self._device, self._model = device.share(), model
        self._releases = Releases()
        self._releases.add(self._device.close)
        self._closed = False
        self._num_codebooks = num_codebooks or model.n_vq
        self._num_rows = 0
        self._state = "empty"  # empty: prefill first; hidden: prefill left it; row: the codes of a frame are the row
        self._direction = 0
        self._sampling: SamplingParams | None = None
        self._traffic = dict.fromkeys(("prefill", "first_frame", "frame"), Traffic())
        try:
            self._device.activate()
            self._open(graphs, row_copy)
            compiled = self._memory.capacity
            self.capacity = compiled if capacity is None else min(capacity, compiled)
        except BaseException:
            self._releases.abandon()
            raise

    def _open(self, graphs: OmGraphs, row_copy: RowCopy) -> None:
        device, releases = self._device, self._releases
        self._stream = OmStream(device, releases)
        self._rows = RowCopier(device, self._stream, row_copy)
        self._loaded = loaded = _Loaded(device, graphs, releases)
        self._memory = memory = _Memory(device, self._model, loaded, releases)
        for bucket, m in loaded.prefill.items():
            _fill(m, loaded.prefill_datasets[bucket], memory.prefill_pointers(bucket), releases)
        for direction in (0, 1):
            pointers = memory.pointers(direction)
            _fill(loaded.frame, loaded.frame_datasets[direction], pointers, releases)
            _fill(loaded.step, loaded.step_datasets[direction], pointers, releases)
        releases.add(self._stream.drain)
        row = memory.host_row.data[: memory.row.end("row")].view(np.int32)
        row[:] = self._model.audio_pad_id  # stays where a codebook is not used
        row[0] = self._model.audio_assistant_slot_id  # stays in front of the codes of every frame
        self._stream.upload(memory.row_at, memory.host_row, memory.row.end("row"))
        self._stream.synchronize()

    @property
    def backend_name(self) -> str:
        return self._device.label

    @property
    def stats(self) -> OmStats:
        loaded = self._loaded
        return OmStats(
            backend=f"{self._device.label} {self._device.soc}",
            graph_per_frame="step_frame" if loaded.fused else "step and frame",
            row_copy=self._rows.description,
            model_bytes=sum(m.device_bytes for m in loaded.models),
            cache_bytes=self._memory.cache.num_bytes,
            **self._traffic,
        )

    def prefill(self, rows: Ints) -> None:
        self._enter()
        check_prompt_fits(len(rows), self.capacity)
        bucket = self._choose_bucket(len(rows))
        memory, stream = self._memory, self._stream
        before, self._state = stream.traffic, "empty"
        self._write_prompt(bucket, rows)
        mask = memory.host_mask.data[: 4 * memory.capacity].view(np.float32)
        mask[:] = MASKED
        mask[: len(rows)] = 0
        try:
            self._device.acl.memset(memory.seen_at[0], memory.seen.end("seen"), 0)
            stream.upload(memory.prompt_at, memory.host_prompt, memory.prompt[bucket].end("last"))
            stream.upload(memory.mask_at, memory.host_mask, memory.mask.end("cache_mask"))
            stream.launch(self._loaded.prefill[bucket].handle, *self._loaded.prefill_datasets[bucket])
            source = (memory.prefill_rows[bucket], memory.prefill_at)
            self._rows.copy((memory.cache, memory.cache_at), source, len(rows) * memory.row_bytes, 0)
            stream.synchronize()
        except BackendError:
            stream.recover()
            raise
        self._num_rows, self._direction, self._state = len(rows), 0, "hidden"
        self._traffic["prefill"] = stream.traffic - before

    def next_frame(self, uniforms: Floats, sampling: SamplingParams, keep_logits: bool = False) -> Frame:
        self._enter()
        if self._state == "empty":
            raise GenerationError("next_frame before prefill, or after an error: prefill a prompt first")
        if uniforms.shape != (1, 1 + self._model.n_vq):
            raise SpecMismatchError(f"uniforms: expected float32[1, {1 + self._model.n_vq}], got {uniforms.shape}")
        steps = self._state == "row"
        if steps and self._num_rows >= self.capacity:
            raise CapacityError(
                f"the cache holds {self.capacity} rows and is full; shorten the text or the reference clip, or compile "
                "with a larger --capacity"
            )
        before, self._state = self._stream.traffic, "empty"
        try:
            self._queue_frame(uniforms, sampling, steps, keep_logits)
            self._stream.synchronize()
        except BackendError:
            self._sampling = None  # whether the settings arrived is not known
            self._stream.recover()
            raise
        self._num_rows += steps
        self._direction, self._state = 1 - self._direction, "row"
        self._traffic["frame" if steps else "first_frame"] = self._stream.traffic - before
        return self._read_frame(keep_logits)

    def force_frame(self, codes: Ints) -> None:
        self._enter()
        if self._state != "row":
            raise GenerationError("force_frame replaces the codes of a frame; call next_frame first")
        try:
            self._queue_forced(np.asarray(codes, np.int32))
            self._stream.synchronize()
        except BackendError:
            self._state = "empty"
            self._stream.recover()
            raise

    def cache_rows(self) -> Floats:
        """The cache as it lies on the device; copied as a whole, for the parity tools."""
        self._enter()
        memory, layout, releases = self._memory, self._memory.cache, Releases()
        try:
            host = self._device.malloc_host(layout.num_bytes, releases)
            self._stream.download(host, memory.cache_at, layout.num_bytes)
            self._stream.synchronize()
            tensors = [
                host.data[layout.offset(i) : layout.offset(i) + layout.tensor_bytes]
                .view(np.float32)
                .reshape(layout.heads, memory.capacity, -1)
                for i in range(layout.num_tensors)
            ]
            return np.stack([tensor[:, : self._num_rows] for tensor in tensors])
        finally:
            releases.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._releases.add(self._device.activate)
            self._releases.close()

    def __enter__(self) -> OmFrameModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- steps of the above

    def _enter(self) -> None:
        if self._closed:
            raise BackendError("the OM frame model is closed; open it again")
        self._device.activate()

    def _choose_bucket(self, num_rows: int) -> int:
        buckets = list(self._loaded.prefill)
        fitting = [bucket for bucket in buckets if bucket >= num_rows]
        if not fitting:
            raise CapacityError(
                f"the prompt has {num_rows} rows, the largest compiled prefill bucket {buckets[-1]}; shorten the text "
                "or the reference clip, or compile a larger bucket: convert-moss atc … --prefill …"
            )
        return fitting[0]

    def _write_prompt(self, bucket: int, rows: Ints) -> None:
        """Rows, right-padded with zeros, positions, and the index of the last row that counts."""
        block, raw = self._memory.prompt[bucket], self._memory.host_prompt.data
        views: dict[str, npt.NDArray[np.int32]] = {
            name: raw[offset : offset + block.lengths[name]].view(np.int32) for name, offset in block.offsets.items()
        }
        views["rows"][:] = 0
        views["rows"][: rows.size] = rows.reshape(-1)
        views["positions"][:] = np.arange(bucket)
        views["last"][:] = len(rows) - 1

    def _queue_frame(self, uniforms: Floats, sampling: SamplingParams, steps: bool, keep_logits: bool) -> None:
        """Everything of one frame, in stream order; nothing waits in between."""
        memory, stream, loaded = self._memory, self._stream, self._loaded
        self._queue_settings(sampling)
        control, block = memory.host_control.data, memory.control
        control[: block.end("position")].view(np.int32)[:] = self._num_rows
        control[block.offsets["uniforms"] : block.end("uniforms")].view(np.float32)[:] = uniforms[0]
        stream.upload(memory.control_at, memory.host_control, block.end("uniforms"))
        if steps:
            stream.launch(loaded.step.handle, *loaded.step_datasets[self._direction])
            column = self._num_rows * memory.row_bytes
            target, source = (memory.cache, memory.cache_at), (memory.new_rows, memory.new_rows_at)
            self._rows.copy(target, source, memory.row_bytes, column)
            stream.upload(memory.mask_at + 4 * self._num_rows, memory.host_open, 4)  # the row counts from now on
        if not steps or not loaded.fused:
            stream.launch(loaded.frame.handle, *loaded.frame_datasets[self._direction])
        results = memory.results
        codes_at = memory.results_at + results.offsets["codes"]
        stream.copy(memory.row_at + 4, codes_at, 4 * self._num_codebooks)
        stream.download(memory.host_results, memory.results_at, results.end("code_logits" if keep_logits else "codes"))

    def _queue_forced(self, codes: Ints) -> None:
        """Make `codes` the next row, and the seen-table what it was before the frame plus these codes."""
        memory, stream = self._memory, self._stream
        memory.host_row.data[4 : memory.row.end("row")].view(np.int32)[:] = codes
        stream.upload(memory.row_at, memory.host_row, memory.row.end("row"))
        seen, seen_before = memory.seen_at[self._direction], memory.seen_at[1 - self._direction]
        stream.copy(seen, seen_before, memory.seen.end("seen"))
        for codebook in np.flatnonzero(codes < self._model.codebook_size):
            element = int(codebook) * self._model.codebook_size + int(codes[codebook])
            stream.upload(seen + 4 * element, memory.host_one, 4)

    def _queue_settings(self, sampling: SamplingParams) -> None:
        """Send the sampling settings, once per change."""
        if sampling == self._sampling:
            return
        memory = self._memory
        self._sampling = None
        for name, value in sampling.feeds().items():
            start = memory.settings.offsets[name]
            raw = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
            memory.host_settings.data[start : start + memory.settings.lengths[name]] = raw
        self._stream.upload(memory.settings_at, memory.host_settings, memory.settings.end("penalty"))
        self._sampling = sampling

    def _read_frame(self, keep_logits: bool) -> Frame:
        block, raw = self._memory.results, self._memory.host_results.data

        def result(name: str, dtype: type) -> npt.NDArray[np.generic]:
            return raw[block.offsets[name] : block.end(name)].view(dtype).copy()

        go_on, codes = bool(result("go_on", np.int32)[0]), result("codes", np.int32).astype(np.int32)
        codes[self._num_codebooks :] = self._model.audio_pad_id
        if not keep_logits:
            return Frame(go_on, codes)
        return Frame(
            go_on,
            codes,
            hidden=result("hidden", np.float32).astype(np.float32),
            slot_logits=result("slot_logits", np.float32).astype(np.float32),
            code_logits=result("code_logits", np.float32).astype(np.float32).reshape(self._model.n_vq, -1),
        )


def _fill(model: OmModel, datasets: tuple[int, int], pointers: dict[str, int], releases: Releases) -> None:
    for side, dataset in zip(("input", "output"), datasets, strict=True):
        model.fill_dataset(dataset, side, pointers, releases)


def open_om_frame_model(
    manifest: Manifest,
    backend: OmBackend,
    fused: bool = True,
    capacity: int | None = None,
    num_codebooks: int | None = None,
    row_copy: RowCopy = RowCopy.AUTO,
) -> OmFrameModel:
    """Open what was compiled for the device: all prefill buckets, `frame`, and the step of the smallest capacity that
    does (the largest when no capacity is given)."""

    def graphs(name: str) -> list[OmGraph]:
        return [OmGraph(spec, path) for spec, path in backend.compiled(name)]

    steps = graphs("step_frame" if fused else "step")
    by_capacity = {_capacity(graph.spec): graph for graph in steps}
    largest = max(by_capacity)
    step = by_capacity[min((c for c in by_capacity if capacity is not None and c >= capacity), default=largest)]
    frames = graphs("frame")
    chosen = OmGraphs(
        prefill=tuple(graphs("prefill")),
        frame=frames[0],
        step_frame=step if fused else None,
        step=None if fused else step,
    )
    model = OmFrameModel(backend.device, manifest.model, chosen, row_copy, capacity, num_codebooks)
    for graph in (*chosen.prefill, chosen.frame, step):
        backend.opened.append(f"{graph.spec.name}: {backend.name} {backend.device.soc}, {graph.path.name}")
    return model


def _capacity(spec: GraphSpec) -> int:
    return next(t.bound_shape[-1] for t in spec.inputs if t.name == "cache_mask")
