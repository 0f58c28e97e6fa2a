"""Stage parity for one graph: the torch module and the exported file answer the same feeds, on several shapes.

The comparison itself is runtime/compare.py; here are only the feeds: valid values for every input by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from runtime.backends.ort import OrtBackend
from runtime.compare import FLOAT32_SAME_MATH, Difference, Tolerance, compare_tensors
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import ExportError
from runtime.graphs import BLOCK_FRAMES, LLM_GRAPHS, derived_axes
from runtime.sampling import MASKED, SamplingParams
from runtime.spec import Array, GraphSpec, TensorSpec

# The codec's waveform is a sum through 12 to 24 layers of a network whose values reach some tens; golden runs agree
# to 2e-5 on signals below 1 (golden README), the relative part covers louder made-up weights.
# In step_frame the logits lie behind a LayerNorm that scales the hidden state, and its difference with it, up to values
# of 4 to 5; the two slot logits keep that error when both come out near zero. Seen at full size, made up, four seeds,
# float32 and int8: up to 4.6e-5. A wrong graph is off by far more than four times that.
LOGITS = Tolerance(2e-4, 1e-5, "float32, a hidden state through a LayerNorm and a second transformer")
TOLERANCES: dict[str, Tolerance] = {
    "waveform": Tolerance(2e-5, 5e-5, "float32 through the whole codec"),
    "slot_logits": LOGITS,
    "code_logits": LOGITS,
}


def example_axes(name: str, codec: CodecConfig) -> list[dict[str, int]]:
    """Shapes to verify a graph on: batch and length both vary."""
    if name == "prefill":
        return [{"B": 1, "T": 23}, {"B": 2, "T": 7}]
    if name in ("step", "step_frame"):
        return [{"B": 1, "C": 19}, {"B": 2, "C": 5}]
    if name == "extend":
        return [{"B": 1, "C": 19, "T": 7}, {"B": 2, "C": 1, "T": 1}]
    if name == "frame":
        return [{"B": 1}, {"B": 3}]
    frames = [(1, 2 * BLOCK_FRAMES), (2, BLOCK_FRAMES)] if name == "codec_decode" else [(1, 3), (2, 1)]
    return [{"B": batch, **derived_axes(codec, n)} for batch, n in frames]


def example_feeds(
    spec: GraphSpec, model: ModelConfig, codec: CodecConfig, rng: np.random.Generator
) -> dict[str, Array]:
    """Random but valid feeds for a bound graph."""
    return {t.name: _feed(t, spec, model, codec, rng) for t in spec.inputs}


def _feed(t: TensorSpec, spec: GraphSpec, model: ModelConfig, codec: CodecConfig, rng: np.random.Generator) -> Array:
    shape = t.bound_shape
    values: dict[str, Any] = {
        "rows": lambda: _rows(shape, model, rng),
        "row": lambda: _rows(shape, model, rng),
        "positions": lambda: np.broadcast_to(np.arange(shape[-1]) + _first_frame(spec), shape),
        "last": lambda: rng.integers(0, spec.inputs[0].bound_shape[1], shape),
        "position": lambda: rng.integers(0, 200, shape),
        "cache_mask": lambda: np.where(np.arange(shape[-1]) < 1 + shape[-1] // 2, 0.0, MASKED) + np.zeros(shape),
        "seen": lambda: rng.random(shape) < 0.1,
        "uniforms": lambda: rng.random(shape),
        "waveform": lambda: 0.1 * rng.standard_normal(shape),
        "codes": lambda: rng.integers(0, codec.codebook_size, shape),
        "penalty": lambda: np.full(shape, SamplingParams().repetition_penalty),
        **{
            name: lambda v=v: np.repeat(v, shape[0], 0)
            for name, v in SamplingParams().feeds().items()
            if name != "penalty"
        },
    }
    if t.name.startswith("past_positions"):  # slot s holds the newest frame p < 60 with p mod ring_frames = s
        slots = np.arange(shape[-1])
        value: Array = np.broadcast_to(59 - (59 - slots) % shape[-1], shape)
    elif t.name in values:
        value = values[t.name]()
    else:
        value = rng.standard_normal(shape)
    return np.ascontiguousarray(value, dtype=t.dtype)


def _first_frame(spec: GraphSpec) -> int:
    """Graphs with rings continue behind 60 frames."""
    return 60 if any(t.name.startswith("past_positions") for t in spec.inputs) else 0


def _rows(shape: tuple[int, ...], model: ModelConfig, rng: np.random.Generator) -> Array:
    rows = rng.integers(0, min(model.codebook_sizes), shape)
    rows[..., 0] = rng.integers(0, model.vocab_size, shape[:-1])
    rows[:, ::2, 1:] = model.audio_pad_id  # text rows among audio rows
    return rows


def verify_graph(
    spec: GraphSpec, module: nn.Module, path: Path, model: ModelConfig, codec: CodecConfig, seed: int = 0
) -> dict[str, float]:
    """Run module and file on the same feeds; return the largest difference per output, or raise ExportError."""
    worst: dict[str, Difference] = {}
    rng = np.random.default_rng(seed)
    with OrtBackend().open(spec, path) as session:
        for axes in example_axes(spec.name, codec):
            bound = spec.bind_known(axes)
            feeds = example_feeds(bound, model, codec, rng)
            with torch.inference_mode():
                results = module(*(torch.from_numpy(feeds[t.name]) for t in spec.inputs))
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            expected = {t.name: r.numpy() for t, r in zip(spec.outputs, results, strict=True)}
            got = session.run(feeds)
            for tensor in bound.outputs:
                if got[tensor.name].shape != tensor.bound_shape:
                    raise ExportError(f"{spec.name}: {tensor.name}: expected {tensor}, got {got[tensor.name].shape}")
                tolerance = TOLERANCES.get(tensor.name, FLOAT32_SAME_MATH)
                found = compare_tensors(tensor.name, expected[tensor.name], got[tensor.name], tolerance)
                if not found.passed:
                    raise ExportError(f"{spec.name}: torch and ONNX differ at {axes}: {found.name}: {found.reason}")
                if tensor.name not in worst or found.max_abs > worst[tensor.name].max_abs:
                    worst[tensor.name] = found
    return {name: found.max_abs for name, found in worst.items()}


def is_llm_graph(name: str) -> bool:
    """Whether a graph belongs to the language model (and not to the codec)."""
    return name in LLM_GRAPHS
