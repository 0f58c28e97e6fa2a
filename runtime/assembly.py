"""Manifest + backend -> the parts that speak: the frame model and the codec, on whatever the backend is.

Backends with host memory (ONNX Runtime, PyTorch) open one session per exported graph; the OM backend opens one per
compiled size and keeps the frame loop and the rings of the codec on the device.
"""

from __future__ import annotations

from runtime.backends.base import Backend, Session
from runtime.backends.cann_provider import CannBackend
from runtime.backends.om import OmBackend
from runtime.codec import Codec, SpeechCodec
from runtime.frame_model import FrameModel, HostFrameModel
from runtime.graphs import ring_axes
from runtime.manifest import Manifest
from runtime.om_codec import OmCodec, open_om_codec
from runtime.om_frame_model import OmFrameModel, open_om_frame_model


def open_frame_model(
    manifest: Manifest,
    backend: Backend,
    fused: bool = True,
    capacity: int | None = None,
    num_codebooks: int | None = None,
) -> FrameModel:
    """The frame model; arguments as of HostFrameModel. The capacity of an OM model is what was compiled, or less."""
    if isinstance(backend, OmBackend):
        return open_om_frame_model(manifest, backend, fused, capacity, num_codebooks)
    return HostFrameModel(manifest, backend, fused, capacity, num_codebooks)


def open_codec(manifest: Manifest, backend: Backend) -> Codec:
    """The codec, encoder and streaming decoder."""
    if isinstance(backend, OmBackend):
        return open_om_codec(manifest, backend)
    encode = _open_session(manifest, backend, "codec_encode")
    try:
        stream = _open_session(manifest, backend, "codec_stream")
    except BaseException:
        encode.close()
        raise
    return Codec(manifest.codec, [encode], [stream])


def _open_session(manifest: Manifest, backend: Backend, name: str) -> Session:
    graph = manifest.graph(name)
    compiles_each_shape = isinstance(backend, CannBackend)
    spec = graph.spec.bind_known(ring_axes(manifest.codec)) if compiles_each_shape else graph.spec
    return backend.open(spec, manifest.path(graph.file))


def describe_run(frame_model: FrameModel, backend: Backend, codec: SpeechCodec | None = None) -> list[str]:
    """For `--stats`: which backend ran each graph, and on OM what moved per frame and per launch of the codec."""
    if isinstance(frame_model, OmFrameModel) and isinstance(backend, OmBackend):
        moved = [*frame_model.stats.lines(), *(codec.stats.lines() if isinstance(codec, OmCodec) else [])]
        return [*moved, *(f"opened: {line}" for line in backend.opened)]
    if isinstance(backend, CannBackend):
        return [str(placement) for placement in backend.placements.values()]
    return [f"every graph: {backend.name}"]
