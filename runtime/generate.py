"""The loop: prompt rows -> frames, until the model ends the utterance or a limit is reached.

It knows a FrameModel and a random generator, nothing of text, audio or devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from runtime.errors import CapacityError, GenerationError
from runtime.frame_model import Frame, FrameModel
from runtime.sampling import SamplingParams, draw_uniforms

# stop: the model ended it; length: the limit of frames; the others: runtime/stop_rules.py
FinishReason = Literal["stop", "length", "loop", "silence", "runaway"]
OnFrame = Callable[[npt.NDArray[np.int32]], FinishReason | None]
MAX_FRAMES = 375  # the published product limit: 30 s


@dataclass(frozen=True, slots=True)
class Generation:
    """The frames of one utterance and how they came about."""

    codes: npt.NDArray[np.int32]  # [F, n_vq]
    finish_reason: FinishReason
    prompt_rows: int
    prefill_seconds: float
    frames_seconds: float
    frames: tuple[Frame, ...] = field(default=())  # with logits, when they were asked for

    @property
    def num_frames(self) -> int:
        return len(self.codes)

    @property
    def frames_per_second(self) -> float:
        """Without prefill; 0 when there are no frames."""
        return self.num_frames / self.frames_seconds if self.frames_seconds > 0 else 0.0


def generate(
    model: FrameModel,
    rows: npt.NDArray[np.int32],
    seed: int,
    sampling: SamplingParams,
    max_frames: int = MAX_FRAMES,
    keep_logits: bool = False,
    on_frame: OnFrame = lambda codes: None,
) -> Generation:
    """Read the prompt rows [T, 1 + n_vq] and generate frames; `on_frame` gets the codes [n_vq] as they come.

    What `on_frame` returns ends the utterance with that reason; None goes on.

    The same seed gives the same frames: one generator per call, 1 + n_vq draws per frame (MODEL.md 5.4).
    """
    if max_frames < 1:
        raise GenerationError(f"max_frames: expected at least 1, got {max_frames}")
    if len(rows) + max_frames > model.capacity:
        raise CapacityError(
            f"{len(rows)} prompt rows and up to {max_frames} frames need {len(rows) + max_frames} rows, the model "
            f"takes {model.capacity}; shorten the text or the reference clip, or lower --max-frames"
        )
    n_vq = rows.shape[1] - 1
    rng = np.random.default_rng(seed)
    start = time.perf_counter()
    model.prefill(rows)
    prefilled = time.perf_counter()
    codes: list[npt.NDArray[np.int32]] = []
    kept: list[Frame] = []
    reason: FinishReason = "length"
    for _ in range(max_frames):
        frame = model.next_frame(draw_uniforms(rng, n_vq), sampling, keep_logits)
        if keep_logits:
            kept.append(frame)
        if not frame.go_on:
            reason = "stop"
            break
        codes.append(frame.codes.copy())
        lost = on_frame(codes[-1])
        if lost is not None:
            reason = lost
            break
    done = time.perf_counter()
    all_codes = np.stack(codes) if codes else np.zeros((0, n_vq), np.int32)
    return Generation(all_codes, reason, len(rows), prefilled - start, done - prefilled, tuple(kept))
