"""The closed set of torch functions that a module may use while traced, and the ONNX nodes that each one emits.

Every handler computes the example value with torch and emits nodes with the same meaning. Shapes never appear: axes
are copied by zeros in Reshape, slices have constant bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor, nn

from convert.trace import HANDLERS, ONNX_TYPES, GraphBuilder, Symbol, flat
from runtime.errors import ExportError

FAR = 2**31 - 1  # an open slice end; INT64_MAX is misread by some CANN releases


def _handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Symbol) else x


def _binary(op_type: str, compute: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
    def handler(b: GraphBuilder, x: Any, y: Any) -> Any:
        value = compute(_value(x), _value(y))
        kinds = {v.dtype for v in (x, y) if isinstance(v, Symbol | Tensor)}
        if len(kinds) > 1:
            raise ExportError(
                f"{op_type} of {' and '.join(map(str, kinds))}: ONNX does not promote; cast in the module"
            )
        tensor_dtype = kinds.pop()
        operands = [v if isinstance(v, Symbol | Tensor) else torch.tensor(v, dtype=tensor_dtype) for v in (x, y)]
        return b.emit(op_type, operands, value)

    return handler


for _torch_name, _onnx_name, _compute in (
    ("add", "Add", torch.add), ("sub", "Sub", torch.sub), ("mul", "Mul", torch.mul), ("div", "Div", torch.div),
    ("matmul", "MatMul", torch.matmul), ("eq", "Equal", torch.eq), ("lt", "Less", torch.lt),
    ("le", "LessOrEqual", torch.le), ("gt", "Greater", torch.gt), ("ge", "GreaterOrEqual", torch.ge),
    ("minimum", "Min", torch.minimum), ("maximum", "Max", torch.maximum),
    ("logical_and", "And", torch.logical_and), ("logical_or", "Or", torch.logical_or),
):  # fmt: skip
    HANDLERS[_torch_name] = _binary(_onnx_name, _compute)
HANDLERS.update({"and": HANDLERS["logical_and"], "or": HANDLERS["logical_or"], "truediv": HANDLERS["div"]})


def _unary(op_type: str, compute: Callable[[Any], Tensor]) -> Callable[..., Any]:
    return lambda b, x: b.emit(op_type, [x], compute(x.value))


@_handles("remainder")
def _remainder(b: GraphBuilder, x: Any, y: Any) -> Any:
    """Mod of integers: the sign of the divisor, as ONNX Mod with fmod = 0."""
    return _binary("Mod", torch.remainder)(b, x, y)


@_handles("floor_divide")
def _floor_divide(b: GraphBuilder, x: Any, y: Any) -> Any:
    """Integer Div; ONNX truncates, so the module must divide non-negative numbers."""
    return _binary("Div", torch.floor_divide)(b, x, y)


for _torch_name, _onnx_name in (
    ("neg", "Neg"), ("exp", "Exp"), ("sqrt", "Sqrt"), ("tanh", "Tanh"), ("erf", "Erf"), ("sin", "Sin"), ("cos", "Cos"),
    ("sigmoid", "Sigmoid"), ("logical_not", "Not"), ("abs", "Abs"), ("log", "Log"), ("reciprocal", "Reciprocal"),
):  # fmt: skip
    HANDLERS[_torch_name] = _unary(_onnx_name, getattr(torch, _torch_name))


@_handles("layer_norm")
def _layer_norm(b: GraphBuilder, x: Symbol, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Any:
    value = nn.functional.layer_norm(x.value, shape, weight, bias, eps)
    return b.emit("LayerNormalization", [x, weight, bias], value, axis=-1, epsilon=eps)


@_handles("gelu")
def _gelu(b: GraphBuilder, x: Any, approximate: str = "none") -> Any:
    """Primitives, in the order of multiplications that ONNX Runtime recognises as Gelu and FastGelu."""
    if approximate == "none":
        gate = torch.erf(x / math.sqrt(2.0)) + 1.0
        return (x * gate) * 0.5
    inner = ((x * 0.044715) * x + 1.0) * (x * math.sqrt(2.0 / math.pi))
    return (torch.tanh(inner) + 1.0) * (x * 0.5)


@_handles("silu")
def _silu(b: GraphBuilder, x: Any, inplace: bool = False) -> Any:
    return x * torch.sigmoid(x)


@_handles("softmax")
def _softmax(b: GraphBuilder, x: Symbol, dim: int, dtype: Any = None, **_: Any) -> Any:
    return b.emit("Softmax", [x], torch.softmax(x.value, dim), axis=dim)


@_handles("unflatten")
def _unflatten(b: GraphBuilder, x: Symbol, dim: int, sizes: Sequence[int]) -> Any:
    """Reshape that copies the axes before `dim` by zeros, so that symbolic axes need no Shape node."""
    value: Tensor = torch.unflatten(x.value, dim, tuple(sizes))
    dim %= x.ndim
    after = x.ndim - dim - 1
    if after > 1:
        raise ExportError("unflatten before more than one trailing axis: the trailing sizes would have to be read")
    tail = [-1] if after and -1 not in sizes else [_static(x, x.ndim - 1)] if after else []
    return b.emit("Reshape", [x, b.constant([0] * dim + list(sizes) + tail)], value)


def _static(x: Symbol, axis: int) -> int:
    """The size of an axis that the module's own weights fix (a feature axis); the example value has it."""
    return int(x.value.shape[axis])


@_handles("flatten")
def _flatten_axes(b: GraphBuilder, x: Symbol, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Reshape [0…, -1, rest]; the axes behind `end_dim` must be feature axes of fixed size."""
    value = x.value.flatten(start_dim, end_dim)
    start, end = start_dim % x.ndim, end_dim % x.ndim
    tail = [_static(x, axis) for axis in range(end + 1, x.ndim)]
    return b.emit("Reshape", [x, b.constant([0] * start + [-1, *tail])], value)


@_handles("transpose")
def _transpose(b: GraphBuilder, x: Symbol, dim0: int, dim1: int) -> Any:
    perm = list(range(x.ndim))
    perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return b.emit("Transpose", [x], x.value.transpose(dim0, dim1), perm=perm)


@_handles("permute")
def _permute(b: GraphBuilder, x: Symbol, *dims: Any) -> Any:
    order = [int(d) % x.ndim for d in flat(dims)]
    return b.emit("Transpose", [x], x.value.permute(order), perm=order)


@_handles("unsqueeze")
def _unsqueeze(b: GraphBuilder, x: Symbol, dim: int) -> Any:
    value = x.value.unsqueeze(dim)
    return b.emit("Unsqueeze", [x, b.constant([dim % value.ndim])], value)


@_handles("squeeze")
def _squeeze(b: GraphBuilder, x: Symbol, dim: int) -> Any:
    return b.emit("Squeeze", [x, b.constant([dim % x.ndim])], x.value.squeeze(dim))


@_handles("cat", "concat")
def _cat(b: GraphBuilder, parts: Sequence[Any], dim: int = 0) -> Any:
    return b.emit("Concat", list(parts), torch.cat([_value(p) for p in parts], dim), axis=dim)


@_handles("stack")
def _stack(b: GraphBuilder, parts: Sequence[Any], dim: int = 0) -> Any:
    return torch.cat([p.unsqueeze(dim) for p in parts], dim)


@_handles("split")
def _split(b: GraphBuilder, x: Symbol, sizes: Sequence[int], dim: int = 0) -> Any:
    values = torch.split(x.value, list(sizes), dim)
    return tuple(b.emit("Split", [x, b.constant(list(sizes))], values, axis=dim % x.ndim))


@_handles("getitem")
def _getitem(b: GraphBuilder, x: Symbol, index: Any) -> Any:
    """Constant slices (one Slice node), whole numbers (Gather), None (Unsqueeze)."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        missing = x.ndim - sum(1 for p in parts if p is not None and p is not Ellipsis)
        parts[at : at + 1] = [slice(None)] * missing
    starts: list[int] = []
    ends: list[int] = []
    axes: list[int] = []
    drop: list[tuple[int, int]] = []
    add: list[int] = []
    axis = 0
    for position, part in enumerate(parts):
        if part is None:
            add.append(position - len(drop))
            continue
        if isinstance(part, int):
            drop.append((axis, part))
        elif part != slice(None):
            if part.step not in (None, 1):
                raise ExportError("a strided slice is slow on every target; permute the weights instead")
            starts.append(part.start or 0)
            ends.append(FAR if part.stop is None else part.stop)
            axes.append(axis)
        axis += 1
    if axes:
        sliced = x.value[tuple(p if isinstance(p, slice) else slice(None) for p in parts if p is not None)]
        x = b.emit("Slice", [x, b.constant(starts), b.constant(ends), b.constant(axes)], sliced)
    for axis, number in reversed(drop):
        scalar = torch.tensor(number, dtype=torch.int32)
        x = b.emit("Gather", [x, scalar], x.value.select(axis, number), axis=axis)
    for axis in add:
        x = x.unsqueeze(axis)
    return x


@_handles("embedding")
def _embedding(b: GraphBuilder, index: Symbol, table: Tensor, *_: Any, **__: Any) -> Any:
    return b.emit(
        "Gather", [table, index], nn.functional.embedding(index.value.clamp(0, len(table) - 1), table), axis=0
    )


@_handles("gather")
def _gather(b: GraphBuilder, x: Symbol, dim: int, index: Symbol) -> Any:
    return b.emit("GatherElements", [x, index], torch.gather(x.value, dim, index.value.long()), axis=dim)


@_handles("to", "type")
def _to(b: GraphBuilder, x: Symbol, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else b.emit("Cast", [x], x.value.to(dtype), to=ONNX_TYPES[dtype])


@_handles("long")
def _long(b: GraphBuilder, x: Symbol) -> Any:
    """An index: eager torch insists on int64, the graph takes int32."""
    return _to(b, x, torch.int32)


@_handles("where")
def _where(b: GraphBuilder, condition: Symbol, x: Any, y: Any) -> Any:
    dtype = next(v.dtype for v in (x, y) if isinstance(v, Symbol | Tensor))
    x, y = (v if isinstance(v, Symbol | Tensor) else torch.tensor(v, dtype=dtype) for v in (x, y))
    return b.emit("Where", [condition, x, y], torch.where(_value(condition), _value(x), _value(y)))


@_handles("topk")
def _topk(b: GraphBuilder, x: Symbol, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Values and int32 indices; ONNX TopK puts the lower index first on ties."""
    found = torch.topk(x.value, k, dim)
    values, indices = b.emit("TopK", [x, b.constant([k])], list(found), axis=dim % x.ndim)
    return values, b.emit("Cast", [indices], found.indices.int(), to=TensorProto.INT32)


@_handles("cumsum")
def _cumsum(b: GraphBuilder, x: Symbol, dim: int) -> Any:
    axis = torch.tensor(dim % x.ndim, dtype=torch.int32)
    return b.emit("CumSum", [x, axis], torch.cumsum(x.value, dim, dtype=x.dtype))


@_handles("argmax")
def _argmax(b: GraphBuilder, x: Symbol, dim: int, keepdim: bool = False) -> Any:
    value = torch.argmax(x.value, dim, keepdim)
    found = b.emit("ArgMax", [x], value, axis=dim % x.ndim, keepdims=int(keepdim), select_last_index=0)
    return b.emit("Cast", [found], value.int(), to=TensorProto.INT32)


@_handles("sum")
def _sum(b: GraphBuilder, x: Symbol, dim: int, keepdim: bool = False) -> Any:
    value = torch.sum(x.value, dim, keepdim, dtype=x.dtype)
    return b.emit("ReduceSum", [x, b.constant([dim % x.ndim])], value, keepdims=int(keepdim))


def _reduction(op_type: str, compute: Callable[..., Tensor]) -> Callable[..., Any]:
    def handler(b: GraphBuilder, x: Symbol, dim: int, keepdim: bool = False) -> Any:
        return b.emit(op_type, [x], compute(x.value, dim, keepdim), axes=[dim % x.ndim], keepdims=int(keepdim))

    return handler


HANDLERS["mean"] = _reduction("ReduceMean", torch.mean)
HANDLERS["amax"] = _reduction("ReduceMax", torch.amax)
HANDLERS["amin"] = _reduction("ReduceMin", torch.amin)


@_handles("clamp", "clip")
def _clamp(b: GraphBuilder, x: Any, min: Any = None, max: Any = None) -> Any:
    """Max and Min: they take every dtype that Clip takes, and keep integers exact."""
    if min is not None:
        x = HANDLERS["maximum"](b, x, torch.tensor(min, dtype=x.dtype))
    if max is not None:
        x = HANDLERS["minimum"](b, x, torch.tensor(max, dtype=x.dtype))
    return x


@_handles("pad")
def _pad(b: GraphBuilder, x: Symbol, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """torch counts from the last axis backwards; ONNX lists all starts, then all ends."""
    if mode != "constant":
        raise ExportError(f"pad mode {mode}: only constant is known")
    fill = torch.tensor(value or 0, dtype=x.dtype)
    starts, ends = [0] * x.ndim, [0] * x.ndim
    for i in range(len(pad) // 2):
        starts[x.ndim - 1 - i], ends[x.ndim - 1 - i] = pad[2 * i], pad[2 * i + 1]
    result = nn.functional.pad(x.value, list(pad), value=float(value or 0)).to(x.dtype)
    return b.emit("Pad", [x, b.constant(starts + ends), fill], result, mode="constant")


@_handles("label")
def _label(b: GraphBuilder, x: Symbol, name: str) -> Any:
    b.rename(x, name)
    return x
