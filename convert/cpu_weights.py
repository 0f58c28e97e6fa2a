"""Weights of reduced precision for ONNX Runtime on a CPU: int8 or int4 in blocks, every other tensor float32.

    matrices [K, N] of the transformers   MatMul  ->  MatMulNBits            int8 or int4
    audio heads [K, N]                    MatMul  ->  MatMulNBits            int8: the codes are decided here
    tables [N, K] of embeddings           Gather  ->  GatherBlockQuantized   int8: one row is read at a time

Stored are rows of K values. A block of a row shares one scale: value = (code - zero) * scale, zero = 128 or 8, which
is what both operators take when no zero is given. A slice of heads or of a table is a range of stored rows. ONNX
Runtime rounds the activations to int8 (accuracy_level 4), which is where the speed comes from.

The proof of a graph has two halves. With accuracy_level 1 the operators compute in float32: then the graph must equal
the torch module that holds the values that the stored codes stand for, within the tolerances of a float32 export.
The file itself must stay within ACTIVATIONS of that. What the rounding of the weights costs is for run-om parity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, helper
from torch import Tensor, nn

from convert.trace import WeightRef
from convert.verify import example_axes, example_feeds, verify_graph
from runtime.backends.ort import OrtBackend
from runtime.compare import Tolerance, compare_tensors
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import ExportError
from runtime.manifest import CPU_WEIGHTS
from runtime.spec import Array, GraphSpec

DOMAIN = "com.microsoft"
INT8_COMPUTE, FLOAT_COMPUTE = 4, 1  # accuracy_level of MatMulNBits
# Values that share a scale. int8: larger blocks gain little. int4: 32, for its rounding is ten times that of int8.
BLOCKS = {8: (128, 64, 32, 16), 4: (32, 16)}
ROWS_AT_ONCE = 2048

_MATRIX = re.compile(r"(global_|local)\.layers\.\d+\..+\.weight")
_HEADS = "local.audio_heads"  # [n_vq, K, N]
_TABLES = ("global_.wte", "global_.audio_table", "local.first_qkv")
# int8 activations, each off by up to 1/254 of the largest of its block: 0.092 at most at full size, on made-up weights
# and random caches. A wrong layout is off by the whole size.
ACTIVATIONS = Tolerance(1e-3, 0.5, "int8 activations through every layer")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one tensor is stored: `rows` of `columns` values, a scale for each `block` of a row."""

    rows: int
    columns: int
    bits: int
    block: int

    @property
    def row_bytes(self) -> int:
        return self.columns * self.bits // 8

    @property
    def blocks(self) -> int:
        return self.columns // self.block


class Reducer:
    """Stores the weights of one export in reduced precision and rewrites its graphs to read them."""

    def __init__(self, cpu_weights: str) -> None:
        if cpu_weights not in CPU_WEIGHTS:
            raise ExportError(f"--cpu-weights {cpu_weights}: expected {' or '.join(CPU_WEIGHTS)}")
        self.cpu_weights = cpu_weights
        self._bits = int(cpu_weights.removeprefix("int"))
        self._formats: dict[str, BlockFormat] = {}

    def stored(self, state: dict[str, Tensor]) -> Iterator[tuple[str, Array]]:
        """What goes into the weights file, one tensor at a time.

        The float values are given up on the way: `state` then holds the values that the stored codes stand for.
        """
        for name in sorted(state):
            found = self._format_of(name, state[name])
            if found is None:
                yield name, state[name].numpy()
                continue
            self._formats[name] = found
            codes, scales, state[name] = _reduce(name, state[name], found)
            yield codes_name(name, found), codes
            yield scales_name(name), scales

    def _format_of(self, name: str, tensor: Tensor) -> BlockFormat | None:
        """None for a tensor that stays float32: of another kind, or with rows that no block divides."""
        if not (name in (*_TABLES, _HEADS) or (_MATRIX.fullmatch(name) and tensor.ndim == 2)):
            return None
        columns = tensor.shape[-1] if name in _TABLES else tensor.shape[-2]
        bits = self._bits if _MATRIX.fullmatch(name) else 8
        block = next((b for b in BLOCKS[bits] if columns % b == 0), None)
        return BlockFormat(tensor.numel() // columns, columns, bits, block) if block else None

    def rewrite(self, proto: onnx.ModelProto, refs: Mapping[str, WeightRef]) -> dict[str, WeightRef]:
        """Make a traced graph read the stored codes, in place; return where its weights lie now."""
        found = dict(refs)
        reduced = sorted(name for name, ref in refs.items() if ref.state_name in self._formats)
        if not reduced:
            return found
        graph = _Rewriting(proto.graph)
        for name in reduced:
            ref = found.pop(name)
            stored = self._formats[ref.state_name]
            rows, first = _row_range(ref, stored)
            part = BlockFormat(rows, stored.columns, stored.bits, stored.block)
            graph.replace_uses(name, part)
            found[codes_name(name, part)] = found[_blocks_name(name, part)] = WeightRef(
                codes_name(ref.state_name, stored), first * part.row_bytes, rows * part.row_bytes
            )
            found[scales_name(name)] = WeightRef(
                scales_name(ref.state_name), first * part.blocks * 4, rows * part.blocks * 4
            )
        graph.finish()
        proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        return found


def codes_name(name: str, stored: BlockFormat) -> str:
    return f"{name}.int{stored.bits}"


def _blocks_name(name: str, stored: BlockFormat) -> str:
    """The same bytes with the shape that MatMulNBits wants."""
    return f"{codes_name(name, stored)}.blocks"


def scales_name(name: str) -> str:
    return f"{name}.scales"


def _reduce(name: str, tensor: Tensor, stored: BlockFormat) -> tuple[Array, Array, Tensor]:
    """Codes, scales, and the values they stand for in the layout of the state."""
    if name in _TABLES:
        return quantise(tensor, stored)
    by_rows = tensor.transpose(-1, -2)
    codes, scales, values = quantise(by_rows.reshape(-1, stored.columns), stored)
    return codes, scales, values.reshape(by_rows.shape).transpose(-1, -2).contiguous()


def quantise(values: Tensor, stored: BlockFormat) -> tuple[Array, Array, Tensor]:
    """Rows [N, K] -> codes uint8 [N, K * bits / 8], scales float32 [N, blocks], and the values they stand for.

    As ONNX Runtime's own quantiser: the largest value of a block, with its sign, gets the end of the range that has
    one code more, so that no code is wasted.
    """
    half = 1 << (stored.bits - 1)
    codes = np.empty((stored.rows, stored.row_bytes), np.uint8)
    scales = np.empty((stored.rows, stored.blocks), np.float32)
    meant = torch.empty(stored.rows, stored.columns)
    for start in range(0, stored.rows, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        blocks = values[part].reshape(-1, stored.blocks, stored.block)
        extreme = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
        scale = extreme / -half
        steps = torch.where(scale == 0, 0.0, torch.round(blocks / scale)).clamp(-half, half - 1)
        meant[part] = (steps * scale).reshape(-1, stored.columns)
        scales[part] = scale.squeeze(2).numpy()
        unsigned = (steps + half).to(torch.uint8).reshape(-1, stored.columns).numpy()
        codes[part] = unsigned if stored.bits == 8 else unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return codes, scales, meant


def _row_range(ref: WeightRef, stored: BlockFormat) -> tuple[int, int]:
    """How many stored rows an initializer is, and the first of them."""
    row_bytes = 4 * stored.columns
    if ref.byte_offset % row_bytes or ref.num_bytes % row_bytes:
        raise ExportError(f"{ref.state_name}: a graph reads part of a row; a reduced weight is read by whole rows")
    return ref.num_bytes // row_bytes, ref.byte_offset // row_bytes


class _Rewriting:
    """One graph while its nodes are exchanged."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self._consumers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._consumers.setdefault(name, []).append(node)
        self._replaced: set[str] = set()
        self._added: dict[str, TensorProto] = {}

    def replace_uses(self, weight: str, stored: BlockFormat) -> None:
        """Exchange every node that reads a weight; what else may read one is refused."""
        dims = self._dims[weight]
        for node in self._consumers[weight]:
            if node.op_type == "Gather" and dims == (stored.rows, stored.columns):
                self._gather(node, weight, stored)
            elif node.op_type == "MatMul" and node.input[1] == weight and dims == (stored.columns, stored.rows):
                self._matmul(node, weight, stored)
            else:
                raise ExportError(
                    f"{node.name}: {node.op_type} of {weight} {dims}; expected a Gather of whole rows or a MatMul with "
                    "a whole matrix on its right"
                )
        self._replaced.add(weight)
        self._add(scales_name(weight), TensorProto.FLOAT, (stored.rows, stored.blocks))

    def finish(self) -> None:
        """Exchange the initializers."""
        kept = [tensor for tensor in self._graph.initializer if tensor.name not in self._replaced]
        del self._graph.initializer[:]
        self._graph.initializer.extend(kept + [self._added[name] for name in sorted(self._added)])

    def _gather(self, node: NodeProto, weight: str, stored: BlockFormat) -> None:
        data = codes_name(weight, stored)
        self._add(data, TensorProto.UINT8, (stored.rows, stored.row_bytes))
        _become(node, "GatherBlockQuantized", [data, node.input[1], scales_name(weight)],
                gather_axis=0, quantize_axis=1, block_size=stored.block, bits=stored.bits)  # fmt: skip

    def _matmul(self, node: NodeProto, weight: str, stored: BlockFormat) -> None:
        data = _blocks_name(weight, stored)
        self._add(data, TensorProto.UINT8, (stored.rows, stored.blocks, stored.row_bytes // stored.blocks))
        _become(node, "MatMulNBits", [node.input[0], data, scales_name(weight)], K=stored.columns, N=stored.rows,
                bits=stored.bits, block_size=stored.block, accuracy_level=INT8_COMPUTE)  # fmt: skip

    def _add(self, name: str, data_type: int, dims: tuple[int, ...]) -> None:
        self._added[name] = TensorProto(name=name, data_type=data_type, dims=dims, data_location=TensorProto.EXTERNAL)


def _become(node: NodeProto, op_type: str, inputs: list[str], **attributes: int) -> None:
    """Exchange an operator in place: name and outputs stay."""
    made = helper.make_node(op_type, inputs, list(node.output), node.name, domain=DOMAIN)
    made.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    node.CopyFrom(made)


def verify_reduced(
    spec: GraphSpec, module: nn.Module, path: Path, model: ModelConfig, codec: CodecConfig
) -> dict[str, float]:
    """Both halves of the proof; the differences are those of the first, torch against ONNX."""
    proto = onnx.load(str(path), load_external_data=False)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = FLOAT_COMPUTE
    exact = path.with_suffix(".float.onnx")
    try:
        onnx.save(proto, exact)
        differences = verify_graph(spec, module, exact, model, codec)
        _verify_activations(spec, exact, path, model, codec)
    finally:
        exact.unlink(missing_ok=True)
    return differences


def _verify_activations(spec: GraphSpec, exact: Path, path: Path, model: ModelConfig, codec: CodecConfig) -> None:
    """The file against its float32 form, in the values that do not follow from the choice of a code."""
    rng, backend = np.random.default_rng(0), OrtBackend()
    with backend.open(spec, exact) as first, backend.open(spec, path) as second:
        for axes in example_axes(spec.name, codec):
            feeds = example_feeds(spec.bind_known(axes), model, codec, rng)
            got = _before_any_choice(second.run(feeds))
            for name, expected in _before_any_choice(first.run(feeds)).items():
                found = compare_tensors(name, expected, got[name], ACTIVATIONS)
                if not found.passed:
                    raise ExportError(f"{spec.name}: int8 activations move too far at {axes}: {name}: {found.reason}")


def _before_any_choice(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Hidden states, cache rows and the logits of codebook 0; the two slot logits are too few to have a size."""
    chosen = ("codes", "go_on", "seen_next", "slot_logits", "code_logits")
    found = {name: value for name, value in outputs.items() if name not in chosen}
    if "code_logits" in outputs:
        found["code_logits"] = outputs["code_logits"][:, 0]
    return found
