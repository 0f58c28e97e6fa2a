"""One graph of a published package in ONNX Runtime.

Tools change dtypes of inputs and outputs (a float16 conversion, int64 ids), never their names and order: feeds are
cast to what the file takes, floats come back as float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.ort import load_onnxruntime
from runtime.errors import BackendError, SpecMismatchError
from runtime.package_graphs import PublishedNames
from runtime.spec import Array

_DTYPES: dict[str, Any] = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32, "tensor(int64)": np.int64,
}  # fmt: skip


class PackageSession:
    """Runs a graph by its published names; a context manager. Idle threads spin, as stock, only when asked to."""

    def __init__(self, path: Path, threads: int | None = None, spinning: bool = False) -> None:
        ort = load_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
        # 8-bit weights are products in float32, as the file says; the default rounds activations to 8 bit too
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        try:
            self._session: Any = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises classes of its C extension that share no base but this
            raise BackendError(f"onnxruntime cannot load {path}: {error}") from error
        self.path = path
        self.input_shapes: dict[str, tuple[int | str | None, ...]] = {}
        self._input_dtypes: dict[str, Any] = {}
        for node in self._session.get_inputs():
            if node.type not in _DTYPES:
                raise SpecMismatchError(f"{path}: input {node.name} is {node.type}; expected one of {list(_DTYPES)}")
            self.input_shapes[node.name] = tuple(node.shape)
            self._input_dtypes[node.name] = _DTYPES[node.type]
        self.output_shapes = {node.name: tuple(node.shape) for node in self._session.get_outputs()}

    def check_names(self, names: PublishedNames) -> None:
        """SpecMismatchError when the interface is not the published one."""
        for kind, expected, got in (
            ("inputs", names.inputs, tuple(self.input_shapes)),
            ("outputs", names.outputs, tuple(self.output_shapes)),
        ):
            if expected != got:
                missing = [n for n in expected if n not in got] or [n for n in got if n not in expected]
                raise SpecMismatchError(
                    f"{self.path}: its {kind} are not those of the published graph: {', '.join(missing[:4]) or 'order'}"
                    f"; expected {len(expected)} {kind}, got {len(got)}"
                )

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Every output by name."""
        if self._session is None:
            raise BackendError(f"{self.path.name}: the session is closed; open it again")
        missing = [name for name in self._input_dtypes if name not in feeds]
        if missing:
            raise SpecMismatchError(f"{self.path.name}: inputs without a value: {', '.join(missing)}")
        cast = {n: np.ascontiguousarray(feeds[n], dtype=dtype) for n, dtype in self._input_dtypes.items()}
        try:
            values = self._session.run(list(self.output_shapes), cast)
        except Exception as error:  # as above: no common base class
            raise BackendError(f"onnxruntime failed to run {self.path.name}: {error}") from error
        wide = [v.astype(np.float32) if v.dtype == np.float16 else v for v in values]
        return dict(zip(self.output_shapes, wide, strict=True))

    def close(self) -> None:
        self._session = None

    def __enter__(self) -> PackageSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
