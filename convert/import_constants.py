"""Constants behind operators that tools leave on weights: moves, casts, dequantisation, arithmetic of shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, numpy_helper

Array = npt.NDArray[Any]
Operands = Sequence[Array]
Attributes = Mapping[str, Any]


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute, or the default."""
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def fold(node: NodeProto, operands: Sequence[Array | None], value: str) -> Array | None:
    """The constant that `node` computes as its output `value`; None when the operator is not one that is folded.

    An operand is None when the node leaves it out; the operators here leave out none but the last ones.
    """
    given = [operand for operand in operands if operand is not None]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Split" and given:
        return _split(given, attributes, len(node.output))[list(node.output).index(value)]
    folded = _FOLDS.get(node.op_type)
    return folded(given, attributes) if folded is not None and (given or node.op_type == "Constant") else None


def _constant(_: Operands, attributes: Attributes) -> Array | None:
    if "value" in attributes:
        return numpy_helper.to_array(attributes["value"])
    for name, dtype in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64),
                        ("value_ints", np.int64)):  # fmt: skip
        if name in attributes:
            return np.asarray(attributes[name], dtype)
    return None


def _divide(operands: Operands, _: Attributes) -> Array:
    a, b = operands
    quotient: Array = np.floor_divide(a, b) if a.dtype.kind in "iu" else np.divide(a, b)
    return quotient


def _cast(operands: Operands, attributes: Attributes) -> Array:
    return operands[0].astype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))


def _reshape(operands: Operands, _: Attributes) -> Array:
    x, sizes = operands
    return x.reshape([x.shape[i] if size == 0 else int(size) for i, size in enumerate(sizes)])


def _squeeze(operands: Operands, attributes: Attributes) -> Array:
    axes = operands[1] if len(operands) > 1 else attributes.get("axes")
    return np.squeeze(operands[0], None if axes is None else tuple(map(int, axes)))


def _unsqueeze(operands: Operands, attributes: Attributes) -> Array:
    axes = operands[1] if len(operands) > 1 else attributes["axes"]
    return np.expand_dims(operands[0], tuple(map(int, axes)))


def _slice(operands: Operands, _: Attributes) -> Array:
    x, starts, ends = operands[:3]
    axes = operands[3] if len(operands) > 3 else np.arange(len(starts))
    steps = operands[4] if len(operands) > 4 else np.ones(len(starts), np.int64)
    index: list[slice] = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[int(axis)] = slice(int(start), None if step < 0 and end < -x.shape[int(axis)] else int(end), int(step))
    return x[tuple(index)]


def _split(operands: Operands, attributes: Attributes, count: int) -> list[Array]:
    axis = attributes.get("axis", 0)
    if len(operands) > 1:
        return np.split(operands[0], np.cumsum(operands[1])[:-1], axis)
    return np.array_split(operands[0], count, axis)


def _dequantize(operands: Operands, attributes: Attributes) -> Array:
    """One scale, one per slice of an axis, or one per block of an axis."""
    x, scale = operands[:2]
    zero = operands[2] if len(operands) > 2 else np.zeros(scale.shape, x.dtype)
    axis = attributes.get("axis", 1)
    if block := attributes.get("block_size", 0):
        scale, zero = (np.repeat(part, block, axis)[tuple(map(slice, x.shape))] for part in (scale, zero))
    elif scale.ndim == 1 and scale.size > 1:
        shape = [1] * x.ndim
        shape[axis] = scale.size
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return ((x.astype(np.int32) - zero.astype(np.int32)).astype(np.float32) * scale).astype(np.float32)


_FOLDS: dict[str, Callable[[Operands, Attributes], Array | None]] = {
    "Constant": _constant,
    "Identity": lambda operands, _: operands[0],
    "Neg": lambda operands, _: np.negative(operands[0]),
    "Add": lambda operands, _: np.add(*operands),
    "Sub": lambda operands, _: np.subtract(*operands),
    "Mul": lambda operands, _: np.multiply(*operands),
    "Div": _divide,
    "Cast": _cast,
    "Transpose": lambda operands, attributes: operands[0].transpose(attributes.get("perm")),
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": lambda operands, attributes: np.concatenate(operands, attributes["axis"]),
    "Gather": lambda operands, a: np.take(operands[0], operands[1].astype(np.int64), a.get("axis", 0)),
    "Slice": _slice,
    "DequantizeLinear": _dequantize,
}
