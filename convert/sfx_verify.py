"""One part of MOSS-SoundEffect: the torch module and the exported file answer the same feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from runtime.backends.ort import OrtBackend
from runtime.compare import FLOAT32_SAME_MATH, Tolerance, compare_tensors
from runtime.errors import ExportError
from runtime.sampling import MASKED
from runtime.spec import Array, GraphSpec, TensorSpec

NO_BFLOAT16 = "not run: ONNX Runtime's CPU kernels have no bfloat16"
# ONNX Runtime computes float16 nodes in float32 and rounds at their ends, torch rounds inside; 2^-11 per rounding.
FLOAT16 = Tolerance(5e-3, 5e-3, "float16, other places of rounding")
CODEC = Tolerance(2e-5, 5e-5, "float32 through the whole codec")  # as convert/verify.py


@dataclass(frozen=True, slots=True)
class Verification:
    """Largest difference per output, and what was run."""

    max_abs_difference: dict[str, float]
    what: str


def verify_part(
    spec: GraphSpec, module: nn.Module, path: Path, examples: Sequence[Mapping[str, int]], num_codes: int, seed: int = 0
) -> Verification:
    """Run module and file on the same feeds, once for each set of axes; ExportError when they differ."""
    dtypes = {t.dtype for t in (*spec.inputs, *spec.outputs)} | {str(p.dtype)[6:] for p in module.parameters()}
    if "bfloat16" in dtypes:
        return Verification({}, NO_BFLOAT16)
    tolerance = FLOAT16 if "float16" in dtypes else CODEC if spec.name.startswith("codec") else FLOAT32_SAME_MATH
    rng = np.random.default_rng(seed)
    worst: dict[str, float] = {}
    with OrtBackend().open(spec, path) as session:
        for axes in examples:
            bound = spec.bind(**{name: axes[name] for name in spec.dynamic_axes()})
            feeds = {t.name: _feed(t, num_codes, rng) for t in bound.inputs}
            with torch.inference_mode():
                results = module(*(torch.from_numpy(feeds[t.name]) for t in spec.inputs))
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            got = session.run(feeds)
            for tensor, result in zip(bound.outputs, results, strict=True):
                found = compare_tensors(tensor.name, result.numpy(), got[tensor.name], tolerance)
                if not found.passed:
                    raise ExportError(f"{spec.name}: torch and ONNX differ at {axes}: {found.name}: {found.reason}")
                worst[tensor.name] = max(found.max_abs, worst.get(tensor.name, 0.0))
    return Verification(worst, f"torch = ONNX Runtime (largest difference {max(worst.values()):.1e})")


def _feed(t: TensorSpec, num_codes: int, rng: np.random.Generator) -> Array:
    shape = t.bound_shape
    if t.name == "cache_mask":
        value = np.where(np.arange(shape[-1]) < 1 + shape[-1] // 2, 0.0, MASKED) + np.zeros(shape)
    elif t.name == "row_mask":
        value = np.tile(np.where(np.tri(shape[1], dtype=bool), 0.0, MASKED), (shape[0] // shape[1], 1))
    elif t.name == "codes":
        value = rng.integers(0, num_codes, shape)
    elif t.name == "positions":
        value = np.broadcast_to(np.arange(shape[-1]) + 60, shape)
    elif t.name.startswith("past_positions"):  # slot s holds the newest frame below 60 with that remainder
        value = np.broadcast_to(59 - (59 - np.arange(shape[-1])) % shape[-1], shape)
    else:
        value = rng.standard_normal(shape)
    return np.ascontiguousarray(value, dtype=t.dtype)
