"""What the generation loop sees: prompt in, one frame after the other out. Cache and device memory stay behind it.

    prefill(rows)            reads the prompt; keys, values and the last hidden state stay in the model
    next_frame(uniforms, s)  the first call runs `frame` on that hidden state; every later one runs `step_frame`
                             (or `step`, then `frame`) on the codes of the frame before

`HostFrameModel` keeps the cache in preallocated NumPy arrays, for ONNX Runtime and PyTorch. The OM backend has its own
FrameModel with the cache on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.sampling import SamplingParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Frame:
    """One decision of the model. `codes` [n_vq] count only when `go_on`; logits are kept only on request."""

    go_on: bool
    codes: Ints
    hidden: Floats | None = None  # [E], the state that this frame was sampled from
    slot_logits: Floats | None = None  # [2]
    code_logits: Floats | None = None  # [n_vq, V]


class FrameModel(Protocol):
    """One utterance at a time; a second prefill starts the next utterance."""

    @property
    def capacity(self) -> int:
        """Rows that prompt and frames together may take."""
        ...

    @property
    def backend_name(self) -> str:
        """What ran, as the stats print it: "ort", "torch cpu", "om (simulated)"."""
        ...

    def prefill(self, rows: Ints) -> None:
        """Read the prompt rows [T, 1 + n_vq]; CapacityError before anything runs when they do not fit."""
        ...

    def next_frame(self, uniforms: Floats, sampling: SamplingParams, keep_logits: bool = False) -> Frame:
        """Sample the next frame; `uniforms` is [1, 1 + n_vq]. CapacityError before the cache would overflow."""
        ...

    def force_frame(self, codes: Ints) -> None:
        """Replace the codes of the last frame (teacher forcing); the next step reads these instead."""
        ...

    def close(self) -> None:
        """Free sessions and device memory."""
        ...
