"""A model that the simulator has loaded: the graph of a fake .om, run by ONNX Runtime on the CPU, one thread."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runtime.backends.acl_api import release_number
from runtime.backends.fake_om import FakeOm, OmTensor, is_fake_om, read_fake_om
from runtime.backends.simulator_memory import ALIGNMENT, AclMisuse, Span
from runtime.errors import BackendError
from runtime.spec import Array


class Failure(Exception):  # noqa: N818  becomes a return code, never leaves the simulator
    """A call that a device answers with an error code."""

    def __init__(self, code: int, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)


class SimulatedModel:
    """One loaded .om; checks buffers as the graph engine does and executes on NumPy arrays."""

    def __init__(self, path: Path, soc: str, cann: str) -> None:
        self.om = _read(path, soc, cann)
        self._session = _open_session(self.om)

    @property
    def device_bytes(self) -> int:
        return self.om.weight_bytes + self.om.work_bytes

    def tensors(self, side: str) -> tuple[OmTensor, ...]:
        return self.om.inputs if side == "input" else self.om.outputs

    def check_buffers(self, side: str, buffers: list[tuple[int, int]]) -> None:
        """Count, size and alignment, with the codes and texts of the graph engine (C.5, C.7)."""
        tensors = self.tensors(side)
        title = side.capitalize()
        if len(buffers) != len(tensors):
            code = 100017 if side == "input" else 100018
            raise Failure(code, f"the model has {len(tensors)} {side}s, the dataset {len(buffers)} buffers")
        for tensor, (pointer, size) in zip(tensors, buffers, strict=True):
            need = num_bytes(tensor)
            if not pointer:
                raise Failure(145007, f"{title} tensor {tensor.name} has no address")
            if size + ALIGNMENT < need:
                sizes = f"user add align:{size + ALIGNMENT} < op_size:{need}"
                raise Failure(145006, f"E13025: {title} tensor is invalid. {tensor.name}: {sizes}")
            if pointer % ALIGNMENT:
                raise Failure(107008, f"{title} tensor {tensor.name} at {pointer:#x} is not {ALIGNMENT}-byte aligned")

    def execute(self, inputs: list[Span], outputs: list[Span]) -> None:
        """Run once: read the input bytes, write the output bytes."""
        feeds = {}
        for tensor, span in zip(self.om.inputs, inputs, strict=True):
            if not span.written().all():
                missing = int((~span.written()).sum())
                raise AclMisuse(f"input {tensor.name} holds {missing} bytes that were never written")
            feeds[tensor.onnx_name] = span.view()[0].view(tensor.dtype).reshape(tensor.shape)
        results = self._run(feeds)
        for tensor, span in zip(self.om.outputs, outputs, strict=True):
            value = np.ascontiguousarray(results[tensor.onnx_name])
            if value.shape != tensor.shape or value.dtype != np.dtype(tensor.dtype):
                raise AclMisuse(
                    f"{tensor.name}: the fake .om says {tensor}, ONNX Runtime gave {value.dtype}{value.shape}"
                )
            span.view()[0, : value.nbytes] = value.view(np.uint8).reshape(-1)
            span.written()[0, : value.nbytes] = True

    def _run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, RuntimeException

        names = [tensor.onnx_name for tensor in self.om.outputs]
        try:
            return dict(zip(names, self._session.run(names, feeds), strict=True))  # type: ignore[attr-defined]  # untyped package
        except (InvalidArgument, RuntimeException) as error:  # such as a Gather index out of bounds
            raise Failure(507011, f"model execute failed: {error}") from error


def num_bytes(tensor: OmTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize


def describe(path: Path) -> FakeOm:
    """Read a file without loading it, as acl.mdl.query_size does."""
    if not path.is_file():
        raise Failure(100003, f"the file {path} does not exist")
    if not is_fake_om(path):
        raise Failure(100012, f"{path} is no .om that the simulator can run: it runs what the fake atc wrote")
    try:
        return read_fake_om(path)
    except BackendError as error:
        raise Failure(100012, str(error)) from error


def _read(path: Path, soc: str, cann: str) -> FakeOm:
    """Refuse what a device refuses: missing, damaged, for another SoC, or from a newer CANN (H1, B.2)."""
    om = describe(path)
    try:
        om.check_weights()
    except BackendError as error:
        raise Failure(100012, str(error)) from error
    if om.soc_version != soc:
        raise Failure(
            507008,
            f"EE1001: The argument is invalid. ModelCheckCompatibility failed, supported socVersion={soc}, "
            f"but the model socVersion={om.soc_version}",
        )
    if release_number(om.cann_version) > release_number(cann):
        raise Failure(100013, f"the model was built by CANN {om.cann_version}, this runtime is CANN {cann}")
    return om


def _open_session(om: FakeOm) -> object:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    # External data is looked up relative to this directory: a model given as bytes has no directory of its own.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", om.weights_directory)
    return ort.InferenceSession(om.graph_onnx, options, providers=["CPUExecutionProvider"])
