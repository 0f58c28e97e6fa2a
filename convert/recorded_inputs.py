"""What an export was made from, so that a later run can tell whether it would come out the same."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
# The code that decides what an exported graph is.
_EXPORT_CODE = (
    "convert/checkpoint*.py", "convert/expected_tensors.py", "convert/export.py", "convert/trace*.py",
    "convert/verify.py", "runtime/config.py", "runtime/graphs.py", "runtime/sampling.py", "runtime/spec.py",
    "runtime/weights.py", "runtime/modules/*.py",
)  # fmt: skip
_LOWERING_CODE = ("op_patches/**/*.py", "op_patches/data/*.json")


def export_versions() -> dict[str, str]:
    """Packages and code that an export depends on, for Manifest.versions."""
    packages = {name: version(name) for name in ("torch", "onnx", "onnxruntime", "numpy")}
    return packages | {"python": platform.python_version(), "exporter": _exporting_code()}


@functools.cache  # once per process: what runs is what was imported, not what an editor saves meanwhile
def _exporting_code() -> str:
    return code_hash(_EXPORT_CODE)


@functools.cache
def lowering_code() -> str:
    """A hash of the lowerings and their tables, for PatchedGraph.inputs."""
    return code_hash(_LOWERING_CODE)


def code_hash(patterns: Iterable[str]) -> str:
    """One hash of the files that the patterns find in the project, names included."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in _ROOT.glob(pattern)}):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
