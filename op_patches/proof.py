"""Measure that a replacement equals what it replaces, before it enters the graph.

The matched nodes and the replacement become two small models with equal inputs. The original runs in the next wider
precision through `onnx.reference` (through ONNX Runtime where the reference lacks the operator); the replacement runs
as it is through ONNX Runtime with optimizations off. Inputs: random, and extreme (mean 1,000 with deviation 1,000,
tiny, constant, zero, wide). A third run stores intermediate results in float16 and counts overflows and NaN.

runtime/compare.py compares: NaN where the original has a number fails, another shape fails, comparing nothing fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from op_patches.evaluate import EvaluationError, half_run, in_float16, run_original, run_replacement
from op_patches.graph_view import FLOATS, Array, Dim, GraphView, TensorType, stores_float16
from op_patches.report import HalfProof, SiteProof
from runtime.compare import largest_gap

FLOAT16_MAX = 65504.0
WEIGHT_BYTES = 1 << 12
MAX_ELEMENTS = 1 << 25  # a site with larger tensors than this is not measured, and so not rewritten

# Allowed |difference| relative to the largest |value| of the output, on random and on extreme inputs. Float32 sums of
# ~1,000 terms differ by ~1e-6 between summation orders; an offset of 1,000 costs three digits more (condition number).
TOLERANCES: dict[int, tuple[float, float]] = {
    TensorProto.FLOAT16: (4e-3, 2e-2),
    TensorProto.BFLOAT16: (3e-2, 6e-2),
    TensorProto.DOUBLE: (1e-6, 1e-4),
}
FLOAT32_TOLERANCE = (1e-5, 1e-3)
FLOOR = 1e-6  # absolute, for outputs that are zero


@dataclass(frozen=True, slots=True)
class Site:
    """The nodes that go, the nodes and constants that come, and what the proof may assume about the inputs."""

    view: GraphView
    old: Sequence[NodeProto]
    new: Sequence[NodeProto]
    constants: Mapping[str, TensorProto]
    new_opsets: Mapping[str, int]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    observer: Sequence[NodeProto] = ()  # what reads the result, where only its view of it must stay equal


class ProofFailed(Exception):  # noqa: N818  (not an error of the program: the caller turns it into a refusal)
    """The replacement was measured and differs, or could not be measured; the text says which."""


class Prover:
    """Proves sites; equal sites are measured once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], SiteProof] = {}

    def prove(self, site: Site) -> SiteProof:
        key = _signature(site)
        if key not in self._known:
            self._known[key] = _prove(site)
        return self._known[key]


def difference(reference: Array, got: Array) -> float:
    """Largest |difference|; inf when shape, NaN or infinity disagree. Comparing nothing is an error."""
    if reference.dtype.kind in "OSU" and got.dtype.kind in "OSU":
        return 0.0 if _texts(reference) == _texts(got) else float("inf")
    if reference.shape == got.shape and reference.size == 0:
        raise ProofFailed("the comparison is empty: a tensor has no elements")
    return largest_gap(reference, got)


def _texts(value: Array) -> list[str]:
    """Strings, which one evaluator returns as bytes."""
    return [t.decode() if isinstance(t, bytes) else str(t) for t in value.ravel().tolist()]


def _prove(site: Site) -> SiteProof:
    boundary = _boundary(site)
    outputs = _outputs(site)
    original = _model(site, (*site.old, *site.observer), boundary, outputs, site.view.opsets, {})
    replacement = _model(site, (*site.new, *site.observer), boundary, outputs, site.new_opsets, site.constants)
    reason = "no inputs that the original accepts were found"
    for shapes in _shape_choices(site, boundary):
        try:
            return _measure(site, original, replacement, boundary, shapes)
        except EvaluationError as error:  # a guess for an open axis may not suit the operator; try the next
            reason = str(error)
    raise ProofFailed(f"not measured: {reason}")


def _outputs(site: Site) -> list[str]:
    """What is compared: what something reads of the last node, or the observer's result."""
    if site.observer:
        return list(site.observer[-1].output)
    return [n for n in site.old[-1].output if n and site.view.uses(n)]


def _measure(
    site: Site,
    original: onnx.ModelProto,
    replacement: onnx.ModelProto,
    boundary: Mapping[str, TensorType],
    shapes: Mapping[str, tuple[int, ...]],
) -> SiteProof:
    worst = {"random": 0.0, "extreme": 0.0}
    half = _HalfCount(site, boundary)
    compared, relative = 0, 0.0
    for case in _CASES if boundary else _CASES[:1]:  # a constant is the same in every case
        rng = np.random.default_rng(zlib.crc32(case.name.encode()))
        feeds = {n: _draw(case, rng, n, t, shapes[n], site) for n, t in boundary.items()}
        want = run_original(original, feeds)
        got = run_replacement(replacement, feeds)
        for index, (reference, value) in enumerate(zip(want, got, strict=True)):
            gap = difference(reference, _like(reference, value))
            if gap > _allowed(boundary, reference, value, case.kind):
                name = _outputs(site)[index]
                raise ProofFailed(f"differs by {gap:.3g} in {name} on inputs {case.name}")
            worst[case.kind] = max(worst[case.kind], gap)
            relative = max(relative, gap / (_peak(reference) or 1.0))
            compared += int(not np.isnan(reference).all()) if reference.dtype.kind == "f" else 1
        half.add(original, replacement, feeds)
    if not compared:
        raise ProofFailed("not measured: the original gave nothing but NaN on every input")
    return SiteProof(len(_CASES) if boundary else 1, worst["random"], worst["extreme"], relative, half.proof())


def _allowed(boundary: Mapping[str, TensorType], reference: Array, value: Array, kind: str) -> float:
    """The difference that rounding explains; nothing for integers and booleans."""
    if reference.dtype.kind != "f":
        return 0.0
    elems = {*(t.elem for t in boundary.values()), helper.np_dtype_to_tensor_dtype(value.dtype)} & set(FLOATS)
    random, extreme = max((TOLERANCES.get(e, FLOAT32_TOLERANCE) for e in elems), default=FLOAT32_TOLERANCE)
    return FLOOR + (random if kind == "random" else extreme) * _peak(reference)


def _peak(value: Array) -> float:
    """The largest |finite value|; 0 for anything but floats."""
    if value.dtype.kind != "f":
        return 0.0
    return float(np.abs(value[np.isfinite(value)]).max(initial=0.0))


class _HalfCount:
    """Adds up the half-precision proof over the cases."""

    def __init__(self, site: Site, boundary: Mapping[str, TensorType]) -> None:
        self.cases = self.overflows = self.nans = 0
        self.gap = 0.0
        self.floats = any(t.elem in FLOATS for t in boundary.values())
        native = any(t.elem in (TensorProto.FLOAT16, TensorProto.BFLOAT16) for t in boundary.values())
        casts = any(n.op_type == "Cast" and _casts_to_float(n) for n in site.new)
        self.keep = not stores_float16(site.view.target)
        if not self.keep or (native and not casts):
            self.how = "every intermediate rounded to float16"
        elif native:
            self.how = "float32 island: Cast to float32 and back"
        else:
            self.how = f"float32 island: precision={site.view.target.precision} keeps these nodes in float32"

    def add(self, original: onnx.ModelProto, replacement: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
        if not self.floats or not all(_fits_float16(f) for f in feeds.values()):
            return
        stored = {n: in_float16(f) for n, f in feeds.items()}
        want = run_original(original, stored)
        if not all(_fits_float16(w) for w in want):
            return  # the original's own result does not fit: no replacement could
        values, overflows, nans = half_run(replacement, stored, self.keep)
        self.cases += 1
        self.overflows += overflows
        self.nans += nans
        for reference, value in zip(want, values, strict=True):
            if reference.dtype.kind == "f":
                gaps = np.abs(reference.astype(np.float64) - value.astype(np.float64))
                gap = float(np.max(gaps[np.isfinite(gaps)], initial=0.0))
                self.gap = max(self.gap, gap / (_peak(reference) or 1.0))

    def proof(self) -> HalfProof | None:
        if not self.floats or not self.cases:
            return None
        return HalfProof(self.how, self.cases, self.overflows, self.nans, self.gap)


def _fits_float16(value: Array) -> bool:
    if value.dtype.kind != "f" and value.dtype.name != "bfloat16":
        return True
    return bool(np.abs(value.astype(np.float64)).max(initial=0.0) <= FLOAT16_MAX)


def _casts_to_float(node: NodeProto) -> bool:
    return any(a.name == "to" and a.i == TensorProto.FLOAT for a in node.attribute)


@dataclass(frozen=True, slots=True)
class _Case:
    """One way to draw inputs: value = offset + scale * N(0, 1) for floats, within ±bound for integers."""

    name: str
    kind: str
    offset: float
    scale: float
    bound: int


_CASES = (
    _Case("N(0, 1)", "random", 0.0, 1.0, 8),
    _Case("N(0, 1) again", "random", 0.0, 1.0, 100),
    _Case("mean 1000, deviation 1000", "extreme", 1000.0, 1000.0, 1_000_000),
    _Case("tiny, deviation 0.001", "extreme", 0.0, 1e-3, 1),
    _Case("all 1000", "extreme", 1000.0, 0.0, 1_000_000),
    _Case("all zero", "extreme", 0.0, 0.0, 0),
    _Case("wide, deviation 12", "extreme", 0.0, 12.0, 30_000),
)


def _draw(
    case: _Case, rng: np.random.Generator, name: str, kind: TensorType, shape: tuple[int, ...], site: Site
) -> Array:
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem)
    if kind.elem in FLOATS:
        weight = site.view.is_constant(name)
        offset, scale = (0.0, 1.0) if weight else (case.offset, case.scale)
        return np.asarray(offset + scale * rng.standard_normal(shape)).astype(dtype)
    if kind.elem == TensorProto.BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if kind.elem == TensorProto.STRING:
        raise ProofFailed(f"not measured: {name} holds strings")
    low, high = site.ranges.get(name, (-case.bound, case.bound))
    limits = np.iinfo(dtype)
    return rng.integers(max(low, limits.min), min(high, limits.max), shape, endpoint=True).astype(dtype)


def _literal(view: GraphView, name: str) -> Array | None:
    """A constant that enters the proof by value. Float weights do not: a proof for any values holds for these too."""
    value = view.constant(name)
    if value is not None and value.dtype.kind not in "iub" and value.nbytes > WEIGHT_BYTES:
        return None
    return value


def _boundary(site: Site) -> dict[str, TensorType]:
    """What the site reads from outside and what the proof must draw; small constants stay constants."""
    made = {name for node in (*site.old, *site.new) for name in node.output} | set(site.constants)
    names = dict.fromkeys(n for node in (*site.old, *site.new) for n in node.input if n and n not in made)
    boundary: dict[str, TensorType] = {}
    for name in names:
        if _literal(site.view, name) is not None:
            continue
        kind = site.view.type_of(name)
        if kind is None or kind.shape is None:
            raise ProofFailed(f"not measured: the shape of {name} is unknown; bind the input shapes")
        boundary[name] = kind
    return boundary


def _shape_choices(site: Site, boundary: Mapping[str, TensorType]) -> list[dict[str, tuple[int, ...]]]:
    """Numbers for the open axes: all different, then all equal, then all one."""
    names = dict.fromkeys(d for t in boundary.values() for d in t.shape or () if isinstance(d, str))
    distinct = {name: 3 + i for i, name in enumerate(names)}
    choices = [
        {
            n: tuple(d if isinstance(d, int) else table.get(d or "", rest) for d in t.shape or ())
            for n, t in boundary.items()
        }
        for table, rest in ((distinct, 2), (dict.fromkeys(names, 4), 4), (dict.fromkeys(names, 1), 1))
    ]
    for shapes in choices[:1]:
        for name, shape in shapes.items():
            if int(np.prod(shape, dtype=np.int64)) > MAX_ELEMENTS:
                raise ProofFailed(f"not measured: {name} {list(shape)} is larger than {MAX_ELEMENTS} elements")
            if 0 in shape:
                raise ProofFailed(f"not measured: {name} {list(shape)} has no elements")
    return choices


def _model(
    site: Site,
    nodes: Sequence[NodeProto],
    boundary: Mapping[str, TensorType],
    outputs: Sequence[str],
    opsets: Mapping[str, int],
    constants: Mapping[str, TensorProto],
) -> onnx.ModelProto:
    read = {n for node in nodes for n in node.input if n}
    made = {n for node in nodes for n in node.output}
    initializers = [constants[n] for n in constants if n in read or n in outputs]
    for name in sorted(read - made - set(constants) - set(boundary)):
        value = _literal(site.view, name)
        if value is not None:
            initializers.append(numpy_helper.from_array(value, name))
    graph = helper.make_graph(
        list(nodes),
        "site",
        [helper.make_tensor_value_info(n, t.elem, [None] * len(t.shape or ())) for n, t in boundary.items()],
        [onnx.ValueInfoProto(name=n) for n in outputs],
        initializers,
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10 if opsets.get("", 1) <= 22 else 13)


def _like(reference: Array, value: Array) -> Array:
    """The measured value in the reference's width (the original ran in a wider precision)."""
    both_float = reference.dtype.kind == "f" and (value.dtype.kind == "f" or value.dtype.name == "bfloat16")
    return value.astype(reference.dtype) if both_float else value


def _signature(site: Site) -> tuple[Any, ...]:
    """Equal for sites that differ in names only, those of open axes included."""
    numbers: dict[str, int] = {}
    axes: dict[str, str] = {}

    def axis(dim: Dim) -> Dim:
        return axes.setdefault(dim, f"axis {len(axes)}") if isinstance(dim, str) else dim

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers)) if name else -1

    def shape_of(nodes: Sequence[NodeProto]) -> tuple[Any, ...]:
        return tuple(
            (
                node.op_type,
                node.domain,
                tuple(a.SerializeToString(deterministic=True) for a in node.attribute),
                tuple(map(number, node.input)),
                tuple(map(number, node.output)),
            )
            for node in nodes
        )

    used = tuple(bool(site.view.uses(n)) for n in site.old[-1].output)
    structure = (shape_of(site.old), shape_of(site.new), shape_of(site.observer), used)
    values: list[Any] = []
    for name in numbers:
        value = _literal(site.view, name)
        if name in site.constants:
            values.append(site.constants[name].raw_data or repr(site.constants[name].ListFields()[1:]))
        elif value is not None:
            values.append((value.dtype.str, value.shape, value.tobytes()))
        else:
            kind = site.view.type_of(name)
            dims = () if kind is None else tuple(axis(d) for d in kind.shape or ())
            values.append((kind and (kind.elem, kind.shape is None, dims), site.ranges.get(name)))
    return (*structure, tuple(values), tuple(site.view.opsets.items()), tuple(site.new_opsets.items()))
