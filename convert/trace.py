"""Torch module -> ONNX nodes, one torch function at a time.

The module runs once on `Symbol`s. A symbol is not a tensor: it answers a closed set of torch functions through
`__torch_function__`, and each of them emits its ONNX node and computes its example value. Three things follow:

- A symbol has no readable shape, so no Shape, Range or If logic can get into a graph.
- What is computed from weights alone never meets a symbol: it is folded by running it.
- Names follow the module tree, and weights keep the names of the module's state.

The table of torch functions is convert/trace_ops.py; one that is not in it is refused by name.
Emitted ONNX is opset 17, default domain, IR version 8.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from runtime.errors import ExportError
from runtime.modules.scope import SCOPES
from runtime.spec import GraphSpec, TensorSpec

OPSET = 17
IR_VERSION = 8
INLINE_BYTES = 65_536  # a tensor outside the module's state that is larger than this is a forgotten weight

ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}


@dataclass(frozen=True, slots=True)
class WeightRef:
    """An initializer that lies in the weights file: a state tensor, or contiguous rows of one."""

    state_name: str
    byte_offset: int
    num_bytes: int


HANDLERS: dict[str, Callable[..., Any]] = {}  # torch function name -> what it emits; filled by convert/trace_ops.py


class Symbol:
    """A value inside the graph: its ONNX name, and an example value that carries rank and dtype."""

    def __init__(self, builder: GraphBuilder, name: str, value: Tensor) -> None:
        self.builder, self.name, self.value = builder, name, value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.strip("_")
        handler = HANDLERS.get(name)
        if handler is None:
            raise ExportError(f"torch function {name} has no ONNX rule; known: {', '.join(sorted(HANDLERS))}")
        builder = next(a.builder for a in flat(args) if isinstance(a, Symbol))
        return handler(builder, *args, **(kwargs or {}))

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def shape(self) -> Any:
        raise ExportError(f"{self.name}: the graph's axes are symbolic; a module must not read a shape while traced")

    def __getattr__(self, name: str) -> Any:
        """Tensor methods of the table: x.transpose(1, 2), x.to(dtype), …"""
        if name.startswith("__") or name not in HANDLERS:
            raise AttributeError(f"a traced value has no method {name}")
        return lambda *args, **kwargs: HANDLERS[name](self.builder, self, *args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return HANDLERS["getitem"](self.builder, self, index)

    def __neg__(self) -> Any:
        return HANDLERS["neg"](self.builder, self)

    def __invert__(self) -> Any:
        return HANDLERS["logical_not"](self.builder, self)

    __hash__ = object.__hash__  # __eq__ below builds a node


def _operator(name: str, swap: bool = False) -> Callable[[Symbol, Any], Any]:
    def call(self: Symbol, other: Any) -> Any:
        pair = (other, self) if swap else (self, other)
        return HANDLERS[name](self.builder, *pair)

    return call


_ARITHMETIC = {"truediv": "div", "mod": "remainder", "floordiv": "floor_divide"}
for _dunder in ("add", "sub", "mul", "truediv", "matmul", "mod", "floordiv"):
    setattr(Symbol, f"__{_dunder}__", _operator(_ARITHMETIC.get(_dunder, _dunder)))
    setattr(Symbol, f"__r{_dunder}__", _operator(_ARITHMETIC.get(_dunder, _dunder), swap=True))
for _dunder in ("eq", "lt", "le", "gt", "ge", "and", "or"):
    setattr(Symbol, f"__{_dunder}__", _operator(_dunder))


class GraphBuilder:
    """Collects nodes and initializers while a module runs on symbols."""

    def __init__(self, module: nn.Module) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inline: dict[str, TensorProto] = {}
        self.weights: dict[str, tuple[WeightRef, Tensor]] = {}
        self._state = sorted((t.data_ptr(), t.nbytes, name, t) for name, t in module.state_dict(keep_vars=True).items())
        self._names: dict[str, int] = {}
        self._producer: dict[str, onnx.NodeProto] = {}

    def emit(self, op_type: str, inputs: Sequence[Any], values: Tensor | Sequence[Tensor], **attributes: Any) -> Any:
        """Append one node; return a Symbol per output value."""
        single = isinstance(values, Tensor)
        outputs = [values] if isinstance(values, Tensor) else list(values)
        name = self.unique(op_type.lower())
        output_names = [name] if single else [f"{name}/{i}" for i in range(len(outputs))]
        dtype = next((i.dtype for i in inputs if isinstance(i, Symbol | Tensor)), torch.float32)
        node = helper.make_node(
            op_type, [self.operand(i, dtype) for i in inputs], output_names, name=name, **attributes
        )
        self.nodes.append(node)
        self._producer.update(dict.fromkeys(output_names, node))
        symbols = [Symbol(self, n, v) for n, v in zip(output_names, outputs, strict=True)]
        return symbols[0] if single else symbols

    def unique(self, last: str) -> str:
        """A node name from the open scopes; a repeated one gets a number."""
        base = "/".join([*SCOPES, last])
        count = self._names.get(base, 0)
        self._names[base] = count + 1
        return f"{base}_{count}" if count else base

    def rename(self, symbol: Symbol, last: str) -> None:
        """Give the node that made `symbol` a label, in the scope it was made in."""
        node = self._producer.get(symbol.name)
        if node is None:
            return
        base = node.name.rpartition("/")[0]
        name = f"{base}/{last}" if base else last
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        self.set_output_name(symbol, f"{name}_{count}" if count else name)
        if len(node.output) == 1:
            node.name = symbol.name

    def set_output_name(self, symbol: Symbol, name: str) -> None:
        """Rename a value everywhere it is used."""
        for node in self.nodes:
            for names in (node.input, node.output):
                for i, old in enumerate(names):
                    if old == symbol.name:
                        names[i] = name
        self._producer[name] = self._producer.pop(symbol.name)
        symbol.name = name

    def is_produced(self, symbol: Symbol) -> bool:
        """Whether a node made this value (and not a graph input)."""
        return symbol.name in self._producer

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """The ONNX name of a node input: a symbol, a weight, or a small constant."""
        if isinstance(value, Symbol):
            return value.name
        if not isinstance(value, Tensor):
            if isinstance(value, float) and not dtype.is_floating_point:
                raise ExportError(f"constant {value} with a {dtype} value: cast one of them in the module")
            value = torch.tensor(value, dtype=dtype)
        return self._weight(value) or self._constant(value)

    def constant(self, array: Any) -> Tensor:
        """An int64 operand that ONNX demands (axes, shapes, slice bounds)."""
        return torch.tensor(array, dtype=torch.int64)

    def _weight(self, tensor: Tensor) -> str | None:
        pointer = tensor.data_ptr()
        for start, size, state_name, owner in self._state:
            if start <= pointer and pointer + tensor.nbytes <= start + size and size and tensor.nbytes:
                if not tensor.is_contiguous():
                    raise ExportError(f"{state_name}: a strided view of a weight; fold it into the module's state")
                offset = pointer - start
                whole = tensor.nbytes == size and tensor.shape == owner.shape
                shape = "x".join(map(str, tensor.shape))
                name = state_name if whole else f"{state_name}.at_{offset}_{shape}"
                self.weights[name] = (WeightRef(state_name, offset, tensor.nbytes), tensor)
                return name
        return None

    def _constant(self, tensor: Tensor) -> str:
        if tensor.nbytes > INLINE_BYTES:
            raise ExportError(f"{'/'.join(SCOPES)}: a {tuple(tensor.shape)} tensor that is not in the module's state")
        array = tensor.detach().cpu().contiguous().numpy()
        values = "_".join(f"{v:g}" for v in array.astype(np.float64).flatten()[:5])
        name = f"constant/{array.dtype}_{'x'.join(map(str, array.shape))}_{values}".replace("-", "m").replace("+", "")
        proto = numpy_helper.from_array(array, name)
        while name in self.inline and self.inline[name].SerializeToString() != proto.SerializeToString():
            name += "_"
            proto = numpy_helper.from_array(array, name)
        self.inline[name] = proto
        return name


@contextmanager
def module_scopes(root: nn.Module) -> Iterator[None]:
    """Open a scope named after each submodule while its forward runs: layers.3 -> layer_03."""
    hooks = []
    for path, module in root.named_modules():
        name = _scope_name(path)
        if path and name:
            hooks.append(module.register_forward_pre_hook(lambda _m, _a, name=name: SCOPES.append(name)))
            hooks.append(module.register_forward_hook(lambda _m, _a, _o: (SCOPES.pop(), None)[1]))
    depth = len(SCOPES)
    try:
        yield
    finally:
        del SCOPES[depth:]
        for hook in hooks:
            hook.remove()


def _scope_name(path: str) -> str:
    """The last part of a module path; a list index takes the name of its list: layers.3 -> layer_03."""
    parent, _, last = path.rpartition(".")
    if last.isdigit():
        return f"{parent.rpartition('.')[2].rstrip('s')}_{int(last):02d}"
    return last.rstrip("_")


def trace(
    module: nn.Module, spec: GraphSpec, example_axes: dict[str, int]
) -> tuple[onnx.ModelProto, dict[str, WeightRef]]:
    """Run `module` on symbols of the spec's inputs; return the model and where its weights lie.

    The initializers of weights have no data yet: convert/export.py points them at the weights file. Only rank and
    dtype of the example values matter, so small `example_axes` do.
    """
    importlib.import_module("convert.trace_ops")  # fills HANDLERS
    builder = GraphBuilder(module)
    inputs = [Symbol(builder, t.name, _example(t.bind(example_axes))) for t in spec.inputs]
    with torch.no_grad(), module_scopes(module):
        outputs = module(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    if len(outputs) != len(spec.outputs):
        raise ExportError(f"{spec.name}: the module returns {len(outputs)} values, the spec names {len(spec.outputs)}")
    for symbol, tensor in zip(outputs, spec.outputs, strict=True):
        _name_output(builder, symbol, tensor, {t.name for t in spec.outputs})
    return _model(builder, spec), {name: ref for name, (ref, _) in builder.weights.items()}


def _example(tensor: TensorSpec) -> Tensor:
    dtype = getattr(torch, tensor.dtype)
    return torch.zeros(tensor.bound_shape, dtype=dtype)


def _name_output(builder: GraphBuilder, symbol: Any, tensor: TensorSpec, taken: set[str]) -> None:
    if not isinstance(symbol, Symbol):
        raise ExportError(f"output {tensor.name} does not depend on any input; CANN drops such outputs silently")
    if symbol.dtype != getattr(torch, tensor.dtype):
        raise ExportError(f"output {tensor.name}: expected {tensor.dtype}, the module computes {symbol.dtype}")
    if symbol.name in taken or not builder.is_produced(symbol):  # an output used twice, or an input passed through
        symbol = builder.emit("Identity", [symbol], symbol.value)
    builder.set_output_name(symbol, tensor.name)


def _model(builder: GraphBuilder, spec: GraphSpec) -> onnx.ModelProto:
    def info(t: TensorSpec) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(t.name, ONNX_TYPES[getattr(torch, t.dtype)], list(t.shape))

    weights = [_external(name, tensor) for name, (_, tensor) in sorted(builder.weights.items())]
    graph = helper.make_graph(
        builder.nodes,
        spec.name,
        [info(t) for t in spec.inputs],
        [info(t) for t in spec.outputs],
        initializer=[*weights, *builder.inline.values()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="convert-moss")
    model.ir_version = IR_VERSION
    return model


def _external(name: str, tensor: Tensor) -> TensorProto:
    return TensorProto(
        name=name,
        data_type=ONNX_TYPES[tensor.dtype],
        dims=list(tensor.shape),
        data_location=TensorProto.EXTERNAL,
    )


def flat(args: Any) -> Iterator[Any]:
    for a in args:
        if isinstance(a, tuple | list):
            yield from flat(a)
        else:
            yield a
