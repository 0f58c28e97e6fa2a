"""The codec of the OM backend: weights and the rings of every stream stay on the device.

Per launch the host sends the codes (or samples) and the positions (one copy) and reads back the samples (or codes, one
copy). In between, in the order of the stream, the new rows go from the outputs of the graph into the slots of the
rings: per stage one 2-D copy that takes all layers and heads, two where the chunk wraps. Rings are allocated for each
stream that is open at the same time and used again; a dataset is prebuilt for each pair of rings and size.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.backends.om import OmBackend, OmModel
from runtime.backends.om_device import OmDevice, OmStream, Releases, Traffic
from runtime.backends.om_layout import Block, HeadRows, pack, spare_heads
from runtime.backends.om_rows import RowCopier, RowCopy
from runtime.codec import Codec
from runtime.codec_rings import Chunk, RingGraph, Rings, Stages, spans
from runtime.config import CodecConfig
from runtime.errors import BackendError, GenerationError, SpecMismatchError
from runtime.manifest import Manifest
from runtime.spec import Array, GraphSpec, numpy_dtype


@dataclass(frozen=True, slots=True)
class OmCodecStats:
    """What the codec holds and moves on the device, for `--stats`."""

    row_copy: str
    model_bytes: int
    ring_bytes: int  # of all rings that were ever needed at the same time
    encode: Traffic  # of the last launch of codec_encode
    stream: Traffic  # of the last launch of codec_stream

    def lines(self) -> list[str]:
        """For a person to read."""
        return [
            f"codec: new rows by {self.row_copy} per stage and span",
            f"device memory of the codec: models {self.model_bytes:,} B, rings {self.ring_bytes:,} B",
            f"codec_encode, last launch: {self.encode}",
            f"codec_stream, last launch: {self.stream}",
        ]


class _StageRows:
    """Keys and values of all layers: the layers of a stage at one pitch, a stage behind the other."""

    def __init__(self, stages: Stages, frames: Sequence[int]) -> None:
        """`frames`: how many frames a run of each stage holds."""
        self.by_stage: list[tuple[HeadRows, int]] = []  # the layout and the byte where it begins
        self.offsets: dict[str, int] = {}
        self.num_bytes = layer = 0
        for stage, num_frames in zip(stages, frames, strict=True):
            spare = spare_heads(stage.num_heads, stage.head_size * 4)
            run_bytes = num_frames * stage.tokens_per_frame * stage.head_size * 4
            rows = HeadRows(2 * stage.num_layers, stage.num_heads, spare, run_bytes)
            self.by_stage.append((rows, self.num_bytes))
            for tensor in range(rows.num_tensors):
                kind = ("key", "value")[tensor % 2]
                self.offsets[f"{kind}_{layer + tensor // 2}"] = self.num_bytes + rows.offset(tensor)
            layer += stage.num_layers
            self.num_bytes += rows.num_bytes

    def at(self, base: int, prefix: str) -> dict[str, int]:
        """Addresses by tensor name when the whole begins at `base`."""
        return {f"{prefix}_{name}": base + offset for name, offset in self.offsets.items()}


class _Size:
    """One compiled size: its model, and where its tensors lie in the memory that all sizes share."""

    def __init__(self, device: OmDevice, stages: Stages, spec: GraphSpec, path: Path, releases: Releases) -> None:
        self.model = OmModel(device, spec, path, releases)
        bound = self.model.spec
        if bound.inputs[0].bound_shape[0] != 1:
            raise SpecMismatchError(
                f"{path} was compiled for a batch of {bound.inputs[0].bound_shape[0]}; the OM codec runs one stream "
                "per launch: compile with --batch 1"
            )
        self.frames: int = next(t.bound_shape[1] for t in bound.inputs if t.name == "positions")
        self.feeds = tuple(t for t in bound.inputs if not t.name.startswith(("past_key", "past_value")))
        self.block: Block = pack({t.name: t.num_bytes for t in self.feeds})
        self.result = next(t for t in bound.outputs if not t.name.startswith("new_"))
        self.rows = _StageRows(stages, [self.frames] * len(stages))
        self.outputs = self.model.create_dataset(releases)


class OmRingGraph(RingGraph):
    """codec_encode or codec_stream in all compiled sizes. Streams may be used from any thread; launches take turns."""

    def __init__(
        self,
        device: OmDevice,
        stages: Stages,
        compiled: Sequence[tuple[GraphSpec, Path]],
        row_copy: RowCopy = RowCopy.AUTO,
    ) -> None:
        super().__init__(stages, [spec for spec, _ in compiled])
        self.name = compiled[0][0].name
        self.ring_rows = _StageRows(stages, [stage.ring_frames for stage in stages])
        self.device = device.share()
        self.releases = Releases()
        self.releases.add(self.device.close)
        self.traffic = Traffic()  # of the last launch
        self.num_rings = 0
        self._lock = threading.RLock()
        self._closed = False
        try:
            self.device.activate()
            self._open(compiled, row_copy)
        except BaseException:
            self.releases.abandon()
            raise

    def _open(self, compiled: Sequence[tuple[GraphSpec, Path]], row_copy: RowCopy) -> None:
        device, releases = self.device, self.releases
        self._stream = OmStream(device, releases)
        self.copier = RowCopier(device, self._stream, row_copy)
        sizes = [_Size(device, self.stages, spec, path, releases) for spec, path in compiled]
        self.by_frames = {size.frames: size for size in sizes}
        feed_bytes = max(size.block.num_bytes for size in sizes)
        result_bytes = max(pack({"result": size.result.num_bytes}).num_bytes for size in sizes)
        self.feeds_at = device.malloc(feed_bytes, releases)
        self._result_at = device.malloc(result_bytes, releases)
        self._rows_at = device.malloc(max(size.rows.num_bytes for size in sizes), releases)
        self._host_feeds = device.malloc_host(feed_bytes, releases)
        self._host_result = device.malloc_host(result_bytes, releases)
        for size in sizes:
            pointers = {size.result.name: self._result_at, **size.rows.at(self._rows_at, "new")}
            size.model.fill_dataset(size.outputs, "output", pointers, releases)

    @property
    def model_bytes(self) -> int:
        return sum(size.model.device_bytes for size in self.by_frames.values())

    def enter(self) -> None:
        """Every call from outside begins here: refuse after `close`, make the context this thread's."""
        if self._closed:
            raise BackendError(f"{self.name}: the codec is closed; open it again")
        self.device.activate()

    def launch(self, rings: OmRings, chunk: Chunk, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One launch, all of it queued, then one wait; the result by its name."""
        with self._lock:
            self.enter()
            size, stream, before = self.by_frames[chunk.size], self._stream, self._stream.traffic
            for tensor in size.feeds:
                raw = self._host_feeds.data[size.block.offsets[tensor.name] : size.block.end(tensor.name)]
                raw.view(numpy_dtype(tensor.dtype)).reshape(tensor.bound_shape)[...] = feeds[tensor.name]
            try:
                stream.upload(self.feeds_at, self._host_feeds, size.block.end(size.feeds[-1].name))
                stream.launch(size.model.handle, rings.datasets[chunk.size], size.outputs)
                self._store_rows(rings, size, chunk)
                stream.download(self._host_result, self._result_at, size.result.num_bytes)
                stream.synchronize()
            except BackendError:
                stream.recover()
                raise
            self.traffic = stream.traffic - before
            raw = self._host_result.data[: size.result.num_bytes].view(numpy_dtype(size.result.dtype))
            return {size.result.name: raw.reshape(size.result.bound_shape).copy()}

    def _store_rows(self, rings: OmRings, size: _Size, chunk: Chunk) -> None:
        """Queue the copies of the new rows of the frames that count into their slots."""
        places = zip(self.stages, self.ring_rows.by_stage, size.rows.by_stage, strict=True)
        for stage, (ring, ring_offset), (new, new_offset) in places:
            frame_bytes = stage.tokens_per_frame * stage.head_size * 4
            for span in spans(stage, chunk):
                skipped = (span.frame - chunk.first) * frame_bytes
                target = (ring, rings.address + ring_offset)
                source = (new, self._rows_at + new_offset + skipped)
                self.copier.copy(target, source, span.length * frame_bytes, span.slot * frame_bytes)

    def take_rings(self) -> Rings:
        with self._lock:
            self.enter()
            return super().take_rings()

    def _new_rings(self) -> Rings:
        rings = OmRings(self)
        self.num_rings += 1
        return rings

    def close(self) -> None:
        """Free everything; a second call does nothing, and streams that are still open refuse to run."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.releases.add(self._stream.drain)
                self.releases.add(self.device.activate)
                self.releases.close()


class OmRings(Rings):
    """Rings on the device, and one dataset of inputs per compiled size that reads them; the graph frees both."""

    def __init__(self, graph: OmRingGraph) -> None:
        super().__init__(graph.stages)
        self._graph = graph
        self._sound = False  # False: what lies in memory may be anything, such as NaN, which no mask hides
        releases = Releases()
        try:
            self.datasets = {frames: size.model.create_dataset(releases) for frames, size in graph.by_frames.items()}
            self.address = graph.device.malloc(graph.ring_rows.num_bytes, releases)
            for frames, size in graph.by_frames.items():
                pointers = {name: graph.feeds_at + offset for name, offset in size.block.offsets.items()}
                pointers |= graph.ring_rows.at(self.address, "past")
                size.model.fill_dataset(self.datasets[frames], "input", pointers, releases)
        except BaseException:
            releases.abandon()
            raise
        graph.releases.add(releases.close)

    def clear(self) -> None:
        """Forget everything; after a launch that failed, also what it may have left in the rows."""
        super().clear()
        if not self._sound:
            self._graph.device.acl.memset(self.address, self._graph.ring_rows.num_bytes, 0)
            self._sound = True

    def _launch(self, chunk: Chunk, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        if not self._sound:
            raise GenerationError(
                "a launch of this decode stream failed and left its rings incomplete; open another with codec.stream()"
            )
        self._graph.enter()
        self._sound = False
        outputs = self._graph.launch(self, chunk, {**feeds, **self.past_positions})
        self._sound = True
        return outputs


class OmCodec(Codec):
    """The codec with its rings on one device."""

    def __init__(self, config: CodecConfig, encode: OmRingGraph, stream: OmRingGraph) -> None:
        super().__init__(config, encode, stream)
        self._graphs = (encode, stream)

    @property
    def stats(self) -> OmCodecStats:
        encode, stream = self._graphs
        return OmCodecStats(
            row_copy=stream.copier.description,
            model_bytes=encode.model_bytes + stream.model_bytes,
            ring_bytes=sum(graph.num_rings * graph.ring_rows.num_bytes for graph in self._graphs),
            encode=encode.traffic,
            stream=stream.traffic,
        )


def open_om_codec(manifest: Manifest, backend: OmBackend, row_copy: RowCopy = RowCopy.AUTO) -> OmCodec:
    """Open every compiled size of codec_encode and codec_stream."""
    config, graphs = manifest.codec, []
    try:
        for name, stages in (("codec_encode", config.encoder), ("codec_stream", config.decoder)):
            compiled = backend.compiled(name)
            graphs.append(OmRingGraph(backend.device, stages, compiled, row_copy))
            backend.opened += [f"{name}: {backend.name} {backend.device.soc}, {path.name}" for _, path in compiled]
    except BaseException:
        for graph in graphs:
            graph.close()
        raise
    encode, stream = graphs
    return OmCodec(config, encode, stream)
