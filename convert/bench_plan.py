"""What a device that is not here would take, predicted: kernels, FLOPs, bytes and time of each graph.

    time of a launch = launch overhead + sum over kernels of max(kernel overhead, bytes / bandwidth, FLOPs / peak)

A PREDICTION from unchecked peak figures and assumed overheads, never a measurement. It says what the arithmetic and
the number of kernels allow, and which of the two is the limit.

Kernels are the nodes of the lowered graph, as ATC would get it for the target, that the readiness tables place on
AICore or AICPU. Two fusions are counted, which GE is expected to do on static graphs: a bias goes into its matrix
product, and element-wise nodes in a chain with one reader become one kernel (UB fusion). That GE fuses the primitives
of a LayerNorm into one kernel again is not counted: its pass looks for the float32 form, float16 gets a safe one.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto, NodeProto

from convert.atc import Buckets
from convert.bench_variants import VARIANTS, export_variant
from convert.patched_graphs import lower_graph
from op_patches.graph_view import GraphView, attributes, input_name, skeleton
from op_patches.readiness.folding import Folded, folded
from op_patches.readiness.kernels import place_all
from op_patches.readiness.views import TypedGraph, bind_axes, typed_graph
from op_patches.targets import Engine, Plugin, Target
from runtime.errors import BenchError
from runtime.graphs import HOST_GRAPHS
from runtime.manifest import Manifest
from runtime.spec import GraphSpec

ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Sqrt", "Tanh", "Erf", "Exp", "Neg", "Abs", "Pow", "Cast", "Where", "Min",
               "Max", "Clip", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "And", "Or", "Not",
               "Reciprocal", "Cos", "Sin", "Sigmoid"}  # fmt: skip
PER_FRAME = ("step", "frame", "step_frame")
UP_BYTES, DOWN_BYTES = 64 + 4, 64  # per frame, plus 4 per uniform and code; docs/om-backend.md


@dataclass(frozen=True, slots=True)
class Device:
    """The stated cost model of one chip."""

    bandwidth: float  # bytes per second from device memory, peak, source not checked
    bandwidth_share: float  # of it that a kernel reaches: assumed
    half_flops: float  # float16 FLOP per second of the matrix unit, peak, source not checked
    float_share: float  # float32 as a share of that: assumed
    flops_share: float  # of the peak that these small products reach: assumed
    cache_bytes: int  # what stays on the chip between two uses of a weight
    kernel_seconds: float  # shortest kernel inside a launched graph: assumed
    aicpu_seconds: float  # one AICPU kernel: assumed
    launch_seconds: float  # host side of one execute, and of one small copy: assumed
    note: str


DEVICES = {
    "910b": Device(0.8e12, 0.6, 280e12, 0.25, 0.3, 96 << 20, 4e-6, 60e-6, 50e-6,
                   "Ascend 910B4: 0.8 TB/s and 280 TFLOPS float16 (32 GB card), source not checked"),
    "310p": Device(204.8e9, 0.6, 70e12, 0.05, 0.3, 8 << 20, 6e-6, 80e-6, 60e-6,
                   "Ascend 310P3: 204.8 GB/s and 70 TFLOPS float16 (one chip), source not checked"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """One graph at one size, and what one launch of it costs."""

    graph: str
    axes: dict[str, int]
    nodes: int
    kernels_before_fusion: int
    kernels: int
    aicpu_kernels: int
    flops: float
    weight_bytes: float  # read from device memory
    activation_bytes: float  # cache and inputs included
    bytes_up: int | None  # from the host per launch; None: a part of a frame, see FramePlan
    bytes_down: int | None
    predicted_ms: float
    of_it_overhead_ms: float  # kernels that are too small to fill their shortest time


@dataclass(frozen=True, slots=True)
class FramePlan:
    """One frame of one way to run."""

    name: str
    launches: int
    kernels: int
    bytes_up: int
    bytes_down: int
    predicted_ms: float

    @property
    def frames_per_second(self) -> float:
        return 1e3 / self.predicted_ms


@dataclass(frozen=True, slots=True)
class SavingPlan:
    """One exact saving: its graph with the work that it leaves out, and without."""

    saving: str
    graph: str
    axes: dict[str, int]
    kernels_before: int
    kernels: int
    gflop_before: float
    gflop: float
    predicted_ms_before: float
    predicted_ms: float


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """The whole prediction."""

    target: str
    graphs: tuple[GraphPlan, ...]
    frames: tuple[FramePlan, ...]
    assumptions: tuple[str, ...]
    savings: tuple[SavingPlan, ...] = ()
    prediction: bool = field(default=True)  # for whoever reads the JSON: nothing here was measured

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        frames = [{**asdict(frame), "frames_per_second": frame.frames_per_second} for frame in self.frames]
        return {**asdict(self), "frames": frames}


def plan_speed(
    manifest: Manifest, target: Target, buckets: Buckets | None = None, with_savings: bool = False
) -> SpeedPlan:
    """Every graph at every size that it is compiled for, lowered for the target as `convert-moss build` does it."""
    if target.family not in DEVICES or target.soc not in ("Ascend910B4", "Ascend310P3"):
        raise BenchError(f"no cost model for {target.soc}; there is one for 910B4 and one for 310P3")
    device = DEVICES[target.family]
    buckets = buckets or Buckets()
    graphs: list[GraphPlan] = []
    for name in manifest.graphs:
        if name not in ("codec_decode", *HOST_GRAPHS):  # nothing runs codec_decode in production
            graphs += _plan_sizes(manifest, name, target, device, buckets)
    savings = _plan_savings(manifest, graphs, target, device, buckets) if with_savings else []
    frames = _frames(manifest, graphs, device)
    return SpeedPlan(str(target), tuple(graphs), tuple(frames), _assumptions(device, target), tuple(savings))


def _plan_sizes(manifest: Manifest, name: str, target: Target, device: Device, buckets: Buckets) -> list[GraphPlan]:
    lowered, _ = lower_graph(manifest, name, target, buckets.batch)
    bindings = buckets.bindings(manifest.graph(name).spec, manifest.codec)
    return [_plan_graph(manifest, name, skeleton(lowered), axes, target, device, buckets.capacity) for axes in bindings]


def _plan_savings(
    manifest: Manifest, graphs: Sequence[GraphPlan], target: Target, device: Device, buckets: Buckets
) -> list[SavingPlan]:
    """Each saving at the largest size of its graph."""
    savings = []
    try:
        scratch_of = tempfile.TemporaryDirectory(prefix=".bench-plan-", dir=manifest.directory)  # for hard links
    except OSError as error:
        raise BenchError(
            f"{manifest.directory}: cannot write the variants there ({error.strerror}); copy the artifacts, or leave "
            "--savings out"
        ) from error
    with scratch_of as scratch:
        for name, variant in VARIANTS.items():
            if variant.graph in manifest.graphs:
                changed = export_variant(manifest, name, Path(scratch) / name)
                before = _plan_sizes(changed, variant.graph, target, device, buckets)[-1]
                ours = next(g for g in graphs if (g.graph, g.axes) == (variant.graph, before.axes))
                savings.append(SavingPlan(
                    variant.saving, variant.graph, before.axes, before.kernels, ours.kernels, before.flops / 1e9,
                    ours.flops / 1e9, before.predicted_ms, ours.predicted_ms,
                ))  # fmt: skip
    return savings


def _plan_graph(
    manifest: Manifest,
    name: str,
    model: ModelProto,
    axes: Mapping[str, int],
    target: Target,
    device: Device,
    capacity: int,
) -> GraphPlan:
    """Bind the lowered `model`, place its nodes; then add up."""
    graph = manifest.graph(name)
    bind_axes(model, {t.name: t.bound_shape for t in graph.spec.bind(**axes).inputs})
    typed = typed_graph(model, target)
    launched = [
        (node, engine) for node, engine in _placed(typed, target) if engine in (Engine.AICORE, Engine.AICPU)
    ]  # fmt: skip
    groups = _fused([node for node, _ in launched], typed.root)
    engines = {id(node): engine for node, engine in launched}
    cached: set[str] = set()
    total = overhead = weights = activations = flops = 0.0
    for group in groups:
        on_aicpu = any(engines[id(node)] is Engine.AICPU for node in group)
        shortest = device.aicpu_seconds if on_aicpu else device.kernel_seconds
        work = sum(_flops(node, typed.root) for node in group)
        read, touched = _bytes(group, typed.root, target, device, cached)
        seconds = max(shortest, _memory_seconds(read + touched, device), work / _peak(target, device))
        overhead += shortest if seconds == shortest else 0.0
        total, flops, weights, activations = total + seconds, flops + work, weights + read, activations + touched
    return GraphPlan(
        name, dict(axes), len(model.graph.node), len(launched), len(groups),
        sum(engine is Engine.AICPU for _, engine in launched), flops, weights, activations,
        *_host_bytes(manifest, graph.spec.bind(**axes), capacity),
        1e3 * (total + device.launch_seconds), 1e3 * (overhead + device.launch_seconds),
    )  # fmt: skip


def _host_bytes(manifest: Manifest, spec: GraphSpec, capacity: int) -> tuple[int | None, int | None]:
    """Bytes up and down of one launch, as the OM backend moves them (docs/om-backend.md), without alignment."""
    up, down = (sum(tensor.num_bytes for tensor in tensors) for tensors in (spec.inputs, spec.outputs))
    if spec.name == "step_frame":
        return _frame_bytes(manifest)
    if spec.name in PER_FRAME:
        return None, None
    if spec.name == "prefill":
        return up + 4 * capacity, 0  # with the cache mask; hidden, keys and values stay there
    rings = ("past_key", "past_value", "new_")  # of the codec: they stay on the device
    up, down = (
        sum(tensor.num_bytes for tensor in tensors if not tensor.name.startswith(rings))
        for tensors in (spec.inputs, spec.outputs)
    )
    return up, down


def _frame_bytes(manifest: Manifest) -> tuple[int, int]:
    n_vq = manifest.model.n_vq
    return UP_BYTES + 4 * (1 + n_vq), DOWN_BYTES + 4 * n_vq


def _placed(typed: TypedGraph, target: Target) -> list[tuple[NodeProto, Engine]]:
    constants: dict[int, Folded] = {id(typed.root): folded(typed.root, None)}
    opset = typed.root.opset
    plugins: dict[int, Plugin | None] = {id(n): target.plugin(n.op_type, opset) for n in typed.root.nodes}
    return [(node, placed.engine) for _, node, _, placed in place_all([typed.root], target, plugins, constants)]


def _fused(nodes: Sequence[NodeProto], view: GraphView) -> list[list[NodeProto]]:
    """Kernels: a chain joins its producer when the producer's value has no other reader."""
    group_of: dict[int, list[NodeProto]] = {}
    groups: list[list[NodeProto]] = []
    known = {id(node) for node in nodes}
    for node in nodes:
        joined = None
        if node.op_type in ELEMENTWISE:
            for name in node.input:
                producer = view.producer(name) if name else None
                if producer is None or id(producer) not in known or id(producer) not in group_of:
                    continue
                alone = view.uses(name) == 1 and not view.is_output(name)
                bias = producer.op_type in ("MatMul", "Gemm") and node.op_type == "Add" and _adds_constant(node, view)
                if alone and (producer.op_type in ELEMENTWISE or bias):
                    joined = group_of[id(producer)]
                    break
        if joined is None:
            joined = []
            groups.append(joined)
        joined.append(node)
        group_of[id(node)] = joined
    return groups


def _adds_constant(node: NodeProto, view: GraphView) -> bool:
    return any(view.is_constant(name) for name in node.input)


def _flops(node: NodeProto, view: GraphView) -> float:
    """Of matrix products; the vector unit's share is inside the shortest time of a kernel."""
    if node.op_type not in ("MatMul", "Gemm"):
        return 0.0
    a, out = view.static_shape(input_name(node, 0)), view.static_shape(node.output[0])
    if a is None or out is None:
        raise BenchError(f"{node.name}: the shape is not known after binding all axes; check the graph first")
    inner = a[-2] if node.op_type == "Gemm" and attributes(node).get("transA", 0) else a[-1]
    return 2.0 * math.prod(out) * inner


def _bytes(
    group: Sequence[NodeProto], view: GraphView, target: Target, device: Device, cached: set[str]
) -> tuple[float, float]:
    """Weights from device memory, and other values in and out. A weight that fits the chip's cache is read once."""
    inside = {name for node in group for name in node.output}
    weights = values = 0.0
    for node in group:
        for i, name in enumerate(node.input):
            if not name or name in inside:
                continue
            size = _size(name, view, target)
            if node.op_type in ("Gather", "GatherElements", "Slice", "Split") and i == 0:
                size = min(size, sum(_size(out, view, target) for out in node.output))
            if view.is_constant(name):
                weights += 0.0 if name in cached else size
                if size < device.cache_bytes and node.op_type != "Gather":
                    cached.add(name)
            else:
                values += size
        values += sum(_size(name, view, target) for name in node.output if view.is_output(name))
    last = group[-1]
    values += sum(_size(name, view, target) for name in last.output if not view.is_output(name))
    return weights, values


def _size(name: str, view: GraphView, target: Target) -> float:
    shape, found = view.static_shape(name), view.type_of(name)
    if shape is None or found is None:
        return 0.0  # an optional value without a type: nothing that moves
    wide = {"float32": 2 if target.half_precision else 4, "int64": 8, "bool": 1, "float16": 2}
    return float(math.prod(shape) * wide.get(found.dtype, 4))


def _memory_seconds(num_bytes: float, device: Device) -> float:
    return num_bytes / (device.bandwidth * device.bandwidth_share)


def _peak(target: Target, device: Device) -> float:
    return device.half_flops * device.flops_share * (1.0 if target.half_precision else device.float_share)


def _frames(manifest: Manifest, graphs: Sequence[GraphPlan], device: Device) -> list[FramePlan]:
    """The two ways to a frame: one launch, or two. The copies per frame cost a launch overhead each."""
    found = {g.graph: g for g in graphs}
    up, down = _frame_bytes(manifest)
    copies = 4 * 1e3 * device.launch_seconds  # control up, mask up, rows on the device, results down
    frames = []
    for names in (("step_frame",), ("step", "frame")):
        if all(name in found for name in names):
            parts = [found[name] for name in names]
            predicted = sum(p.predicted_ms for p in parts) + copies
            kernels = sum(p.kernels for p in parts)
            frames.append(FramePlan(" + ".join(names), len(parts), kernels, up, down, predicted))
    return frames


def _assumptions(device: Device, target: Target) -> tuple[str, ...]:
    return (
        "PREDICTION: nothing was run on a device",
        device.note,
        f"reached of the bandwidth: {device.bandwidth_share:.0%}; of the matrix unit's peak: {device.flops_share:.0%}"
        + ("" if target.half_precision else f", float32 at {device.float_share:.0%} of float16"),
        f"shortest kernel {device.kernel_seconds * 1e6:.0f} us, AICPU kernel {device.aicpu_seconds * 1e6:.0f} us, "
        f"one execute or copy from the host {device.launch_seconds * 1e6:.0f} us: assumed, not published",
        f"a weight below {device.cache_bytes >> 20} MiB that is used again in one launch comes from the chip's cache",
        "the cost of copying the new rows into the cache and the codes into the next row is one copy",
        "graphs as lowered for this target; fused: bias into its matrix product, element-wise chains with one reader; "
        "a LayerNorm of primitives is not counted as fused",
        f"float values take {'2' if target.half_precision else '4'} bytes in every kernel",
    )


def as_text(plan: SpeedPlan) -> str:
    """Tables for the terminal, the warning first."""
    lines = [f"PREDICTION for {plan.target} - not measured", ""]
    lines.append(
        f"{'graph':<14}{'axes':<16}{'nodes':>7}{'kernels':>9}{'fused':>7}{'AICPU':>7}{'GFLOP':>8}{'weights MB':>12}"
        f"{'values MB':>11}{'up kB':>10}{'down kB':>9}{'ms':>8}{'overhead':>10}"
    )
    for g in plan.graphs:
        axes = " ".join(f"{k}={v}" for k, v in g.axes.items() if k in "TCF")
        lines.append(
            f"{g.graph:<14}{axes:<16}{g.nodes:>7}{g.kernels_before_fusion:>9}{g.kernels:>7}{g.aicpu_kernels:>7}"
            f"{g.flops / 1e9:>8.2f}{g.weight_bytes / 1e6:>12.1f}{g.activation_bytes / 1e6:>11.1f}"
            f"{_kilobytes(g.bytes_up):>10}{_kilobytes(g.bytes_down):>9}{g.predicted_ms:>8.2f}"
            f"{g.of_it_overhead_ms / g.predicted_ms:>10.0%}"
        )
    lines.append("")
    for f in plan.frames:
        lines.append(
            f"one frame by {f.name}: {f.launches} launch(es), {f.kernels} kernels, {f.bytes_up} bytes up, "
            f"{f.bytes_down} down, {f.predicted_ms:.2f} ms, {f.frames_per_second:.0f} frames/s (real time is 12.5)"
        )
    if plan.savings:
        lines += ["", "each exact saving taken back, alone (before -> with it):"]
    for s in plan.savings:
        axes = " ".join(f"{k}={v}" for k, v in s.axes.items() if k in "TCF")
        lines.append(
            f"{s.saving}: {s.graph} {axes}: {s.kernels_before} -> {s.kernels} kernels, {s.gflop_before:.2f} -> "
            f"{s.gflop:.2f} GFLOP, {s.predicted_ms_before:.2f} -> {s.predicted_ms:.2f} ms"
        )
    return "\n".join([*lines, "", "assumptions:", *(f"- {line}" for line in plan.assumptions)])


def _kilobytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e3:.2f}"
