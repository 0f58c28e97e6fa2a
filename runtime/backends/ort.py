"""Graphs on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.large_pages import on_large_pages
from runtime.errors import BackendError, BackendUnavailableError, SpecMismatchError
from runtime.spec import Array, GraphSpec

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}

SPIN_SINCE = (1, 26)  # the first onnxruntime that reads spin_duration_us
SPIN_US = 20  # docs/performance.md has the sweep


def load_onnxruntime() -> Any:
    """The onnxruntime module, or a message that says what to install."""
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailableError(
            "backend ort needs onnxruntime, which is not installed here; run: pip install 'moss-tts-nano-ascend[ort]'"
        ) from error
    return onnxruntime


class OrtBackend:
    """Opens .onnx files. `threads` is the size of each session's pool; None leaves it to ONNX Runtime.

    The sessions of one model run in turn, and a pool that spins without end takes the core from the one that works
    (BASELINES.md section 1: 9.5 against 16.2 frames/s). A pool that never spins is woken for every node. So idle
    threads spin for SPIN_US, which covers the pauses inside a run.
    """

    def __init__(self, threads: int | None = None, providers: Sequence[Any] = ("CPUExecutionProvider",)) -> None:
        self._ort = load_onnxruntime()
        self.threads, self.providers = threads, list(providers)
        self.name = "ort"

    def open(self, spec: GraphSpec, path: Path) -> OrtSession:
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        for entry in spin_entries(self._ort.__version__).items():
            options.add_session_config_entry(*entry)
        try:
            with on_large_pages():
                session = self._ort.InferenceSession(str(path), options, providers=self.providers)
        except Exception as error:  # onnxruntime raises classes of its C extension that share no base but this
            raise BackendError(f"onnxruntime cannot load {path}: {error}") from error
        check_interface(spec, session, path)
        return OrtSession(spec, session, path)


def spin_entries(version: str) -> dict[str, str]:
    """Session options for idle threads; an onnxruntime that cannot end a spin early does not spin at all."""
    if tuple(int(part) for part in version.split(".")[:2]) < SPIN_SINCE:
        return {"session.intra_op.allow_spinning": "0"}
    return {"session.intra_op.allow_spinning": "1", "session.intra_op.spin_duration_us": str(SPIN_US)}


def check_interface(spec: GraphSpec, session: Any, path: Path) -> None:
    """Compare what the file says about itself with the spec."""
    for kind, expected, found in (
        ("input", spec.inputs, session.get_inputs()),
        ("output", spec.outputs, session.get_outputs()),
    ):
        names = [t.name for t in expected]
        if names != [f.name for f in found]:
            raise SpecMismatchError(f"{path}: expected {kind}s {names}, got {[f.name for f in found]}; export again")
        for tensor, node in zip(expected, found, strict=True):
            dtype = _DTYPES.get(node.type, node.type)
            fits = len(node.shape) == len(tensor.shape) and all(
                isinstance(want, str) or isinstance(got, str) or want == got  # either may leave an axis open
                for want, got in zip(tensor.shape, node.shape, strict=True)
            )
            if dtype != tensor.dtype or not fits:
                raise SpecMismatchError(
                    f"{path}: {tensor.name}: expected {tensor}, got {dtype}{node.shape}; export again"
                )


class OrtSession:
    """One graph in ONNX Runtime; inputs are taken where they lie, outputs are new arrays."""

    def __init__(self, spec: GraphSpec, session: Any, path: Path) -> None:
        self.spec = spec
        self._session: Any = session
        self._path = path
        self._output_names = [t.name for t in spec.outputs]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self._session is None:
            raise BackendError(f"{self.spec.name}: the session is closed; open it again")
        self.spec.check_feeds(feeds)
        contiguous = {name: np.ascontiguousarray(value) for name, value in feeds.items()}
        try:
            values = self._session.run(self._output_names, contiguous)
        except Exception as error:  # as in open: no common base class
            raise BackendError(f"onnxruntime failed to run {self._path.name}: {error}") from error
        return dict(zip(self._output_names, values, strict=True))

    def close(self) -> None:
        self._session = None

    def __enter__(self) -> OrtSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
