"""The edges of the graph: --input_shape and the graph inputs, zero dimensions, files beside the .onnx file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto

from op_patches.graph_view import GraphView
from op_patches.readiness.loader import external_number, is_outside, outside_file
from op_patches.readiness.report import Finding, Severity
from op_patches.readiness.views import DTYPE_NAMES, reads, topological
from op_patches.targets import Certainty
from runtime.errors import ReadinessError

Shapes = Mapping[str, Sequence[int]]
_ATC_SOURCE = "hicann/ge api/atc, compiler/api/aclgrph/option_utils.cc; --input_shape.md"
_LONGEST_NAME = 127  # longer input and output names are renamed


def parse_input_shapes(text: str) -> dict[str, list[int]]:
    """Read ATC's --input_shape: "x:1,17;scalar:;y:1,-1". A name may hold ':'; the last one separates."""
    shapes: dict[str, list[int]] = {}
    for part in (p.strip() for p in text.split(";") if p.strip()):
        name, separator, dims = part.rpartition(":")
        if not separator or not name:
            raise ReadinessError(f"--input-shape {part!r}: expected NAME:1,17 (ATC: E10002)")
        if name in shapes:
            raise ReadinessError(f"--input-shape: {name} is given twice")
        try:
            shapes[name] = [int(dim) for dim in dims.split(",") if dim.strip()]
        except ValueError as error:
            raise ReadinessError(f"--input-shape {part!r}: {dims!r} are not whole numbers (ATC: E10002)") from error
    return shapes


def input_shape_findings(model: ModelProto, shapes: Shapes) -> Iterator[Finding]:
    """Compare the given shapes with the graph inputs, as ATC does after parsing. Call before the axes are bound."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = {info.name: info for info in model.graph.input if info.name not in initializers}
    for name, shape in shapes.items():
        if name not in inputs:
            known = ", ".join(inputs)
            yield _flag("E10016", "shape.unknown-input", name, f"input {name} is not in the model", f"inputs: {known}")
            continue
        tensor = inputs[name].type.tensor_type
        rank = len(tensor.shape.dim)
        if tensor.HasField("shape") and rank != len(shape):
            message = f"{name} has {rank} dimensions, --input_shape gives {len(shape)}: {list(shape)}"
            yield _flag("E10049", "shape.rank", name, message, "give one number per dimension")
            continue
        for dim, size in zip(tensor.shape.dim, shape, strict=False):
            if size == 0 or size < -1:
                yield _flag("E10011", "shape.not-positive", name, f"{name}: {size} is not positive", "use 1 or more")
            elif dim.HasField("dim_value") and dim.dim_value > 0 and size not in (dim.dim_value, -1):
                message = f"{name}: the model says {dim.dim_value}, --input_shape {size}"
                yield _flag(
                    "E14001", "shape.contradiction", name, message, "export with a named axis", Certainty.INFERRED
                )


def open_axis_findings(root: GraphView) -> Iterator[Finding]:
    """Inputs whose axes are still open: ATC wants --input_shape for them."""
    initializers = {tensor.name for tensor in root.proto.initializer}
    for info in root.proto.input:
        shape = root.shape(info.name)
        if info.name in initializers or shape is None:
            continue
        open_axes = [str(dim) if isinstance(dim, str) else "?" for dim in shape if not isinstance(dim, int)]
        if open_axes:
            yield Finding(
                Severity.NOTE,
                "shape.open-axis",
                info.name,
                "graph input",
                f"axes {', '.join(open_axes)} of {info.name} are open; ATC needs --input_shape for them",
                "bind every axis: one number per dimension (ranges compile to a much slower dynamic model)",
                _ATC_SOURCE,
                Certainty.DOCUMENTED,
            )


def name_findings(root: GraphView) -> Iterator[Finding]:
    for info in (*root.proto.input, *root.proto.output):
        if ";" in info.name:
            yield _flag(
                "E10016",
                "names.separator",
                info.name,
                f"{info.name}: --input_shape splits at ';', so this name can never be given",
                "rename it",
                lowering="names",
            )
        elif len(info.name) > _LONGEST_NAME:
            yield Finding(
                Severity.NOTE,
                "names.long",
                info.name,
                "graph input or output",
                f"the name has {len(info.name)} characters; ATC renames what is longer than {_LONGEST_NAME}",
                "shorten it",
                _ATC_SOURCE,
                Certainty.DOCUMENTED,
                lowering="names",
            )


def zero_dim_findings(views: list[GraphView], constants: frozenset[str]) -> Iterator[Finding]:
    """No tensor but a constant may have a dimension of 0: an empty KV cache cannot be compiled."""
    for view in views:
        inputs = [info.name for info in view.proto.input] if view.parent is None else []
        outputs = [name for node in view.nodes if node.op_type != "Constant" for name in node.output if name]
        for name in (*inputs, *outputs):
            shape = view.shape(name)
            if shape is not None and 0 in shape and name not in constants:
                yield _flag(
                    "E10011" if name in inputs else "EZ9999",
                    "shape.zero-dim",
                    name,
                    f"{name} has shape {list(shape)}: a dimension of 0 is legal for constants only",
                    "give it capacity 1 or more and mask what is unused",
                    Certainty.DOCUMENTED,
                )


def cycle_findings(views: list[GraphView]) -> Iterator[Finding]:
    """The parser takes nodes in any order; GE sorts them afterwards, which a cycle makes impossible."""
    for view in views:
        own = {name for node in view.nodes for name in node.output if name}
        done: set[str] = set()
        for node in topological(view.nodes):
            late = [name for name in reads(node) if name in own and name not in done]
            if late:
                yield _flag(
                    "E19999",
                    "graph.cycle",
                    node.name or node.op_type,
                    f"{late[0]} depends on itself: the graph has a cycle",
                    "break the cycle",
                    Certainty.INFERRED,
                )
                break
            done |= set(node.output)


def external_data_findings(model: ModelProto, path: Path | None, views: list[GraphView]) -> Iterator[Finding]:
    """Every external file must exist, be long enough, and belong to the root graph."""
    for view in views:
        for tensor in view.proto.initializer:
            if not is_outside(tensor):
                continue
            if view.parent is not None:
                yield _flag(
                    "E10041",
                    "external.subgraph",
                    tensor.name,
                    f"external data of {tensor.name} inside a branch of If is not read",
                    "move the initializer to the root graph, or store it inside the file",
                    Certainty.SOURCE,
                )
            elif path is not None:
                yield from _missing_data(tensor, path)


def _missing_data(tensor: TensorProto, path: Path) -> Iterator[Finding]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    file = outside_file(tensor, path)
    if not file.is_file():
        problem = f"{entries['location']} does not exist beside {path.name}"
    else:
        wanted = external_number(tensor, "offset", 0) + external_number(tensor, "length", _num_bytes(tensor))
        size = file.stat().st_size
        if size >= wanted:
            return
        problem = f"{entries['location']} has {size} bytes, {tensor.name} needs {wanted}"
    yield _flag(
        "E10041",
        "external.missing",
        tensor.name,
        f"external data of {tensor.name}: {problem}; the parser accepts this and ATC fails later",
        "put the data file into the directory of the .onnx file",
        Certainty.PARSER,
    )


def _num_bytes(tensor: TensorProto) -> int:
    """The bytes a tensor needs; 0 for an element type that has no NumPy form."""
    if tensor.data_type not in DTYPE_NAMES or tensor.data_type == TensorProto.STRING:
        return 0
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _flag(
    code: str,
    rule: str,
    node: str,
    message: str,
    fix: str,
    certainty: Certainty = Certainty.SOURCE,
    lowering: str | None = None,
) -> Finding:
    return Finding(Severity.FAILS, rule, node, "", message, fix, _ATC_SOURCE, certainty, code, lowering)
