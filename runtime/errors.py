"""Every failure that is expected, as one tree. The command line prints them in one place; anything else is a bug.

    MossError
    ├── CheckpointError          a checkpoint that cannot be used as it is
    ├── SpecMismatchError        a tensor, file or graph that differs from its GraphSpec
    ├── ExportError              torch module -> ONNX failed or did not verify
    ├── PatchError               a lowering that cannot prove that it is equal
    ├── ReadinessError           a graph that ATC would refuse, or a target that does not exist
    ├── AtcError                 ATC is missing or failed
    ├── ManifestError            artifacts that do not match their manifest
    ├── BackendUnavailableError  a backend that cannot run here: what to install or source
    ├── BackendError             a backend call failed: which call, which code
    ├── GenerationError          generation ended without a usable result
    │   └── CapacityError        more rows than the cache or the bucket holds
    ├── ParityError              two runs that cannot be compared
    ├── AudioError               an audio file or signal that cannot be used
    └── TextError                a text that cannot be spoken

Each message says what, expected, got, and what to do.
"""

from __future__ import annotations


class MossError(Exception):
    """Base of every expected failure; its text is one clear message for the user."""


class CheckpointError(MossError):
    """A checkpoint that cannot be used as it is."""


class SpecMismatchError(MossError):
    """A tensor, file or graph that differs from its GraphSpec."""


class ExportError(MossError):
    """Torch module -> ONNX failed or did not verify."""


class PatchError(MossError):
    """A lowering that cannot prove that its replacement is equal."""


class ReadinessError(MossError):
    """A graph that ATC would refuse, or a target that does not exist."""


class AtcError(MossError):
    """ATC is missing or failed."""


class ManifestError(MossError):
    """Artifacts that do not match their manifest."""


class BackendUnavailableError(MossError):
    """A backend that cannot run here; the message says what to install or source."""


class BackendError(MossError):
    """A backend call failed; the message names the call and the code."""


class GenerationError(MossError):
    """Generation ended without a usable result."""


class CapacityError(GenerationError):
    """More rows than the cache or the bucket holds."""


class ParityError(MossError):
    """Two runs that cannot be compared."""


class BenchError(MossError):
    """A measurement cannot be made, or two results cannot be compared."""


class AudioError(MossError):
    """An audio file or signal that cannot be used."""


class TextError(MossError):
    """A text that cannot be spoken."""
