"""How long a sound takes: LLM, codec and total seconds per run, RTF, rows per second, peak memory; warm-up excluded."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.errors import GenerationError
from runtime.sfx.prompt import SoundPrompt
from runtime.sfx.sampling import SfxSampling
from runtime.sfx.sound_effects import Sound, SoundEffects

MB = 1e6


@dataclass(frozen=True, slots=True)
class Summary:
    """One figure over all measured runs."""

    median: float
    p90: float
    mean: float

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        """Linear interpolation between order statistics."""
        array = np.asarray(values, np.float64)
        return Summary(float(np.median(array)), float(np.percentile(array, 90)), float(array.mean()))


@dataclass(frozen=True, slots=True)
class SfxBench:
    """Figures by name, and what they were measured on."""

    backend: str
    seed: int
    warmups: int
    iterations: int
    audio_seconds: float  # of one run; every run is the same sound
    num_rows: int
    figures: dict[str, Summary]
    peak_host_mb: float
    peak_device_mb: float | None  # None on the CPU


def measure(
    effects: SoundEffects,
    prompt: SoundPrompt,
    seed: int,
    sampling: SfxSampling,
    max_new_tokens: int | None,
    warmups: int,
    iterations: int,
    on_run: Callable[[int, Sound], None] = lambda number, sound: None,
) -> SfxBench:
    """Run the same request warmups + iterations times; the same seed must give the same sound each time."""
    if warmups < 0 or iterations < 1:
        raise GenerationError(f"expected 0 or more warm-ups and 1 or more iterations, got {warmups} and {iterations}")
    sounds: list[Sound] = []
    for number in range(warmups + iterations):
        [sound] = effects.create([prompt], [seed], sampling, max_new_tokens)
        if sounds and not np.array_equal(sound.waveform, sounds[0].waveform):
            raise GenerationError(f"run {number + 1} gave another sound than run 1 with the same seed {seed}: the "
                                  "backend is not deterministic, and its times cannot be compared")  # fmt: skip
        sounds.append(sound)
        on_run(number, sound)
    measured = sounds[warmups:]
    totals = [s.llm_seconds + s.codec_seconds for s in measured]
    figures = {
        "llm_seconds": Summary.of([s.llm_seconds for s in measured]),
        "codec_seconds": Summary.of([s.codec_seconds for s in measured]),
        "total_seconds": Summary.of(totals),
        "rtf": Summary.of([t / s.seconds for t, s in zip(totals, measured, strict=True)]),
        "llm_rtf": Summary.of([s.llm_seconds / s.seconds for s in measured]),
        "tokens_per_second": Summary.of([s.num_rows / s.llm_seconds for s in measured]),
    }
    first = measured[0]
    return SfxBench(
        effects.model.backend_name, seed, warmups, iterations, first.seconds, first.num_rows, figures,
        peak_host_bytes() / MB, peak_device_mb(effects.model.backend_name),
    )  # fmt: skip


def peak_host_bytes() -> float:
    """The largest resident size of this process so far; mapped weights count once they were read."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def peak_device_mb(backend_name: str) -> float | None:
    """What torch_npu allocated at most; None when the model does not run on an NPU."""
    if "npu" not in backend_name:
        return None
    import torch

    return float(torch.npu.max_memory_allocated() / MB)  # type: ignore[attr-defined]  # torch_npu adds torch.npu
