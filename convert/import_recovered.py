"""What an import has found so far: tensors by their published names, each with the graphs that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from convert.import_blocks import Branch
from convert.import_constants import Array
from convert.import_view import Floats, GraphView
from runtime.compare import FLOAT32_SAME_MATH, Tolerance
from runtime.errors import CheckpointError

MIXED = "the package is damaged or mixes two models: download it again"
_ROUNDED_TO_HALF = 1e-3  # of the largest value, where one graph holds a tensor as float16 and another as float32
HALF_ARITHMETIC = Tolerance(2e-3, 1e-2, "the package computes in float16")


@dataclass(slots=True)
class Recovered:
    """Tensors [out, in] as a checkpoint stores them; convolutions of the quantizer as one folded weight."""

    tensors: dict[str, Floats] = field(default_factory=dict)
    seen_in: dict[str, list[str]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    half: bool = False

    def meet(self, view: GraphView) -> None:
        """Take note of what tools did to a graph's weights, before its tensors come."""
        self.half = self.half or view.half
        if view.half:
            self._note(f"{view.name}: weights are float16; what the conversion rounded away is lost")
        if view.dequantized:
            self._note(f"{view.name}: 8-bit weights were dequantised; what the quantisation rounded away is lost")

    @property
    def tolerance(self) -> Tolerance:
        """For results of the package's graphs against ours."""
        return HALF_ARITHMETIC if self.half else FLOAT32_SAME_MATH

    @property
    def num_compared(self) -> int:
        """Tensors that two graphs or more agree on."""
        return sum(len(graphs) > 1 for graphs in self.seen_in.values())

    def put(self, name: str, value: Floats, graph: str) -> None:
        """Record a tensor; CheckpointError when another graph holds other numbers under the same role."""
        if not np.isfinite(value).all():
            raise CheckpointError(f"{graph}: {name} holds NaN or infinity; download the package again")
        known = self.tensors.get(name)
        graphs = self.seen_in.setdefault(name, [])
        if known is None:
            self.tensors[name] = np.array(value, np.float32, order="C")
        elif known.shape != value.shape:
            raise CheckpointError(
                f"{name}: {list(known.shape)} in {graphs[0]}, {list(value.shape)} in {graph}; {MIXED}"
            )
        elif not self._same(known, value):
            worst = float(np.abs(known - value).max())
            raise CheckpointError(
                f"{name}: {graphs[0]} and {graph} hold different numbers (largest difference {worst:.2g}); {MIXED}"
            )
        if graph not in graphs:
            graphs.append(graph)

    def put_linear(self, name: str, weight: Floats, bias: Floats | None, graph: str) -> None:
        """A layer with a bias, from [in, out]; a tool may have dropped a bias of zeros."""
        self.put(f"{name}.weight", weight.T, graph)
        self.put(f"{name}.bias", np.zeros(weight.shape[1], np.float32) if bias is None else bias, graph)

    def put_scale(self, name: str, branch: Branch, graph: str) -> None:
        """The layer scale of a branch: ones where a tool has multiplied it into the weight."""
        scale, size = branch.scale, branch.outer.weight.shape[1]
        self.put(name, np.broadcast_to(np.float32(1) if scale is None else scale, (size,)), graph)

    def check_coverage(self, view: GraphView, graph: str) -> None:
        """Every stored matrix of a graph that has the shape of known tensors must be one of them, either way round."""
        by_shape: dict[tuple[int, ...], list[tuple[str, Floats]]] = {}
        for name, tensor in self.tensors.items():
            parts = np.split(tensor, 3) if name.endswith("c_attn.weight") else []  # tools may cut q, k and v apart
            for form in (tensor, *parts):
                by_shape.setdefault(tuple(sorted(form.shape)), []).append((name, form))
        for stored, array in view.initializers():
            matrix = np.squeeze(array)
            known = by_shape.get(tuple(sorted(matrix.shape)), [])
            if matrix.size < 2 or not known:
                continue
            matches = [name for name, form in known if self._same(form, matrix) or self._same(form, matrix.T)]
            for name in matches:
                if graph not in self.seen_in[name]:
                    self.seen_in[name].append(graph)
            if not matches and matrix.ndim == 2:
                raise CheckpointError(
                    f"{view.name}: {stored} {list(array.shape)} has the shape of {known[0][0]} and other numbers than "
                    f"any tensor of the graphs before; {MIXED}"
                )

    def _same(self, a: Array, b: Array) -> bool:
        if a.shape != b.shape:
            return False
        return np.array_equal(a, b) or bool(self.half and np.abs(a - b).max() <= _ROUNDED_TO_HALF * np.abs(a).max())

    def _note(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)
