"""The audio tokenizer of a published package, with the interface of runtime.codec.Codec.

    encode   the encode graph on the whole clip
    decode   decode_full on all frames at once, as the official runtime does; by the stream when it is not there
    stream   decode_step; it returns every cache whole, and what comes out goes in again
"""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from runtime.config import CodecConfig
from runtime.errors import AudioError, GenerationError, ManifestError
from runtime.onnx_package import OnnxPackage
from runtime.package_graphs import CODEC_FILES, codec_names
from runtime.package_session import PackageSession
from runtime.spec import Array

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class PublishedCodec:
    """Owns the sessions of the codec graphs that the package has."""

    def __init__(
        self, package: OnnxPackage, config: CodecConfig, threads: int | None = None, spinning: bool = False
    ) -> None:
        self._config = config
        self._package = package
        self._sessions: dict[str, PackageSession] = {}
        try:
            for graph in CODEC_FILES:
                if graph in package.graphs:
                    self._sessions[graph] = PackageSession(package.path(graph), threads, spinning)
            self._check_interfaces()
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> CodecConfig:
        return self._config

    def encode(self, waveform: Floats) -> Ints:
        """Codes [F, n_vq] of a clip [channels, N]; a partial last frame is dropped."""
        config = self.config
        if waveform.ndim != 2 or waveform.shape[0] != config.num_channels:
            raise AudioError(f"clip: expected [{config.num_channels}, samples], got {list(waveform.shape)}")
        if waveform.shape[1] < config.samples_per_frame:
            raise AudioError(f"clip: {waveform.shape[1]} samples, fewer than a frame of {config.samples_per_frame}")
        lengths = np.array([waveform.shape[1]], np.int32)
        outputs = self.session("encode").run({"waveform": waveform[None], "input_lengths": lengths})
        count = int(outputs["audio_code_lengths"][0])
        return np.asarray(outputs["audio_codes"][0, :count], np.int32)

    def decode(self, codes: Ints) -> Floats:
        """Waveform [channels, F * samples_per_frame] of codes [F, n_vq]."""
        if "decode_full" not in self._sessions:
            with self.stream() as stream:
                return stream.push(codes)
        feeds = {"audio_codes": codes[None], "audio_code_lengths": np.array([len(codes)], np.int32)}
        outputs = self._sessions["decode_full"].run(feeds)
        waveform: Floats = outputs["audio"][0, :, : int(outputs["audio_lengths"][0])]
        return waveform

    def stream(self) -> PublishedStream:
        """A decoder for one utterance."""
        return PublishedStream(self.session("codec_decode_step"), self.config)

    def session(self, graph: str) -> PackageSession:
        """The session of a graph; ManifestError when the package does not have it."""
        if graph not in self._sessions:
            self._package.path(graph)
        return self._sessions[graph]

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def _check_interfaces(self) -> None:
        stages = layers = 0
        if step := self._sessions.get("codec_decode_step"):
            stages = sum(name.startswith("transformer_offset") for name in step.input_shapes)
            layers = sum(name.startswith("attn_offset") for name in step.input_shapes)
        for graph, names in codec_names(stages, layers).items():
            if graph in self._sessions:
                self._sessions[graph].check_names(names)


class PublishedStream:
    """Codes in, waveform out; the caches are the graph's own."""

    def __init__(self, session: PackageSession, config: CodecConfig) -> None:
        self._session, self._config = session, config
        self._state: dict[str, Array] | None = {}
        for name, shape in session.input_shapes.items():
            if name in ("audio_codes", "audio_code_lengths"):
                continue
            if not all(isinstance(size, int) for size in shape):
                raise ManifestError(f"{session.path}: cache {name} has open axes {list(shape)}; expected fixed sizes")
            fill = -1 if name.startswith("attn_cached_positions") else 0
            dtype = np.float32 if name.startswith(("attn_cached_keys", "attn_cached_values")) else np.int32
            self._state[name] = np.full([int(size or 0) for size in shape], fill, dtype)

    def push(self, codes: Ints) -> Floats:
        """Waveform [channels, n * samples_per_frame] of the next codes [n, n_vq]."""
        if self._state is None:
            raise GenerationError("this decode stream is closed; open another with codec.stream()")
        feeds = {"audio_codes": codes[None], "audio_code_lengths": np.array([len(codes)], np.int32)}
        outputs = self._session.run({**feeds, **self._state})
        for name in self._state:
            stem, index = name.rsplit("_", 1)
            self._state[name] = outputs[f"{stem}_out_{index}"]
        waveform: Floats = outputs["audio"][0]
        return waveform

    def close(self) -> None:
        self._state = None

    def __enter__(self) -> PublishedStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
