"""One part of MOSS-SoundEffect: the torch module and the exported file answer the same feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from runtime.backends.ort import OrtBackend
from runtime.compare import FLOAT32_SAME_MATH, Tolerance, compare_tensors
from runtime.errors import ExportError, PatchError
from runtime.sampling import MASKED
from runtime.spec import Array, GraphSpec, TensorSpec, numpy_dtype

# ONNX Runtime's CPU kernels have no bfloat16; onnx's reference evaluator has, in NumPy loops: for small parts only.
REFERENCE_MAX_BYTES = 64_000_000
TOO_LARGE = "not run: ONNX Runtime's CPU kernels have no bfloat16, and the part is too large for onnx.reference"
BFLOAT16 = Tolerance(4e-2, 4e-2, "bfloat16, other places of rounding")  # 2^-8 per rounding
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
    tolerance = CODEC if spec.name.startswith("codec") else FLOAT32_SAME_MATH
    tolerance = BFLOAT16 if "bfloat16" in dtypes else FLOAT16 if "float16" in dtypes else tolerance
    if tolerance is BFLOAT16 and sum(p.nbytes for p in module.parameters()) > REFERENCE_MAX_BYTES:
        return Verification({}, TOO_LARGE)
    rng = np.random.default_rng(seed)
    worst: dict[str, float] = {}
    with _ReferenceSession(spec, path) if tolerance is BFLOAT16 else OrtBackend().open(spec, path) as session:
        for axes in examples:
            bound = spec.bind(**{name: axes[name] for name in spec.dynamic_axes()})
            feeds = {t.name: _feed(t, num_codes, rng) for t in bound.inputs}
            with torch.inference_mode():
                results = module(*(_as_tensor(feeds[t.name]) for t in spec.inputs))
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            got = session.run(feeds)
            for tensor, result in zip(bound.outputs, results, strict=True):
                want = (result.float() if result.is_floating_point() else result).numpy()
                found = compare_tensors(tensor.name, want, got[tensor.name].astype(want.dtype), tolerance)
                if not found.passed:
                    raise ExportError(f"{spec.name}: torch and ONNX differ at {axes}: {found.name}: {found.reason}")
                worst[tensor.name] = max(found.max_abs, worst.get(tensor.name, 0.0))
    ran = "onnx.reference" if tolerance is BFLOAT16 else "ONNX Runtime"
    return Verification(worst, f"torch = {ran} (largest difference {max(worst.values()):.1e})")


def compare_files(
    spec: GraphSpec, before: Path, after: Path, examples: Sequence[Mapping[str, int]], num_codes: int, seed: int = 0
) -> None:
    """PatchError unless two files of one graph answer the same feeds alike."""
    rng = np.random.default_rng(seed)
    tolerance = CODEC if spec.name.startswith("codec") else FLOAT32_SAME_MATH
    with OrtBackend().open(spec, before) as original, OrtBackend().open(spec, after) as patched:
        for axes in examples:
            bound = spec.bind(**{name: axes[name] for name in spec.dynamic_axes()})
            feeds = {t.name: _feed(t, num_codes, rng) for t in bound.inputs}
            expected, got = original.run(feeds), patched.run(feeds)
            for t in spec.outputs:
                found = compare_tensors(t.name, expected[t.name], got[t.name], tolerance)
                if not found.passed:
                    raise PatchError(f"{spec.name}: the patched graph differs at {axes}: {found.name}: {found.reason}")


def _feed(t: TensorSpec, num_codes: int, rng: np.random.Generator) -> Array:
    shape = t.bound_shape
    value: Array
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
    return np.ascontiguousarray(value, dtype=numpy_dtype(t.dtype))


def _as_tensor(array: Array) -> Tensor:
    if array.dtype == numpy_dtype("bfloat16"):
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _ReferenceSession:
    """A graph in onnx's reference evaluator."""

    def __init__(self, spec: GraphSpec, path: Path) -> None:
        from onnx.reference import ReferenceEvaluator

        self.spec = spec
        self._evaluator = ReferenceEvaluator(str(path))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        values = self._evaluator.run(None, dict(feeds))
        return dict(zip([t.name for t in self.spec.outputs], values, strict=True))

    def __enter__(self) -> _ReferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass
