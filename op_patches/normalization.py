"""What LayerNormalization and its relatives share: (x - mean) / sqrt(mean of squares + epsilon) in three forms.

    plain            in the type of x; GE fuses it into one kernel
    float32 island   Cast to float32, plain, and back: for float16 and bfloat16 graphs
    scaled           the same quotient with both sides divided by s = max(max|d|, sqrt(epsilon)), so that squares stay
                     within [0, 1]: for float16 where ATC would undo an island

The scaled form is exact algebra for every s > 0, and s >= sqrt(epsilon) keeps (sqrt(epsilon) / s)^2 <= 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from op_patches.graph_view import GraphView, stores_float16
from op_patches.rewriter import Builder

PLAIN, ISLAND, SCALED = "plain", "float32 island", "scaled"


@dataclass(frozen=True, slots=True)
class Normalized:
    """The quotient and what the optional outputs need."""

    value: str
    elem: int  # the type it was computed in
    mean: str  # "" when not centred
    root: str  # sqrt of the (scaled) mean of squares
    s: str  # the scale, "" in the other forms

    def operand(self, new: Builder, graph: GraphView, name: str) -> str:
        """A scale or bias in the type of the computation."""
        return name if graph.elem(name) == self.elem else new.cast(name, self.elem)

    def inverse_deviation(self, new: Builder) -> str:
        """1 / sqrt(variance + epsilon), the output InvStdDev."""
        return new.op("Reciprocal", new.op("Mul", self.s, self.root) if self.s else self.root)


def choose_form(graph: GraphView, elem: int) -> str:
    """Pick by what the target does to float32, and by what the graph computes in."""
    if elem == TensorProto.BFLOAT16:
        return ISLAND  # the range of float32; three digits are too few for a mean
    if stores_float16(graph.target) and elem in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return SCALED
    return ISLAND if elem == TensorProto.FLOAT16 else PLAIN


def normalized_axes(axis: int, rank: int | None) -> list[int] | None:
    """The axes from `axis` to the last; None when that depends on an unknown rank."""
    if axis < 0:
        return list(range(axis, 0))
    return None if rank is None else list(range(axis - rank, 0))


def normalize(
    new: Builder,
    graph: GraphView,
    x: str,
    axes: list[int],
    epsilon: float,
    centred: bool,
    elem: int | None = None,
) -> tuple[Normalized, str]:
    """Write the quotient; return it and the form taken. `elem` is the type of an x that was only just written."""
    elem = elem or graph.elem(x) or TensorProto.FLOAT
    form = choose_form(graph, elem)
    if form == ISLAND:
        elem = TensorProto.FLOAT
        x = new.cast(x, elem)
    mean = new.reduce("ReduceMean", x, axes) if centred else ""
    d = new.op("Sub", x, mean) if centred else x
    s = ""
    if form == SCALED:
        root_epsilon = new.const(_typed(np.sqrt(epsilon), elem), hint="sqrt_epsilon")
        s = new.op("Max", new.reduce("ReduceMax", new.op("Abs", d), axes), root_epsilon)
        d = new.op("Div", d, s)
        r = new.op("Div", root_epsilon, s)
        addend = new.op("Mul", r, r)
    else:
        addend = new.const(_typed(epsilon, elem), hint="epsilon")
    variance = new.reduce("ReduceMean", new.op("Mul", d, d), axes)
    root = new.op("Sqrt", new.op("Add", variance, addend))
    return Normalized(new.op("Div", d, root), elem, mean, root, s), form


def _typed(value: float, elem: int) -> np.ndarray[tuple[int, ...], np.dtype[np.floating]]:
    return np.asarray(value, dtype=helper.tensor_dtype_to_np_dtype(elem))
