"""A published graph read by structure: constants, linear layers, norms and tables, whatever names and forms tools left.

The walk goes backwards from an output. What tools do to a weight is undone where it is found:

    linear   MatMul (+ Add), Gemm (between Reshapes, transB, alpha, beta), 1x1 Conv; the weight as [in, out]
    norm     LayerNormalization, or the same as ReduceMean, Sub, Pow, Sqrt, Div, Mul, Add
    table    Gather on a constant matrix
    constant initializer, Constant, and moves of constants (Transpose, Reshape, Cast, DequantizeLinear …)

A value is *weighted* when it is computed from one of these; masks, positions and shapes are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from convert.import_constants import Array, attribute, fold
from convert.import_file import load_graph, sorted_nodes
from runtime.errors import CheckpointError

Floats = npt.NDArray[np.float32]

# Operators that hand their first operand on, in another shape or place.
MOVES = {"Identity", "Cast", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Dropout", "Expand"}
PICKS = {"Slice", "Gather", "Split"}  # when their first operand is no constant: they hand a part of it on


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """y = x @ weight + bias."""

    weight: Floats  # [in, out]
    bias: Floats | None
    source: str  # x
    output: str  # y


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Layer normalisation over the last axis."""

    weight: Floats
    bias: Floats
    epsilon: float
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows of a constant matrix, picked by index."""

    weight: Floats  # [rows, size]
    index: str
    output: str


@dataclass(frozen=True, slots=True)
class Nearest:
    """What lies behind a value: the first linears and tables on every way back, and the operators passed."""

    linears: list[Linear]
    tables: list[Table]
    nodes: list[NodeProto]


class GraphView:
    """One ONNX file, with its weights."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.model = load_graph(path)
        graph = self.model.graph
        self.nodes = sorted_nodes(self.model, path)
        self.inputs = {info.name: _dims(info) for info in graph.input}
        self.outputs = {info.name: _dims(info) for info in graph.output}
        self.producers = {output: node for node in self.nodes for output in node.output}
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self.half = any(_is_half(tensor) for tensor in graph.initializer)
        self.dequantized = any(node.op_type == "DequantizeLinear" for node in self.nodes)
        self._constants: dict[str, Array | None] = {}
        self._linears: dict[str, Linear | None] = {}
        self._weighted: set[str] = set()
        for node in self.nodes:
            if node.op_type != "Shape" and (
                self._is_source(node) or any(value in self._weighted for value in node.input)
            ):
                self._weighted.update(node.output)

    def constant(self, value: str) -> Array | None:
        """The value as an array when it does not depend on an input; float16 comes as float32."""
        if value not in self._constants:
            self._constants[value] = self._read(value)
        return self._constants[value]

    def producer(self, value: str) -> NodeProto | None:
        return self.producers.get(value)

    def weighted(self, value: str) -> bool:
        return value in self._weighted

    def initializers(self) -> Iterator[tuple[str, Array]]:
        """Every stored float tensor, as float32."""
        for name in self._stored:
            array = self.constant(name)
            if array is not None and array.dtype == np.float32:
                yield name, array

    def constants(self) -> Iterator[Array]:
        """Every stored tensor and Constant node."""
        for name in (*self._stored, *(node.output[0] for node in self.nodes if node.op_type == "Constant")):
            array = self.constant(name)
            if array is not None:
                yield array

    def skip_moves(self, value: str) -> str:
        """The value behind reshapes, transposes and casts."""
        while (node := self.producer(value)) is not None and node.op_type in MOVES:
            value = node.input[0]
        return value

    def linear(self, value: str) -> Linear | None:
        """The linear layer that computes a value, its bias included."""
        if value not in self._linears:
            self._linears[value] = self._linear(value)
        return self._linears[value]

    def linear_behind(self, value: str) -> Linear | None:
        """The linear layer behind moves, masks and picks."""
        return self.linear(self.go_back(value)[0])

    def norm(self, value: str) -> Norm | None:
        """The layer norm that computes a value."""
        node = self.producer(value)
        if node is None:
            return None
        if node.op_type == "LayerNormalization":
            weight = self.constant(node.input[1])
            bias = self.constant(node.input[2]) if len(node.input) > 2 else None
            if weight is None or weight.ndim != 1:
                return None
            zeros = np.zeros_like(weight)
            epsilon = round(float(attribute(node, "epsilon", 1e-5)), 12)
            return Norm(weight, zeros if bias is None else bias, epsilon, node.input[0])
        return self._decomposed_norm(node)

    def table(self, value: str) -> Table | None:
        """The table that a value is a row of."""
        node = self.producer(value)
        if node is None or node.op_type != "Gather":
            return None
        weight = self.constant(node.input[0])
        if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or attribute(node, "axis", 0) != 0:
            return None
        return Table(weight, node.input[1], value)

    def go_back(self, value: str) -> tuple[str, Floats | None]:
        """Go back through moves, picks, masks and constant factors; return the value there and the factors."""
        scale: Floats | None = None
        while self.linear(value) is None and self.norm(value) is None:
            node = self.producer(value)
            if node is None:
                break
            if node.op_type in MOVES or (node.op_type in PICKS and self.constant(node.input[0]) is None):
                value = node.input[0]
                continue
            if node.op_type not in ("Mul", "Where"):
                break
            operands = list(node.input)[1 if node.op_type == "Where" else 0 :]
            weighted = [v for v in operands if self.weighted(v)]
            if len(weighted) != 1:
                break
            if node.op_type == "Mul":
                factor = self.constant(next(v for v in operands if v != weighted[0]))
                if factor is not None:
                    scale = factor.reshape(-1) if scale is None else scale * factor.reshape(-1)
            value = weighted[0]
        return value, scale

    def nearest(self, value: str) -> Nearest:
        """Breadth first, backwards; stops at linears, norms, tables and inputs."""
        found = Nearest([], [], [])
        seen, queue = {value}, deque([value])
        while queue:
            current = queue.popleft()
            node = self.producer(current)
            if node is None or not self.weighted(current):
                continue
            if linear := self.linear(current):
                found.linears.append(linear)
                continue
            if table := self.table(current):
                found.tables.append(table)
                continue
            if self.norm(current):
                continue
            found.nodes.append(node)
            for operand in node.input:
                if operand not in seen:
                    seen.add(operand)
                    queue.append(operand)
        return found

    def tables(self) -> list[Table]:
        """Every table of the graph."""
        found = (self.table(value) for node in self.nodes if node.op_type == "Gather" for value in node.output)
        return [table for table in found if table is not None]

    def ancestors(self, value: str, unweighted: bool = False) -> Iterator[NodeProto]:
        """Every node behind a value, nearest first; `unweighted` keeps to masks and positions. Shapes end the way."""
        seen, queue = {value}, deque([value])
        while queue:
            node = self.producer(queue.popleft())
            if node is None or node.op_type == "Shape":
                continue
            yield node
            for operand in node.input:
                if operand not in seen and not (unweighted and self.weighted(operand)):
                    seen.add(operand)
                    queue.append(operand)

    def reads(self, value: str, source: str) -> bool:
        """Whether a value is computed from another one."""
        return value == source or any(source in node.input for node in self.ancestors(value))

    def channel_of(self, index: str, input_name: str) -> int | None:
        """Which position on an axis of a graph input an index comes from; None when that is not one position."""
        found = set()
        for node in self.ancestors(index):
            if node.op_type == "Split" and self.skip_moves(node.input[0]) == input_name:
                found |= {i for i, output in enumerate(node.output) if self.reads(index, output)}
            elif node.op_type == "Gather":
                position = self._picked(node.output[0], input_name)
                if position is not None:
                    found.add(position)
        return found.pop() if len(found) == 1 else None

    def consumers(self, value: str) -> list[NodeProto]:
        return [node for node in self.nodes if value in node.input]

    def _picked(self, value: str, input_name: str) -> int | None:
        """The position that a Gather takes of an input, slices in between added up."""
        position = 0
        while value != input_name:
            node = self.producer(value)
            start = self.constant(node.input[1]) if node is not None and node.op_type in ("Gather", "Slice") else None
            if node is None or start is None or start.size != 1:
                return None
            position += int(start.reshape(-1)[0])
            value = self.skip_moves(node.input[0])
        return position

    def _linear(self, value: str) -> Linear | None:
        node = self.producer(value)
        if node is not None and node.op_type == "Add":
            for at in (0, 1):
                bias = self.constant(node.input[at])
                if bias is None or bias.size < 2 or np.squeeze(bias).ndim != 1:
                    continue
                product = self._product(self.skip_moves(node.input[1 - at]))
                if product is not None and product.bias is None and product.weight.shape[1] == bias.size:
                    return replace(product, bias=bias.reshape(-1), output=value)
        return self._product(value)

    def _read(self, value: str) -> Array | None:
        if value in self._stored:
            return _widened(numpy_helper.to_array(self._stored[value]))
        node = self.producer(value)
        if node is None:
            return None
        operands = [self.constant(v) if v else None for v in node.input]
        if any(o is None and v for o, v in zip(operands, node.input, strict=True)):
            return None
        try:
            folded = fold(node, operands, value)
        except (ValueError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{self.name}: {node.op_type} ({node.name or value}) on constants cannot be computed ({error}); "
                "download the package again"
            ) from error
        return None if folded is None else _widened(folded)

    def _is_source(self, node: NodeProto) -> bool:
        if node.op_type == "LayerNormalization":
            return True
        if node.op_type == "Gather":
            return self.table(node.output[0]) is not None
        return node.op_type in ("MatMul", "Gemm", "Conv") and self._product(node.output[0]) is not None

    def _product(self, value: str) -> Linear | None:
        node = self.producer(value)
        if node is None or node.op_type not in ("MatMul", "Gemm", "Conv"):
            return None
        weight = self.constant(node.input[1])
        if weight is None or weight.dtype != np.float32 or self.constant(node.input[0]) is not None:
            return None
        bias = self.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if node.op_type == "Conv":
            if weight.ndim < 3 or weight.size != weight.shape[0] * weight.shape[1] or attribute(node, "group", 1) != 1:
                return None
            weight = weight.reshape(weight.shape[:2]).T
        elif node.op_type == "Gemm":
            if attribute(node, "transA", 0):
                return None
            weight = (weight.T if attribute(node, "transB", 0) else weight) * np.float32(attribute(node, "alpha", 1.0))
            bias = None if bias is None else bias * np.float32(attribute(node, "beta", 1.0))
        elif weight.ndim > 2 and weight.size == weight.shape[-2] * weight.shape[-1]:
            weight = weight.reshape(weight.shape[-2:])
        if weight.ndim != 2 or weight.shape[0] == 1:  # one row: the frequencies of RoPE times a position
            return None
        return Linear(weight, None if bias is None else bias.reshape(-1), node.input[0], value)

    def _decomposed_norm(self, node: NodeProto) -> Norm | None:
        """Add(Mul(Div(x - mean, sqrt(var + epsilon)), weight), bias)."""
        bias, scaled = self._constant_and_rest(node, "Add")
        weight, normal = self._constant_and_rest(self.producer(scaled), "Mul")
        division = self.producer(normal)
        if bias is None or weight is None or division is None or division.op_type != "Div":
            return None
        centred, root = self.producer(division.input[0]), self.producer(division.input[1])
        if centred is None or centred.op_type != "Sub" or root is None or root.op_type != "Sqrt":
            return None
        mean = self.producer(centred.input[1])
        epsilon, _ = self._constant_and_rest(self.producer(root.input[0]), "Add")
        if epsilon is None or mean is None or mean.op_type != "ReduceMean" or mean.input[0] != centred.input[0]:
            return None
        return Norm(weight.reshape(-1), bias.reshape(-1), round(float(epsilon.reshape(-1)[0]), 12), centred.input[0])

    def _constant_and_rest(self, node: NodeProto | None, op_type: str) -> tuple[Array | None, str]:
        if node is not None and node.op_type == op_type:
            for at in (0, 1):
                constant = self.constant(node.input[at])
                if constant is not None:
                    return constant, node.input[1 - at]
        return None, ""


def _dims(info: onnx.ValueInfoProto) -> list[int | None]:
    """The sizes of an input or output; None where an axis is open."""
    return [d.dim_value if d.HasField("dim_value") else None for d in info.type.tensor_type.shape.dim]


def _is_half(tensor: TensorProto) -> bool:
    return tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16) and len(tensor.dims) > 0


def _widened(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array
