"""B utterances in one launch per frame: how many frames per second together, and whether each is spoken as alone.

The weights are read once for all B, so a batch costs little more than one utterance until arithmetic is the limit.
Prompts have different lengths; each utterance has its own rows in one cache [B, H, C, D], its own mask and its own
random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Backend, Session
from runtime.bench import BenchProtocol, prompt_rows
from runtime.config import ModelConfig
from runtime.frame_model import CACHE_BLOCK, Ints
from runtime.manifest import Manifest
from runtime.sampling import MASKED, SamplingParams, draw_uniforms
from runtime.spec import Array


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Throughput of one batch size, median over the repeats."""

    batch: int
    frames_per_second: float  # of all utterances together, without prefill
    cpu_ms_per_frame: float
    same_codes: bool  # every utterance as when it is alone


def measure_batch(manifest: Manifest, backend: Backend, batch: int, protocol: BenchProtocol) -> list[BatchResult]:
    """One utterance at a time, then `batch` of them together, in turn."""
    names = ("prefill", "frame", "step_frame")
    graphs = {name: manifest.graph(name) for name in names}
    sessions = {name: backend.open(graph.spec, manifest.path(graph.file)) for name, graph in graphs.items()}
    model = BatchModel(manifest.model, sessions)
    try:
        prompts = [
            prompt_rows(manifest.model, replace(protocol, prompt_rows=max(1, protocol.prompt_rows - 3 * i), seed=i))
            for i in range(batch)
        ]
        seeds = list(range(batch))
        alone = [model.speak([p], [s], protocol.sampling, protocol.frames) for p, s in zip(prompts, seeds, strict=True)]
        expected = np.concatenate([spoken.codes for spoken in alone])
        one, many = [], []
        for _ in range(protocol.repeat):
            one.append(model.speak(prompts[:1], seeds[:1], protocol.sampling, protocol.frames))
            many.append(model.speak(prompts, seeds, protocol.sampling, protocol.frames))
    finally:
        for session in sessions.values():
            session.close()
    return [_result(1, one, expected[:1]), _result(batch, many, expected)]


@dataclass(frozen=True, slots=True)
class Spoken:
    """The forced frames of a batch."""

    codes: npt.NDArray[np.int32]  # [B, F, n_vq]
    seconds: float
    cpu_seconds: float


class BatchModel:
    """Runs `frame` and `step_frame` for several utterances at once; prompts are read one by one."""

    def __init__(self, config: ModelConfig, sessions: dict[str, Session]) -> None:
        self.config, self._sessions = config, sessions

    def speak(self, prompts: Sequence[Ints], seeds: Sequence[int], sampling: SamplingParams, num_frames: int) -> Spoken:
        """Exactly `num_frames` frames of every utterance, whatever the stop decisions say."""
        config, batch = self.config, len(prompts)
        hidden, cache, mask = self._read(prompts, num_frames)
        lengths = np.array([len(p) for p in prompts], np.int32)
        settings = {name: np.repeat(value, batch, axis=0) for name, value in sampling.feeds().items()}
        rngs = [np.random.default_rng(seed) for seed in seeds]
        seen = np.zeros((batch, config.n_vq, config.codebook_size), np.float32)
        row = np.full((batch, 1, 1 + config.n_vq), config.audio_assistant_slot_id, np.int32)
        codes = np.empty((batch, num_frames, config.n_vq), np.int32)
        everyone = np.arange(batch)
        cpu, start = time.process_time(), time.perf_counter()
        for i in range(num_frames):
            uniforms = np.concatenate([draw_uniforms(rng, config.n_vq) for rng in rngs])
            feeds = {"seen": seen, "uniforms": uniforms, **settings}
            if i == 0:
                outputs = self._sessions["frame"].run({"hidden": hidden, **feeds})
            else:
                row[:, 0, 1:] = codes[:, i - 1]
                outputs = self._sessions["step_frame"].run(
                    {"row": row, "position": lengths, "cache_mask": mask, **cache, **feeds}
                )
                for name, past in cache.items():
                    past[everyone, :, lengths] = outputs[name.replace("past", "new")][:, :, 0]
                mask[everyone, 0, 0, lengths] = 0
                lengths = lengths + 1
            codes[:, i], seen = outputs["codes"], outputs["seen_next"]
        return Spoken(codes, time.perf_counter() - start, time.process_time() - cpu)

    def _read(
        self, prompts: Sequence[Ints], num_frames: int
    ) -> tuple[Array, dict[str, Array], npt.NDArray[np.float32]]:
        """Hidden states [B, E], the cache with room for the frames, and its mask."""
        config, batch = self.config, len(prompts)
        rows = -(-(max(map(len, prompts)) + num_frames) // CACHE_BLOCK) * CACHE_BLOCK
        shape = (batch, config.num_heads, rows, config.head_size)
        names = [f"{kind}_{layer}" for layer in range(config.num_layers) for kind in ("key", "value")]
        cache: dict[str, Array] = {f"past_{name}": np.zeros(shape, np.float32) for name in names}
        mask = np.full((batch, 1, 1, rows), MASKED, np.float32)
        hidden = np.empty((batch, config.hidden_size), np.float32)
        for i, prompt in enumerate(prompts):
            positions = np.arange(len(prompt), dtype=np.int32)[None]
            outputs = self._sessions["prefill"].run(
                {"rows": prompt[None], "positions": positions, "last": positions[0, -1:]}
            )
            hidden[i] = outputs["hidden"][0]
            for name in names:
                cache[f"past_{name}"][i, :, : len(prompt)] = outputs[name][0]
            mask[i, ..., : len(prompt)] = 0
        return hidden, cache, mask


def _result(batch: int, spoken: list[Spoken], expected: npt.NDArray[np.int32]) -> BatchResult:
    frames = batch * expected.shape[1]
    return BatchResult(
        batch,
        frames / float(np.median([s.seconds for s in spoken])),
        1e3 * float(np.median([s.cpu_seconds for s in spoken])) / frames,
        all(np.array_equal(s.codes, expected) for s in spoken),
    )
