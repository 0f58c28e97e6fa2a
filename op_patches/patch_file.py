"""Patch an ONNX file by path: the structure is read and written, weights outside the file stay where they are.

External tensors keep file, offset and length. When the result goes to another directory the data files are copied
beside it: ONNX refuses a location with "..", symbolic links and hard links (onnx 1.23.2, checker), and ATC joins the
model's directory with the location. Only tensors small enough to be structure (shapes, axes) are read into the graph.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from op_patches.graph_view import all_graphs, is_external
from op_patches.pipeline import Options, apply_lowerings
from op_patches.readiness.loader import refuse_cpu_weights
from op_patches.report import LoweringReport
from op_patches.targets import Target
from runtime.errors import PatchError
from runtime.manifest import write_atomically

STRUCTURE_BYTES = 1 << 12


def patch_file(
    source: Path,
    out: Path,
    target: Target,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    options: Options | None = None,
) -> LoweringReport:
    """Apply the lowerings to `source`, write `out` and the data files it needs, and return the report."""
    model = _read(source)
    refuse_cpu_weights(model, source)
    for tensor in _external(model):
        _check_data(tensor, source)
        if _num_bytes(tensor, source) <= STRUCTURE_BYTES:
            load_external_data_for_tensor(tensor, str(source.parent))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    patched, report = apply_lowerings(model, target, input_shapes=input_shapes, options=options)
    for location in dict.fromkeys(ExternalDataInfo(t).location for t in _external(patched)):
        _copy_data(source.parent / location, out.parent / location)
    write_atomically(out, patched.SerializeToString())
    return report


def _read(source: Path) -> ModelProto:
    try:
        model = onnx.load_model(str(source), load_external_data=False)
    except OSError as error:
        raise PatchError(f"{source}: cannot be read ({error.strerror or error}); expected an .onnx file") from error
    except DecodeError as error:
        raise PatchError(f"{source}: not an ONNX file ({error})") from error
    if not model.graph.node:
        raise PatchError(f"{source}: the graph has no node; expected an exported ONNX model")
    return model


def _external(model: ModelProto) -> list[TensorProto]:
    tensors = [t for g in all_graphs(model.graph) for t in g.initializer]
    tensors += [a.t for g in all_graphs(model.graph) for n in g.node for a in n.attribute if a.HasField("t")]
    return [t for t in tensors if is_external(t)]


def _check_data(tensor: TensorProto, source: Path) -> None:
    info = ExternalDataInfo(tensor)
    path = source.parent / info.location
    if not path.is_file():
        raise PatchError(
            f"{source}: {tensor.name} lies in {path}, which is missing; keep the data file beside the model"
        )
    needed = (info.offset or 0) + _num_bytes(tensor, source)
    if path.stat().st_size < needed:
        raise PatchError(
            f"{path}: {path.stat().st_size} bytes, but {tensor.name} ends at {needed}; the file is cut off"
        )


def _num_bytes(tensor: TensorProto, source: Path) -> int:
    length = ExternalDataInfo(tensor).length
    if length is not None:
        return int(length)
    size = (source.parent / ExternalDataInfo(tensor).location).stat().st_size
    return size - int(ExternalDataInfo(tensor).offset or 0)


def _copy_data(source: Path, out: Path) -> None:
    """Copy a data file unless it is there already; never over another one."""
    if out.exists():
        if not out.samefile(source) and not filecmp.cmp(source, out, shallow=False):
            raise PatchError(f"{out} exists and differs from {source}; write the result to another directory")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.part")
    shutil.copyfile(source, scratch)
    os.replace(scratch, out)  # noqa: PTH105
