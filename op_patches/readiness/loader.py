"""Read the structure of an ONNX file without its weights.

The file is mapped, and every tensor above `LIMIT` bytes is replaced by a header that says where its data lies, so the
memory needed follows the number of nodes and not the size of the weights. External data is never loaded.

Field numbers are those of onnx.proto (ModelProto, GraphProto, NodeProto, AttributeProto, TensorProto).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from op_patches.graph_view import LARGE_BYTES
from runtime.errors import ReadinessError

LIMIT = LARGE_BYTES  # above this a tensor is weight, not structure
CPU_WEIGHT_OPS = {"MatMulNBits", "GatherBlockQuantized"}  # convert/cpu_weights.py
INLINE = "moss-inline"  # marks a header whose data lies in the .onnx file itself

_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": {},
}
_PAYLOAD = {4, 5, 6, 7, 9, 10, 11}  # float_data … raw_data … uint64_data
_RAW_DATA, _FLOAT_DATA = 9, 4
_CHUNK = 1 << 20  # elements read at a time


_FLOATS: dict[int, type[np.floating[Any]]] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.DOUBLE: np.float64,
}


def load_structure(path: Path) -> ModelProto:
    """Read a model whose large tensors are headers only."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            slim = bytearray()
            _copy(data, 0, len(data), "model", slim)
            model = ModelProto()
            model.ParseFromString(bytes(slim))
    except OSError as error:
        raise ReadinessError(f"{path}: cannot read the graph ({error.strerror or error})") from error
    except (DecodeError, ValueError, IndexError) as error:
        raise ReadinessError(f"{path}: not an ONNX file, or cut off ({error or 'unexpected end'})") from error
    if not model.HasField("graph") and not model.opset_import:
        raise ReadinessError(f"{path}: not an ONNX file (neither a graph nor an opset_import)")
    refuse_cpu_weights(model, path)
    for tensor in model.graph.initializer:
        _read_small_external(tensor, path)
    return model


def refuse_cpu_weights(model: ModelProto, path: Path) -> None:
    """Refuse a graph of convert-moss export --cpu-weights in one sentence instead of a finding per node."""
    found = {node.op_type for node in model.graph.node} & CPU_WEIGHT_OPS
    if found:
        raise ReadinessError(
            f"{path}: its weights are read by {', '.join(sorted(found))}, operators of ONNX Runtime that CANN lacks; "
            "ATC needs a float32 export: convert-moss export … without --cpu-weights"
        )


def is_outside(tensor: TensorProto) -> bool:
    """Whether the file keeps this tensor's data in another file."""
    return any(entry.key == "location" and entry.value != INLINE for entry in tensor.external_data)


def outside_file(tensor: TensorProto, path: Path) -> Path:
    """The file that an external tensor names, as ATC resolves it: beside the .onnx file."""
    location: str = next(entry.value for entry in tensor.external_data if entry.key == "location")
    return path.parent / location


def external_number(tensor: TensorProto, key: str, default: int) -> int:
    """Read the offset or the length of an external tensor."""
    text = next((entry.value for entry in tensor.external_data if entry.key == key), "") or str(default)
    if not text.isdecimal():
        raise ReadinessError(f"external data of {tensor.name}: {key} {text!r} is not a number of bytes")
    return int(text)


def _read_small_external(tensor: TensorProto, path: Path) -> None:
    """Bring a small external tensor in: shapes, axes and scalars may be stored outside as well.

    The external_data entries stay, so that `is_outside` still holds.
    """
    length = external_number(tensor, "length", LIMIT + 1)
    if not is_outside(tensor) or length > LIMIT:
        return
    file = outside_file(tensor, path)
    if not file.is_file():
        return
    with file.open("rb") as stream:
        stream.seek(external_number(tensor, "offset", 0))
        content = stream.read(length)
    if len(content) == length:
        tensor.raw_data = content
        tensor.data_location = TensorProto.DEFAULT


def float_chunks(tensor: TensorProto, path: Path | None) -> Iterator[npt.NDArray[Any]]:
    """Read the values of a large float tensor piece by piece, from the .onnx file or from the file beside it.

    Yields nothing for other element types, for models in memory, and for files that are missing or short.
    """
    dtype = _FLOATS.get(tensor.data_type)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if dtype is None or path is None or not entries.get("location"):
        return
    file = path if entries["location"] == INLINE else outside_file(tensor, path)
    count = int(np.prod(tensor.dims, dtype=np.int64))
    offset = external_number(tensor, "offset", 0)
    if not file.is_file() or file.stat().st_size < offset + count * np.dtype(dtype).itemsize:
        return
    with file.open("rb") as stream:
        stream.seek(offset)
        while count > 0:
            chunk = np.fromfile(stream, dtype, min(count, _CHUNK))
            count -= chunk.size
            yield chunk


def _copy(data: mmap.mmap, start: int, end: int, kind: str, out: bytearray) -> None:
    """Append the message between `start` and `end` to `out`, large tensors as headers."""
    children = _CHILDREN[kind]
    for number, wire, begin, value, stop in _fields(data, start, end):
        if wire == 2 and number in children and stop - value > LIMIT:
            inner = bytearray()
            child = children[number]
            _copy(data, value, stop, child, inner)
            out += _varint(number << 3 | 2) + _varint(len(inner)) + inner
        elif kind == "tensor" and number in _PAYLOAD:
            if number in (_RAW_DATA, _FLOAT_DATA) and wire == 2:
                out += _header(value, stop - value)
        else:
            out += data[begin:stop]


def _header(offset: int, length: int) -> bytes:
    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    for key, value in (("location", INLINE), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    header: bytes = tensor.SerializeToString()
    return header


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Walk (field number, wire type, start, start of the value, end) over one message."""
    position = start
    while position < end:
        begin = position
        key, position = _read_varint(data, position)
        wire = key & 7
        value = position
        if wire == 0:
            _, position = _read_varint(data, position)
        elif wire == 1:
            position += 8
        elif wire == 5:
            position += 4
        elif wire == 2:
            length, value = _read_varint(data, position)
            position = value + length
        else:
            raise ValueError(f"wire type {wire} at byte {begin}")
        if position > end:
            raise ValueError(f"the field at byte {begin} ends at {position}, after {end}")
        yield key >> 3, wire, begin, value, position


def _read_varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError(f"number too long at byte {position}")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
