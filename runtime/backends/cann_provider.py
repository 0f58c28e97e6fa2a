"""ONNX Runtime with the CANN execution provider: for parity and measurements, never silent about the CPU.

The provider takes what its list of operators knows and leaves the rest to the CPU (ATC_AND_ACL.md E: no
LayerNormalization, Gelu, Trilu, Einsum). Which nodes ran where is read from ONNX Runtime's own profile of the first
run of each session. Unset, the precision is float16, so it is always given; the provider's cache of compiled models in
the working directory is switched off, because it does not notice changed options. Every new input shape compiles anew.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.backends.ort import OrtBackend, OrtSession, load_onnxruntime
from runtime.errors import BackendError, BackendUnavailableError
from runtime.spec import Array, GraphSpec

LOG = logging.getLogger(__name__)
CANN_PROVIDER, CPU_PROVIDER = "CANNExecutionProvider", "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the nodes of one graph ran; `on_cpu` counts by operator what was left to the CPU."""

    graph: str
    by_provider: dict[str, int]
    on_cpu: dict[str, int]

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.by_provider.items()))
        left = ", ".join(f"{op} {count}" for op, count in sorted(self.on_cpu.items()))
        return f"{self.graph}: nodes run by {counts or 'nobody'}" + (f"; left to the CPU: {left}" if left else "")


class CannBackend(OrtBackend):
    """OrtBackend on an NPU; `placements` fills up as sessions run for the first time."""

    def __init__(self, device_id: int = 0, threads: int | None = None) -> None:
        available = load_onnxruntime().get_available_providers()
        if CANN_PROVIDER not in available:
            raise BackendUnavailableError(
                f"this onnxruntime has no {CANN_PROVIDER} (it has {', '.join(available)}). Run: "
                "pip uninstall onnxruntime; pip install onnxruntime-cann 'numpy<2' "
                "(CANN up to 8.2 needs NumPy 1), and source set_env.sh of CANN"
            )
        provider = (
            CANN_PROVIDER,
            {
                "device_id": str(device_id),
                "precision_mode": "must_keep_origin_dtype",
                "enable_cann_graph": "1",
                "dump_om_model": "0",
            },
        )
        super().__init__(threads, (provider, CPU_PROVIDER))
        self.name = "ort cann"
        self.placements: dict[str, Placement] = {}

    def open(self, spec: GraphSpec, path: Path) -> OrtSession:
        return ProfiledSession(spec, path, self)

    def open_session(self, path: Path, options: Any) -> Any:
        """An onnxruntime session; refused when the provider itself was dropped while it was made."""
        try:
            session = self._ort.InferenceSession(str(path), options, providers=self.providers)
        except Exception as error:  # onnxruntime raises classes of its C extension that share no base but this
            raise BackendError(f"onnxruntime cannot load {path}: {error}") from error
        wanted = self.providers[0][0] if isinstance(self.providers[0], tuple) else self.providers[0]
        if wanted not in session.get_providers():
            raise BackendError(
                f"{path.name}: onnxruntime dropped {wanted} and kept {', '.join(session.get_providers())}; "
                "set_env.sh of CANN was not sourced, or the device is not visible"
            )
        return session

    def new_options(self) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        return options


class ProfiledSession(OrtSession):
    """A session that profiles its first run, to learn which provider ran which node."""

    def __init__(self, spec: GraphSpec, path: Path, backend: CannBackend) -> None:
        from runtime.backends.ort import check_interface

        self._backend = backend
        self._scratch = tempfile.TemporaryDirectory(prefix="ort-profile-")
        options = backend.new_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._scratch.name) / spec.name)
        session = backend.open_session(path, options)
        check_interface(spec, session, path)
        super().__init__(spec, session, path)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        outputs = super().run(feeds)
        if self.spec.name not in self._backend.placements:
            profile = Path(self._session.end_profiling())
            placement = read_placement(self.spec.name, profile)
            self._backend.placements[self.spec.name] = placement
            (LOG.warning if placement.on_cpu else LOG.info)("%s", placement)
        return outputs

    def close(self) -> None:
        super().close()
        self._scratch.cleanup()


def read_placement(graph: str, profile: Path) -> Placement:
    """Count the nodes of an ONNX Runtime profile by provider; BackendError when it names none."""
    events = json.loads(profile.read_text(encoding="utf-8"))
    ran = {
        event["name"]: (event["args"]["provider"], event["args"]["op_name"])
        for event in events
        if event.get("cat") == "Node" and event.get("args", {}).get("provider")
    }
    if not ran:
        raise BackendError(f"{graph}: the profile of onnxruntime names no node; where it ran is not known")
    return Placement(
        graph,
        dict(Counter(provider for provider, _ in ran.values())),
        dict(Counter(op for provider, op in ran.values() if provider == CPU_PROVIDER)),
    )
