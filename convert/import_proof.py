"""The proof of an import: the package's own graphs and the modules that export traces, on the same inputs.

    language model   caches of the prompt, then frame by frame hidden state, logits of the slot and of every codebook,
                     and the codes; at the end the caches again
    codec            codes of a clip, and the waveform of codes, both longer than every attention window

Our side reads the checkpoint that was written, as export does, so the proof covers the files too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from convert.checkpoint import Checkpoint
from convert.export import build_module
from convert.verify import LOGITS, TOLERANCES
from runtime.backends.torch import TorchSession
from runtime.codec import Codec
from runtime.compare import FLOAT32_SAME_MATH, Tolerance, compare_tensors
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import CheckpointError
from runtime.frame_model import Frame, HostFrameModel
from runtime.graphs import graph_specs
from runtime.manifest import GraphFile, Manifest
from runtime.modules.codec_state import derive_codec_state
from runtime.modules.llm_state import derive_llm_state
from runtime.onnx_package import OnnxPackage
from runtime.package_codec import PublishedCodec
from runtime.package_model import FIXED_SETTINGS, PublishedFrameModel
from runtime.sampling import TOP_K_MAX, SamplingParams
from runtime.spec import Array, GraphSpec

PROMPT_ROWS, FRAMES, POSITIONS = 24, 3, 64
FRAMES_BEYOND_WINDOW = 3
# One code of a frame chosen otherwise, at a tie to the last bit, moves all codes of later codebooks of that frame.
SAME_FRAMES = 0.97
SAME_FIRST_CODES = 0.8  # where weights or arithmetic were rounded: the first codebook alone, which no other moves

Ints = npt.NDArray[np.int32]


class RecoveredBackend:
    """The modules of every graph over the state of the recovered checkpoint."""

    name = "recovered weights"

    def __init__(self, model: Checkpoint[ModelConfig], codec: Checkpoint[CodecConfig]) -> None:
        self.model, self.codec = model.config, codec.config
        self.manifest = _manifest(model, codec)
        self._state = derive_llm_state(model.config, model.tensors, POSITIONS)
        self._state |= derive_codec_state(codec.config, codec.tensors)

    def open(self, spec: GraphSpec, path: Path) -> TorchSession:
        module = build_module(spec.name, self.model, self.codec, self._state, POSITIONS)
        return TorchSession(spec, module, torch.device("cpu"))

    def session(self, name: str) -> TorchSession:
        return self.open(self.manifest.graph(name).spec, Path())


def _manifest(model: Checkpoint[ModelConfig], codec: Checkpoint[CodecConfig]) -> Manifest:
    """What the frame model reads: interfaces and limits, no files."""
    return Manifest(
        directory=model.directory,
        name="recovered",
        made_up=model.made_up,
        source={},
        model=model.config,
        codec=codec.config,
        limits={"max_positions": POSITIONS, "top_k_max": TOP_K_MAX},
        graphs={name: GraphFile(spec, "", "", 0) for name, spec in graph_specs(model.config, codec.config).items()},
        data_files={},
        weights={},
        versions={},
    )


class Proof:
    """Compares what both sides computed; CheckpointError at the first difference that is too large."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.differences: dict[str, float] = {}  # the largest of each kind

    @property
    def exact(self) -> bool:
        return self.tolerance is FLOAT32_SAME_MATH

    def same(self, name: str, theirs: Array, ours: Array, tolerance: Tolerance | None = None) -> None:
        found = compare_tensors(name, theirs, ours, tolerance or self.tolerance)
        if not found.passed:
            raise CheckpointError(
                f"{name}: the package's graphs and the recovered weights give different results: {found.reason}; "
                "its graphs compute something that this import does not know"
            )
        self.differences[name] = max(found.max_abs, self.differences.get(name, 0.0))

    def share(self, name: str, equal: npt.NDArray[np.bool_], at_least: float) -> None:
        if equal.mean() < at_least:
            raise CheckpointError(
                f"{name}: {1 - equal.mean():.1%} between the package's graph and the recovered weights, expected at "
                f"most {1 - at_least:.0%}; the graph computes something that this import does not know"
            )
        self.differences[name] = round(1 - float(equal.mean()), 6)


def prove(
    package: OnnxPackage,
    model: Checkpoint[ModelConfig],
    codec: Checkpoint[CodecConfig],
    llm_tolerance: Tolerance,
    codec_tolerance: Tolerance,
) -> dict[str, float]:
    """The largest difference of each kind; CheckpointError when one is beyond its tolerance."""
    backend, rng = RecoveredBackend(model, codec), np.random.default_rng(0)
    speaking, sounding = Proof(llm_tolerance), Proof(codec_tolerance)
    ours, theirs = HostFrameModel(backend.manifest, backend), PublishedFrameModel(package)
    try:
        for sampling in _settings(package):
            _prove_speaking(speaking, theirs, ours, sampling, package, rng)
    finally:
        ours.close()
        theirs.close()
    published = PublishedCodec(package, codec.config)
    try:
        _prove_codec(sounding, package, published, backend, rng)
    finally:
        published.close()
    return speaking.differences | sounding.differences


def _settings(package: OnnxPackage) -> Iterator[SamplingParams]:
    """The fixed graph's own settings run it; any other run the cached step."""
    if "local_fixed_sampled_frame" in package.graphs:
        yield FIXED_SETTINGS
    if "local_cached_step" in package.graphs:
        yield SamplingParams.greedy(1.2)


def _prove_speaking(
    proof: Proof,
    theirs: PublishedFrameModel,
    ours: HostFrameModel,
    sampling: SamplingParams,
    package: OnnxPackage,
    rng: np.random.Generator,
) -> None:
    rows = _prompt(ours.config, rng)
    theirs.prefill(rows)
    ours.prefill(rows)
    proof.same("prefill: keys and values", theirs.cache_rows(), ours.cache_rows())
    for _ in range(FRAMES):
        uniforms = rng.random((1, 1 + ours.config.n_vq)).astype(np.float32)
        uniforms[0, 0] = 0  # a frame follows: behind a stop the fixed graph's codes mean nothing
        their_frame = theirs.next_frame(uniforms, sampling, keep_logits=True)
        our_frame = ours.next_frame(uniforms, sampling, keep_logits=True)
        _same_frame(proof, their_frame, our_frame)
        if "local_decoder" in package.graphs:
            _, logits = theirs.local_logits(our_frame.hidden[None], our_frame.codes)  # type: ignore[index]  # kept
            proof.same("local_decoder: logits of codes", logits, our_frame.code_logits)  # type: ignore[arg-type]
        ours.force_frame(their_frame.codes)
    proof.same("decode_step: keys and values", theirs.cache_rows(), ours.cache_rows())


def _same_frame(proof: Proof, theirs: Frame, ours: Frame) -> None:
    assert theirs.hidden is not None and ours.hidden is not None  # both were asked to keep what they have
    assert ours.slot_logits is not None and ours.code_logits is not None
    proof.same("frame: hidden state", theirs.hidden, ours.hidden)
    if proof.exact:
        proof.same("frame: codes", theirs.codes, ours.codes)
    if theirs.slot_logits is None or theirs.code_logits is None:  # the fixed graph shows none; local_decoder is missing
        return
    tolerance = LOGITS if proof.exact else proof.tolerance
    proof.same("frame: logits of slot and end", theirs.slot_logits, ours.slot_logits, tolerance)
    different = np.flatnonzero(theirs.codes != ours.codes)
    end = int(different[0]) + 1 if different.size else len(theirs.codes)  # what follows another code is another thing
    proof.same("frame: logits of codes", theirs.code_logits[:end], ours.code_logits[:end], tolerance)


def _prompt(config: ModelConfig, rng: np.random.Generator) -> Ints:
    """Text rows, then rows with codes, as a prompt has them."""
    rows = np.full((PROMPT_ROWS, 1 + config.n_vq), config.audio_pad_id, np.int32)
    rows[:, 0] = rng.integers(0, config.vocab_size, PROMPT_ROWS)
    half = PROMPT_ROWS // 2
    for channel, size in enumerate(config.codebook_sizes):
        rows[half:, 1 + channel] = rng.integers(0, size, PROMPT_ROWS - half)
    return rows


def _prove_codec(
    proof: Proof, package: OnnxPackage, theirs: PublishedCodec, backend: RecoveredBackend, rng: np.random.Generator
) -> None:
    config = backend.codec
    frames = FRAMES_BEYOND_WINDOW + max(stage.ring_frames for stage in (*config.encoder, *config.decoder))
    clip = (0.1 * rng.standard_normal((config.num_channels, frames * config.samples_per_frame + 1))).astype(np.float32)
    codes = rng.integers(0, config.codebook_size, (frames, config.n_vq)).astype(np.int32)
    with Codec(config, [backend.session("codec_encode")], [backend.session("codec_stream")]) as ours:
        their_codes, our_codes = theirs.encode(clip), ours.encode(clip)
        if their_codes.shape != our_codes.shape:
            raise CheckpointError(f"encode: codes {list(their_codes.shape)} and {list(our_codes.shape)}")
        equal = their_codes == our_codes
        if proof.exact:
            proof.share("encode: share of frames with other codes", equal.all(axis=1), SAME_FRAMES)
        else:
            proof.share("encode: share of other codes of the first codebook", equal[:, 0], SAME_FIRST_CODES)
        tolerance = TOLERANCES["waveform"] if proof.exact else proof.tolerance
        waveform = ours.decode(codes)
        if "decode_full" in package.graphs:
            proof.same("decode_full: waveform", theirs.decode(codes), waveform, tolerance)
        if "codec_decode_step" in package.graphs:
            with theirs.stream() as stream:
                chunks = [stream.push(codes[i : i + 8]) for i in range(0, frames, 8)]
            proof.same("decode_step: waveform", np.concatenate(chunks, axis=1), waveform, tolerance)
