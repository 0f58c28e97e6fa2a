"""Gelu as exporters spell it in primitives -> the spelling of op_patches.gelu.

    tanh   any association of 0.5, x and 1 + Tanh(sqrt(2 / pi) * (x + 0.044715 x^3)), the cube as Pow or as products
    erf    any association of 0.5, x and 1 + Erf(x / sqrt 2)

Every part parses, so the pattern is left alone unless something is gained: Pow(x, 3) becomes two products (GE computes
Pow through exponential and logarithm and keeps it out of mixed precision, ATC_AND_ACL.md A.5), and where ATC may store
float16 the forms that overflow there (x^3 from 41 on, x * (1 + …) from 32,752 on) are replaced by those that do not.
The inner polynomial is recognised by its values, not by its shape: what lies between x and Tanh is evaluated at points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from op_patches.gelu import CUBIC, gelu_erf, gelu_tanh
from op_patches.graph_view import FLOATS, Array, GraphView, as_scalar, stores_float16
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite

_POINTS = np.linspace(-4.0, 4.0, 41)
_MAX_NODES = 12


@dataclass(frozen=True, slots=True)
class _Gate:
    """A product root = factor * x * (1 + odd), and the nodes that make it."""

    x: str
    odd: NodeProto
    factor: float
    nodes: tuple[NodeProto, ...]
    doubles: bool  # x * (1 + odd) is formed before 0.5 comes in


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match at the last product."""
    if any(_is_scalar_product(c, graph) for c in graph.consumers(node.output[0])):
        return None  # the factor 0.5 may still come
    gate = _gate(node, graph)
    if gate is None or abs(gate.factor - 0.5) > 1e-6 or graph.elem(gate.x) not in FLOATS:
        return None
    inner = _inner(gate.odd.input[0], gate.x, graph)
    if inner is None:
        return None
    values, cone = inner
    half = stores_float16(graph.target)
    if gate.odd.op_type == "Tanh":
        wanted = math.sqrt(2.0 / math.pi) * (_POINTS + CUBIC * _POINTS**3)
        useful = half or any(n.op_type == "Pow" for n in cone)
    else:
        wanted, useful = _POINTS / math.sqrt(2.0), half and gate.doubles
    if not useful or not np.allclose(values, wanted, rtol=2e-3, atol=1e-6):
        return None
    members = [n for n in graph.nodes if any(n is m for m in (*cone, *gate.nodes)) and n is not node]
    if gate.odd.op_type == "Tanh":
        gelu_tanh(new, gate.x, gate.x, node.output[0], clip=half)
    else:
        gelu_erf(new, gate.x, gate.x, node.output[0])
    return Rewrite("tanh" if gate.odd.op_type == "Tanh" else "erf", tuple(members))


def _is_scalar_product(node: NodeProto, graph: GraphView) -> bool:
    return node.op_type == "Mul" and any(as_scalar(graph.constant(i)) is not None for i in node.input)


def _gate(root: NodeProto, graph: GraphView) -> _Gate | None:
    """Take the product apart into constants, x and 1 + odd."""
    factor, unknown = 1.0, list[str]()
    odd: NodeProto | None = None
    nodes: list[NodeProto] = []
    doubles = False

    def visit(name: str, depth: int) -> None:
        nonlocal factor, odd, doubles
        producer = graph.producer(name)
        scalar = as_scalar(graph.constant(name))
        found = _one_plus_odd(producer, graph)
        if scalar is not None:
            factor *= scalar
        elif found is not None and odd is None:
            odd = found
            nodes.extend(n for n in (producer, found) if n is not None)
        elif producer is not None and producer.op_type == "Mul" and depth < 2 and _leads_to_gate(producer, graph):
            nodes.append(producer)
            halves = any(as_scalar(graph.constant(i)) is not None for i in producer.input)
            doubles = doubles or not halves
            for inner in producer.input:
                visit(inner, depth + 1)
        else:
            unknown.append(name)

    for name in root.input:
        visit(name, 0)
    if odd is None or len(unknown) != 1:
        return None
    return _Gate(unknown[0], odd, factor, tuple(nodes), doubles)


def _leads_to_gate(node: NodeProto, graph: GraphView) -> bool:
    """A product inside the product: with a constant, or with 1 + odd."""
    return any(
        as_scalar(graph.constant(i)) is not None or _one_plus_odd(graph.producer(i), graph) is not None
        for i in node.input
    )


def _one_plus_odd(node: NodeProto | None, graph: GraphView) -> NodeProto | None:
    """The Erf or Tanh in 1 + Erf(…), 1 + Tanh(…)."""
    if node is None or node.op_type != "Add":
        return None
    for a, b in ((0, 1), (1, 0)):
        producer = graph.producer(node.input[a])
        if (
            producer is not None
            and producer.op_type in ("Erf", "Tanh")
            and as_scalar(graph.constant(node.input[b])) == 1
        ):
            return producer
    return None


def _inner(name: str, x: str, graph: GraphView) -> tuple[Array, list[NodeProto]] | None:
    """The values of what lies between x and `name` at the points, and its nodes; None when x is not all it needs."""
    cone: list[NodeProto] = []

    def value(current: str) -> Array | None:
        if current == x:
            return _POINTS
        scalar = as_scalar(graph.constant(current))
        if scalar is not None:
            return np.asarray(scalar)
        node = graph.producer(current)
        if node is None or node.op_type not in _FUNCTIONS or len(cone) >= _MAX_NODES:
            return None
        if not any(node is n for n in cone):
            cone.append(node)
        operands = [value(i) for i in node.input]
        known = [o for o in operands if o is not None]
        return _FUNCTIONS[node.op_type](*known) if len(known) == len(operands) == 2 else None

    values = value(name)
    return None if values is None or values.shape != _POINTS.shape else (values, cone)


_FUNCTIONS = {"Add": np.add, "Mul": np.multiply, "Div": np.divide, "Pow": np.power}

GELU_PATTERN = Lowering("gelu_pattern", ("Mul",), lower)
