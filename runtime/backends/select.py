"""The one place that turns `--backend NAME` into a backend."""

from __future__ import annotations

from runtime.backends.base import Backend
from runtime.backends.ort import OrtBackend
from runtime.backends.torch import TorchBackend
from runtime.errors import BackendUnavailableError
from runtime.manifest import Manifest

BACKEND_NAMES = ("ort", "torch")


def open_backend(name: str, manifest: Manifest, threads: int | None = None) -> Backend:
    """The backend called `name`; BackendUnavailableError says what it lacks here."""
    if name == "ort":
        return OrtBackend(threads)
    if name == "torch":
        return TorchBackend(manifest, "cpu", threads)
    raise BackendUnavailableError(f"no backend {name}; backends: {', '.join(BACKEND_NAMES)}")
