"""A float32 graph with the roundings of a reduced precision written into it, so that a CPU shows what is left.

What ATC does with `--precision_mode_v2` (ATC_AND_ACL.md A.5), node by node:

    fp16    every node: inputs, weights and results in float16; sums inside a node in float32
    mixed   (mixed_float16) white nodes in float16, black nodes in float32, grey nodes as the nodes that feed them
    bf16    (mixed_bfloat16) the same lists in bfloat16
    hf32    matrix products and convolutions take inputs of 12 significant bits; everything else stays float32

A rounding is Cast(float32 -> float16 -> float32) behind the value: what does not fit becomes infinite, as on Atlas A2
in its default mode. Constants are clipped to the largest float16 first (`--is_weight_clip`, on by default). GE may fuse
nodes and keep an intermediate result in float32 that is rounded here: the floor is careful, not optimistic.

White and black follow the named examples of ascend910b's list in CANN 8.1 (316 white, 94 black types; the facts name
those below); every other type counts as grey, which is what the list says of types without an entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from op_patches.graph_view import GraphView, is_external, views
from op_patches.targets import Target
from runtime.errors import PatchError
from runtime.spec import Array

FLOAT16_MAX = 65504.0
FLOAT16_OVERFLOW = 65520.0  # from here on rounding gives infinity
HF32_SPLIT = 4097.0  # 2^12 + 1: Veltkamp's splitting leaves 24 - 12 = 12 significant bits
# ONNX types whose GE type is on the white list: MatMulV2, BatchMatMulV2, Conv2D, Conv2DTranspose, RmsNorm, LayerNormV4.
WHITE = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "LayerNormalization", "RMSNormalization"})
# … and on the black list: Pow, ReduceSum, ReduceProd, Log, LogSoftmaxV2 (with Log1p and Expm1, which ONNX lacks).
BLACK = frozenset({"Pow", "ReduceSum", "ReduceProd", "Log", "LogSoftmax"})
CUBE = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
_OP_TYPE = "OpType::"  # the prefix that ATC's --keep_dtype has for a type
# These hand on values of their inputs: a rounding of rounded inputs would change nothing.
MOVES = frozenset({
    "Reshape", "Transpose", "Slice", "Concat", "Split", "Squeeze", "Unsqueeze", "Gather", "GatherElements", "GatherND",
    "Expand", "Tile", "Identity", "Flatten", "Where", "Pad", "Max", "Min", "ReduceMax", "ReduceMin", "TopK", "Neg",
    "Abs",
})  # fmt: skip


class Mode(str, Enum):
    """A precision mode, by the name that people use."""

    FP16 = "fp16"
    BF16 = "bf16"
    MIXED = "mixed"
    HF32 = "hf32"

    @property
    def atc(self) -> str:
        """What `--precision_mode_v2` calls it; hf32 is a matter of --op_precision_mode."""
        return {"fp16": "fp16", "bf16": "mixed_bfloat16", "mixed": "mixed_float16", "hf32": "origin"}[self.value]

    @property
    def elem(self) -> int:
        return int(TensorProto.BFLOAT16 if self is Mode.BF16 else TensorProto.FLOAT16)


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays float32: node names and ONNX types."""

    names: frozenset[str] = frozenset()
    op_types: frozenset[str] = frozenset()

    @staticmethod
    def parse(text: str) -> Keep:
        """Read a keep list: one entry a line, `#` for comments, a node name or OpType::X."""
        entries = [line.split("#", 1)[0].strip() for line in text.splitlines()]
        types = frozenset(e.removeprefix(_OP_TYPE) for e in entries if e.startswith(_OP_TYPE))
        return Keep(frozenset(e for e in entries if e and not e.startswith(_OP_TYPE)), types)

    def holds(self, node: NodeProto) -> bool:
        return node.name in self.names or node.op_type in self.op_types

    def lines(self) -> str:
        """The keep list that the ATC step reads (convert-moss atc --keep-fp32)."""
        return "".join(f"{x}\n" for x in (*(f"{_OP_TYPE}{t}" for t in sorted(self.op_types)), *sorted(self.names)))


NOTHING = Keep()


@dataclass(slots=True)
class Reduced:
    """The rewritten model and what was reduced in it."""

    model: ModelProto
    nodes: list[str] = field(default_factory=list)  # names of reduced nodes, in order
    op_types: dict[str, int] = field(default_factory=dict)  # ONNX type -> reduced nodes
    probes: dict[str, str] = field(default_factory=dict)  # node name -> its result before rounding


def reduce_precision(
    model: ModelProto, mode: Mode, target: Target, keep: Keep = NOTHING, rounded_weights: str = ""
) -> Reduced:
    """Write the roundings of `mode` into a copy of a float32 model.

    `rounded_weights` names the file beside the model that holds the external weights rounded (round_weights).
    """
    if mode is Mode.BF16 and not target.has_bfloat16:
        raise PatchError(f"{target.soc} has no bfloat16; use fp16 or mixed")
    copied = ModelProto()
    copied.CopyFrom(model)
    view = views(copied, target)[0]
    return _Rewrite(copied, view, mode, keep, rounded_weights).run()


class _Rewrite:
    """One pass over the nodes in order; `_rounded` maps a value to the name under which it is rounded."""

    def __init__(self, model: ModelProto, view: GraphView, mode: Mode, keep: Keep, weights: str) -> None:
        self.model, self.view, self.mode, self.keep, self.weights = model, view, mode, keep, weights
        self.result = Reduced(model)
        self._constants = {t.name: t for t in model.graph.initializer}
        self._rounded: dict[str, str] = {}
        self._reduced_values: set[str] = set()
        self._nodes: list[NodeProto] = []
        self._outputs = {o.name for o in model.graph.output}

    def run(self) -> Reduced:
        for index, node in enumerate(self.view.nodes):
            floats = [n for n in (*node.input, *node.output) if n and self._is_float(n)]
            if node.op_type == "Constant" or not floats or not self._reduces(node):
                self._nodes.append(node)
                continue
            name = node.name or f"{node.op_type}_{index}"
            self.result.nodes.append(name)
            self.result.op_types[node.op_type] = self.result.op_types.get(node.op_type, 0) + 1
            self._reduce(node, name)
        del self.model.graph.node[:]
        self.model.graph.node.extend(self._nodes)
        del self.model.graph.value_info[:]  # some values have other names now
        return self.result

    def _is_float(self, name: str) -> bool:
        return self.view.elem(name) == TensorProto.FLOAT or (
            name in self._constants and self._constants[name].data_type == TensorProto.FLOAT
        )

    def _reduces(self, node: NodeProto) -> bool:
        if self.keep.holds(node):
            return False
        if self.mode is Mode.HF32:
            return node.op_type in CUBE
        if self.mode is Mode.FP16 or node.op_type in WHITE:
            return True
        return node.op_type not in BLACK and any(n in self._reduced_values for n in node.input)

    def _reduce(self, node: NodeProto, name: str) -> None:
        copied = NodeProto()
        copied.CopyFrom(node)
        for i, value in enumerate(node.input):
            if value and self._is_float(value):
                copied.input[i] = self._round_input(value)
        self._nodes.append(copied)
        floats = [(i, v) for i, v in enumerate(node.output) if v and self._is_float(v)]
        if self.mode is Mode.HF32:
            self.result.probes[name] = floats[0][1] if floats else ""
            return
        self._reduced_values.update(node.output)
        for i, value in floats:
            if node.op_type in MOVES:
                self._rounded[value] = value
                continue
            wide = f"{value}/wide"
            copied.output[i] = wide
            self.result.probes.setdefault(name, wide)
            self._cast_pair(wide, value)
            self._rounded[value] = value

    def _round_input(self, value: str) -> str:
        if value not in self._rounded:
            constant = self._constants.get(value)
            self._rounded[value] = self._round_value(value) if constant is None else self._round_constant(constant)
        return self._rounded[value]

    def _round_value(self, value: str) -> str:
        rounded = f"{value}/rounded"
        if self.mode is Mode.HF32:
            split = f"{value}/hf32_split"
            self._initializer(numpy_helper.from_array(np.array(HF32_SPLIT, np.float32), split))
            self._nodes.append(helper.make_node("Mul", [value, split], [f"{rounded}/c"], f"{rounded}/c"))
            self._nodes.append(helper.make_node("Sub", [f"{rounded}/c", value], [f"{rounded}/d"], f"{rounded}/d"))
            self._nodes.append(helper.make_node("Sub", [f"{rounded}/c", f"{rounded}/d"], [rounded], rounded))
        else:
            self._cast_pair(value, rounded)
        return rounded

    def _cast_pair(self, value: str, rounded: str) -> None:
        narrow = f"{rounded}/narrow"
        self._nodes.append(helper.make_node("Cast", [value], [narrow], narrow, to=self.mode.elem))
        self._nodes.append(helper.make_node("Cast", [narrow], [rounded], f"{rounded}/back", to=TensorProto.FLOAT))

    def _round_constant(self, tensor: TensorProto) -> str:
        rounded = f"{tensor.name}/rounded"
        if is_external(tensor):
            if not self.weights:
                raise PatchError(f"{tensor.name} lies outside the model and no file with rounded weights was named")
            copied = TensorProto()
            copied.CopyFrom(tensor)
            copied.name = rounded
            for entry in copied.external_data:
                entry.value = self.weights if entry.key == "location" else entry.value
            self._initializer(copied)
        else:
            values = round_constant(numpy_helper.to_array(tensor), self.mode)
            self._initializer(numpy_helper.from_array(values, rounded))
        return rounded

    def _initializer(self, tensor: TensorProto) -> None:
        self.model.graph.initializer.append(tensor)


def round_constant(values: Array, mode: Mode) -> Array:
    """A constant as the mode stores it, in float32 again; float16 constants are clipped, not overflown."""
    x = np.asarray(values, np.float32)
    if mode in (Mode.FP16, Mode.MIXED):
        return np.clip(x, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16).astype(np.float32)
    dropped = 16 if mode is Mode.BF16 else 12  # bits of the float32 mantissa that go; half to even
    bits = x.view(np.uint32)
    half = np.uint32((1 << (dropped - 1)) - 1) + ((bits >> np.uint32(dropped)) & np.uint32(1))
    kept = (bits + half) & np.uint32(~((1 << dropped) - 1) & 0xFFFFFFFF)
    return np.where(np.isfinite(x), kept.view(np.float32), x).astype(np.float32)


def round_weights(models: Iterable[ModelProto], directory: Path, out: Path, mode: Mode) -> None:
    """Write `out`: every external float32 tensor of the models, rounded, at the offset that it has in its own file."""
    done: set[tuple[str, int]] = set()
    with out.open("wb") as file:
        for model in models:
            for tensor in model.graph.initializer:
                if not is_external(tensor) or tensor.data_type != TensorProto.FLOAT:
                    continue
                place = {entry.key: entry.value for entry in tensor.external_data}
                offset, count = int(place.get("offset", 0)), int(np.prod(tensor.dims, dtype=np.int64))
                if (place["location"], offset) in done:
                    continue
                done.add((place["location"], offset))
                values = np.fromfile(directory / place["location"], "<f4", count, offset=offset)
                file.seek(offset)
                file.write(round_constant(values, mode).tobytes())


@dataclass(frozen=True, slots=True)
class NodeRange:
    """What one reduced node computed, before it was rounded."""

    node: str
    op_type: str
    largest: float  # largest magnitude, as far as it is a number
    not_finite: bool  # NaN or infinity before the rounding: the node's inputs are broken already

    @property
    def overflows(self) -> bool:
        """Whether float16 cannot hold the result."""
        return self.not_finite or self.largest >= FLOAT16_OVERFLOW


def with_probes(reduced: Reduced) -> tuple[ModelProto, list[tuple[str, str]]]:
    """The model with two more outputs per reduced node, and (node, op type) of each pair, in order.

    The first is the largest magnitude, the second 0 where everything is a number and NaN elsewhere.
    """
    model = ModelProto()
    model.CopyFrom(reduced.model)
    types = {o: node.op_type for node in model.graph.node for o in node.output}
    zero = "probe/zero"
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.float32), zero))
    probed: list[tuple[str, str]] = []
    for index, (name, value) in enumerate(reduced.probes.items()):
        if not value:
            continue
        base = f"probe/{index}"
        model.graph.node.extend([
            helper.make_node("Abs", [value], [f"{base}/abs"]),
            helper.make_node("ReduceMax", [f"{base}/abs"], [f"{base}/max"], keepdims=0),
            helper.make_node("Mul", [value, zero], [f"{base}/zero"]),
            helper.make_node("ReduceSum", [f"{base}/zero"], [f"{base}/bad"], keepdims=0),
        ])  # fmt: skip
        for output in (f"{base}/max", f"{base}/bad"):
            model.graph.output.append(helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, []))
        probed.append((name, types.get(value, "")))
    return model, probed


def read_probes(probed: Sequence[tuple[str, str]], values: Sequence[Array]) -> list[NodeRange]:
    """Pair the outputs of with_probes with their nodes."""
    ranges = []
    for (name, op_type), largest, bad in zip(probed, values[0::2], values[1::2], strict=True):
        size = float(largest)
        ranges.append(NodeRange(name, op_type, size if np.isfinite(size) else float("inf"), not np.isfinite(bad)))
    return ranges
