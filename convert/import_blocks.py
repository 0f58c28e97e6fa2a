"""Transformer blocks of a published graph, found from their output backwards along the residual stream.

    x = x + scale * Linear(... Linear(Norm(x)))     one branch: attention when a Softmax lies inside, else the MLP

The walk holds only where the norm reads the very value that the branch is added to; otherwise it ends there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onnx import NodeProto

from convert.import_attention import joined_qkv
from convert.import_view import Floats, GraphView, Linear, Norm
from runtime.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One residual branch: norm, the linears that read it, the linear that ends it, and its constant factor."""

    kind: Literal["attention", "mlp"]
    norm: Norm
    inner: Linear  # of attention: q, k and v one after the other
    outer: Linear
    scale: Floats | None
    softmax: NodeProto | None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    attention: Branch
    mlp: Branch

    @property
    def softmax(self) -> NodeProto:
        assert self.attention.softmax is not None
        return self.attention.softmax


def walk_blocks(view: GraphView, output: str) -> tuple[list[Block], str]:
    """The blocks whose last result is `output`, first block first, and the value that enters the first."""
    branches: list[Branch] = []
    value, _ = view.go_back(output)
    while (found := _branch(view, value)) is not None:
        branch, value = found
        branches.append(branch)
    branches.reverse()
    kinds = [branch.kind for branch in branches]
    if kinds != ["attention", "mlp"] * (len(kinds) // 2):
        raise CheckpointError(
            f"{view.name}: expected attention and MLP in turn, found {', '.join(kinds)} and then "
            f"{_kind_of(view, value)}; this is no graph of the published model, or a tool has rewritten it"
        )
    return [Block(a, m) for a, m in zip(branches[::2], branches[1::2], strict=True)], value


def unknown_structure(view: GraphView, value: str, blocks: list[Block], expected: str) -> CheckpointError:
    """The error for a walk that ended at something else than what stands before the first block."""
    return CheckpointError(
        f"{view.name}: behind the last {len(blocks)} blocks expected {expected}, found {_kind_of(view, value)}; "
        "this is no graph of the published model, or a tool has rewritten it"
    )


def _kind_of(view: GraphView, value: str) -> str:
    node = view.producer(value)
    return f"the input {value}" if node is None else f"{node.op_type} ({node.name or value})"


def _branch(view: GraphView, value: str) -> tuple[Branch, str] | None:
    """The branch that `value` ends with, and the residual stream before it."""
    node = view.producer(value)
    if node is None or node.op_type != "Add" or view.linear(value) is not None or view.norm(value) is not None:
        return None
    if not all(view.weighted(operand) for operand in node.input):
        return None
    for at in (0, 1):
        rest, _ = view.go_back(node.input[1 - at])
        end, scale = view.go_back(node.input[at])
        outer = view.linear(end)
        if outer is None:
            continue
        near = view.nearest(outer.source)
        norms = [view.norm(view.go_back(inner.source)[0]) for inner in near.linears]
        if not norms or near.tables or any(norm is None or view.go_back(norm.source)[0] != rest for norm in norms):
            continue
        norm = norms[0]
        assert norm is not None
        softmax = next((n for n in near.nodes if n.op_type == "Softmax"), None)
        if softmax is not None:
            return Branch("attention", norm, joined_qkv(view, near.linears, softmax), outer, scale, softmax), rest
        if len(near.linears) == 1:
            return Branch("mlp", norm, near.linears[0], outer, scale, None), rest
    return None
