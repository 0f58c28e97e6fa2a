"""Einsum of one or two operands -> Transpose, ReduceSum, MatMul, Reshape. GE has no kernel for Einsum.

Every label belongs to one of: batch (in both operands and the result), left, right (in one operand and the result), or
contracted (in both, not in the result). A label in one operand alone and not in the result is summed away first. Then

    A' [batch, left, contracted] @ B' [batch, contracted, right] = [batch, left, right] -> the order of the result

Several left, right or contracted labels are merged into one axis by Reshape, which takes at most one open axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from op_patches.graph_view import FLOATS, GraphView, attributes
from op_patches.rewriter import Builder, Lowering, Refusal, Rewrite


@dataclass(frozen=True, slots=True)
class _Term:
    """One operand with its labels in order."""

    name: str
    labels: str


class _Unsupported(Exception):  # noqa: N818
    """The equation needs more than this rule writes; turned into a refusal below."""


def lower(node: NodeProto, graph: GraphView, new: Builder) -> Rewrite | Refusal | None:
    """Match Einsum; one operand is transposed and summed, two are multiplied."""
    equation = attributes(node)["equation"].decode().replace(" ", "")
    try:
        labels, result = _parse(equation)
        if graph.elem(node.input[0]) not in FLOATS:
            raise _Unsupported("the operands are integers or of unknown type, and MatMul kernels take floats")
        sizes = _sizes(graph, node, labels)
        terms = [
            _summed(new, _Term(n, own), labels, result, i)
            for i, (n, own) in enumerate(zip(node.input, labels, strict=True))
        ]
        if len(terms) == 1:
            _transposed(new, terms[0], result, node.output[0])
        else:
            _product(new, terms[0], terms[1], result, sizes, node.output[0])
    except _Unsupported as reason:
        return Refusal(f"{equation}: {reason}")
    return Rewrite(equation)


def _parse(equation: str) -> tuple[list[str], str]:
    left, arrow, result = equation.partition("->")
    labels = left.split(",")
    if "." in equation:
        raise _Unsupported("an ellipsis stands for axes that the rule does not name")
    if len(labels) > 2:
        raise _Unsupported("more than two operands")
    if any(len(set(own)) < len(own) for own in (*labels, result)):
        raise _Unsupported("a label occurs twice in one operand (a diagonal)")
    joined = "".join(labels)
    return labels, result if arrow else "".join(sorted(c for c in set(joined) if joined.count(c) == 1))


def _sizes(graph: GraphView, node: NodeProto, labels: list[str]) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    for name, own in zip(node.input, labels, strict=True):
        shape = graph.shape(name) or (None,) * len(own)
        if len(shape) != len(own):
            raise _Unsupported(f"{name} has {len(shape)} axes")
        for label, size in zip(own, shape, strict=True):
            known = sizes.get(label)
            if isinstance(size, int) and known not in (None, size):
                raise _Unsupported(f"label {label} is {known} and {size} (broadcasting)")
            sizes[label] = size if isinstance(size, int) else known
    return sizes


def _summed(new: Builder, term: _Term, labels: list[str], result: str, index: int) -> _Term:
    others = "".join(own for i, own in enumerate(labels) if i != index) + result
    lonely = [i for i, label in enumerate(term.labels) if label not in others]
    if not lonely:
        return term
    name = new.reduce("ReduceSum", term.name, lonely, keepdims=0)
    return _Term(name, "".join(c for i, c in enumerate(term.labels) if i not in lonely))


def _transposed(new: Builder, term: _Term, order: str, out: str | None = None) -> str:
    perm = [term.labels.index(c) for c in order]
    if perm == list(range(len(perm))):
        return new.op("Identity", term.name, out=out) if out else term.name
    return new.op("Transpose", term.name, out=out, perm=perm)


def _product(new: Builder, a: _Term, b: _Term, result: str, sizes: dict[str, int | None], out: str) -> None:
    batch = [c for c in result if c in a.labels and c in b.labels]
    left = [c for c in result if c in a.labels and c not in b.labels]
    right = [c for c in result if c in b.labels and c not in a.labels]
    inner = [c for c in a.labels if c in b.labels and c not in result]
    groups = [left, inner, right]
    merges = any(len(g) != 1 for g in groups)
    x = _merged(new, a, batch, [left, inner], sizes, merges)
    y = _merged(new, b, batch, [inner, right], sizes, merges)
    order = "".join([*batch, *left, *right])
    reorders = order != result
    product = new.op("MatMul", x, y, out=None if merges or reorders else out)
    if merges:
        shape = _shape([*batch, *left, *right], sizes)
        product = new.reshape(product, shape, out=None if reorders else out)
    if reorders:
        _transposed(new, _Term(product, order), result, out)


def _merged(
    new: Builder, term: _Term, batch: list[str], groups: list[list[str]], sizes: dict[str, int | None], merges: bool
) -> str:
    """The operand as [batch, first group, second group], each group one axis."""
    order = [*batch, *groups[0], *groups[1]]
    name = _transposed(new, term, "".join(order))
    if not merges:
        return name
    axes: list[int | None] = [sizes[c] for c in batch]
    for group in groups:
        size: int | None = 1
        for label in group:
            known = sizes[label]
            size = None if size is None or known is None else size * known
        axes.append(size)
    return new.reshape(name, _open_once(axes))


def _shape(labels: list[str], sizes: dict[str, int | None]) -> list[int]:
    return _open_once([sizes[c] for c in labels])


def _open_once(axes: list[int | None]) -> list[int]:
    if sum(a is None for a in axes) > 1:
        raise _Unsupported("merging axes needs sizes, and more than one is open: bind the input shapes")
    return [-1 if a is None else a for a in axes]


EINSUM = Lowering("einsum", ("Einsum",), lower)
