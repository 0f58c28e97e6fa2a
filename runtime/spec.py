"""The interface of a graph as data: names, dtypes and shapes of its inputs and outputs.

An axis is a number, or a name ("B", "T", …) that `bind` turns into a number. Exporter, checker, ATC command,
backends and manifest all read the same GraphSpec; none of them repeats it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import SpecMismatchError

Array = npt.NDArray[Any]
Axis = int | str

DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "bool")


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a spec's dtype; bfloat16 (MOSS-SoundEffect only) comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a graph: `TensorSpec("rows", "int32", ("B", "T", 17))`."""

    name: str
    dtype: str
    shape: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if not self.name or any(c in self.name for c in ":; "):
            raise SpecMismatchError(f"tensor name {self.name!r}: ATC's --input_shape splits on ':' and ';'; rename it")
        if self.dtype not in DTYPES:
            raise SpecMismatchError(f"{self.name}: dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        for axis in self.shape:
            if isinstance(axis, int) and axis < 1:
                raise SpecMismatchError(f"{self.name}: axis {axis} in {self.shape}; ATC takes no zero-sized tensors")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def is_bound(self) -> bool:
        return all(isinstance(axis, int) for axis in self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the bound tensor in bytes."""
        return int(np.prod(self.bound_shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize

    @property
    def bound_shape(self) -> tuple[int, ...]:
        """The shape as numbers; SpecMismatchError when an axis is still a name."""
        numbers = tuple(axis for axis in self.shape if isinstance(axis, int))
        if len(numbers) != len(self.shape):
            raise SpecMismatchError(f"{self.name}: {self} has unbound axes; bind them first")
        return numbers

    def match(self, shape: tuple[int, ...], axes: Mapping[str, int]) -> dict[str, int] | None:
        """The numbers that named axes get from an array of this shape; None when it does not fit them and `axes`."""
        if len(shape) != len(self.shape):
            return None
        found: dict[str, int] = {}
        for axis, size in zip(self.shape, shape, strict=True):
            want = axis if isinstance(axis, int) else axes.get(axis) or found.setdefault(axis, size)
            if want != size or size < 1:
                return None
        return found

    def bind(self, axes: Mapping[str, int]) -> TensorSpec:
        """Replace the named axes that `axes` knows."""
        shape = tuple(axes.get(axis, axis) if isinstance(axis, str) else axis for axis in self.shape)
        return TensorSpec(self.name, self.dtype, shape)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """The fixed interface of one graph. Input and output order is part of it."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [t.name for t in (*self.inputs, *self.outputs)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise SpecMismatchError(f"{self.name}: tensor names used twice: {', '.join(sorted(twice))}")
        if not self.inputs or not self.outputs:
            raise SpecMismatchError(f"{self.name}: a graph needs at least one input and one output")

    def dynamic_axes(self) -> tuple[str, ...]:
        """Names of the axes that are not bound, in the order they appear."""
        seen = dict.fromkeys(a for t in (*self.inputs, *self.outputs) for a in t.shape if isinstance(a, str))
        return tuple(seen)

    def bind(self, **axes: int) -> GraphSpec:
        """Bind named axes to numbers; an axis that the graph does not have is an error."""
        unknown = sorted(set(axes) - set(self.dynamic_axes()))
        if unknown:
            raise SpecMismatchError(
                f"{self.name}: no axis named {', '.join(unknown)}; it has {', '.join(self.dynamic_axes()) or 'none'}"
            )
        return GraphSpec(self.name, tuple(t.bind(axes) for t in self.inputs), tuple(t.bind(axes) for t in self.outputs))

    def bind_known(self, axes: Mapping[str, int]) -> GraphSpec:
        """Bind those of `axes` that the graph has."""
        return self.bind(**{axis: size for axis, size in axes.items() if axis in self.dynamic_axes()})

    def atc_input_shape(self) -> str:
        """The value of ATC's --input_shape: "rows:1,128,17;positions:1,128"; every axis must be bound."""
        return ";".join(f"{t.name}:{','.join(map(str, t.bound_shape))}" for t in self.inputs)

    def check_feeds(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """Check names, dtypes and shapes of `feeds`; return the numbers that the named axes take.

        It runs before every launch, so what is right is only looked at, and what is wrong is put into words.
        """
        axes: dict[str, int] = {}
        for tensor in self.inputs:
            value = feeds.get(tensor.name)
            if value is None:
                raise SpecMismatchError(f"{self.name}: input {tensor.name} is missing; expected {tensor}")
            found = tensor.match(value.shape, axes)
            if found is None or value.dtype != numpy_dtype(tensor.dtype):
                got = f"{value.dtype}[{', '.join(map(str, value.shape))}]"
                raise SpecMismatchError(f"{self.name}: {tensor.name}: expected {tensor.bind(axes)}, got {got}")
            axes |= found
        if len(feeds) > len(self.inputs):
            names = [t.name for t in self.inputs]
            unknown = next(name for name in feeds if name not in names)
            raise SpecMismatchError(f"{self.name}: unknown input {unknown}; inputs: {', '.join(names)}")
        return axes

    def to_dict(self) -> dict[str, Any]:
        """As JSON data, for the manifest."""

        def tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
            return [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in specs]

        return {"name": self.name, "inputs": tensors(self.inputs), "outputs": tensors(self.outputs)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> GraphSpec:
        """The inverse of to_dict."""

        def tensors(rows: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(r["name"], r["dtype"], tuple(r["shape"])) for r in rows)

        return GraphSpec(data["name"], tensors(data["inputs"]), tensors(data["outputs"]))
