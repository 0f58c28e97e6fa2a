"""onnxsim for foreign graphs: shape arithmetic folds once the axes are bound, then everything is checked again.

Our own exports hold no shape logic and do not need it. onnxsim may drop an input it folded away or merge nodes with a
small numeric difference; so the interface must stay and the outputs must agree on random feeds, or nothing is written.
The result holds its weights inside the file, as onnxsim gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxsim

from runtime.compare import Difference, Tolerance, compare_tensors
from runtime.errors import ExportError
from runtime.manifest import write_atomically
from runtime.spec import Array

# Folding changes the order of float32 operations, not the mathematics.
TOLERANCE = Tolerance(1e-5, 1e-5, "float32, folded and merged operations")
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Simplified:
    """What happened to the graph."""

    nodes_before: int
    nodes_after: int
    differences: tuple[Difference, ...]


def simplify_file(source: Path, out: Path, shapes: Shapes, seed: int = 0) -> Simplified:
    """Simplify `source` with its inputs bound to `shapes` and write `out`; ExportError when more than size changed."""
    try:
        model = onnx.load(source)
    except Exception as error:  # onnx and protobuf raise classes without a common base
        raise ExportError(
            f"{source} cannot be read as ONNX ({error}); give a graph with its weights beside it"
        ) from error
    unknown = [name for name in shapes if name not in _inputs(model)]
    if unknown:
        raise ExportError(f"{source}: no input {', '.join(unknown)}; inputs: {', '.join(_inputs(model))}")
    simple, ok = onnxsim.simplify(model, overwrite_input_shapes={n: list(s) for n, s in shapes.items()} or None)
    if not ok:
        raise ExportError(f"{source}: onnxsim's own check failed; use the graph as it is")
    lost = [name for name in _inputs(model) if name not in _inputs(simple)]
    if lost or [o.name for o in model.graph.output] != [o.name for o in simple.graph.output]:
        raise ExportError(f"{source}: onnxsim changed the interface (inputs lost: {', '.join(lost) or 'none'})")
    differences = _compare(model, simple, np.random.default_rng(seed))
    failed = [d for d in differences if not d.passed]
    if failed:
        raise ExportError(
            f"{source}: the simplified graph computes something else: {failed[0].name}: {failed[0].reason}"
        )
    write_atomically(out, simple.SerializeToString())
    return Simplified(len(model.graph.node), len(simple.graph.node), differences)


def _inputs(model: onnx.ModelProto) -> dict[str, Any]:
    weights = {tensor.name for tensor in model.graph.initializer}
    return {i.name: i.type.tensor_type for i in model.graph.input if i.name not in weights}


def _compare(model: onnx.ModelProto, simple: onnx.ModelProto, rng: np.random.Generator) -> tuple[Difference, ...]:
    feeds = {name: _random(name, kind, rng) for name, kind in _inputs(simple).items()}
    before, after = (_run(m, feeds) for m in (model, simple))
    names = [output.name for output in model.graph.output]
    return tuple(compare_tensors(n, a, b, TOLERANCE) for n, a, b in zip(names, before, after, strict=True))


def _random(name: str, kind: Any, rng: np.random.Generator) -> Array:
    """Small random values; integers stay 0 or 1, so that they are valid indices."""
    shape = [d.dim_value for d in kind.shape.dim]
    if any(size < 1 for size in shape):
        raise ExportError(f"{name}: its axes are not all bound; give --input-shape NAME:1,17 for every open input")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if np.issubdtype(dtype, np.floating):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, dict(feeds))
    return results
