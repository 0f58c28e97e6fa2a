"""What `say` speaks with: artifacts of ours on a backend, or a published package on its own graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.backends.select import BackendOptions
from runtime.commands.backend_options import open_chosen

if TYPE_CHECKING:
    from runtime.manifest import Manifest
    from runtime.synthesizer import Synthesizer
    from runtime.voices import VoiceStore


@dataclass(frozen=True, slots=True)
class Speaker:
    """A synthesizer, the voices that can be named, and what `--stats` prints after a run."""

    synthesizer: Synthesizer
    voices: VoiceStore
    backend: Any  # runtime.backends.base.Backend; None as published

    def run_lines(self) -> list[str]:
        from runtime.assembly import describe_run

        if self.backend is None:
            return [f"every graph: {self.synthesizer.frame_model.backend_name}"]
        return describe_run(self.synthesizer.frame_model, self.backend, self.synthesizer.codec)


def open_speaker(artifacts: Path, backend: BackendOptions, as_published: bool, template: str | None) -> Speaker:
    """Open everything that speaking needs; the caller closes the synthesizer."""
    from runtime.errors import BackendUnavailableError, ManifestError
    from runtime.manifest import MANIFEST_NAME, Manifest
    from runtime.onnx_package import is_package
    from runtime.prompt import Template
    from runtime.synthesizer import open_synthesizer
    from runtime.voices import VoiceStore

    if as_published:
        from runtime.package_speech import open_published

        if backend.name != "ort" or backend.provider != "cpu" or backend.split:
            raise BackendUnavailableError("--as-published runs the package's own graphs: --backend ort on the CPU only")
        synthesizer, voices = open_published(artifacts, backend.threads, Template(template or "onnx"))
        return Speaker(synthesizer, voices, None)
    if not (artifacts / MANIFEST_NAME).is_file() and is_package(artifacts):
        raise ManifestError(
            f"{artifacts} is a published ONNX package: give --as-published to run its own graphs; for "
            "artifacts make a checkpoint of it (convert-moss import-onnx, then convert-moss build)"
        )
    manifest = Manifest.load(artifacts)
    opened = open_chosen(manifest, backend)
    synthesizer = open_synthesizer(manifest, opened, Template(template or "pytorch"), fused=not backend.split)
    return Speaker(synthesizer, VoiceStore(), opened)


def with_recorded_defaults(speak: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
    """The speak options, where an option that was not given takes the default that the artifacts record for it."""
    recorded = manifest.source.get("defaults") or {}
    context = click.get_current_context()
    given = click.core.ParameterSource.DEFAULT
    chosen = {name: value for name, value in recorded.items() if context.get_parameter_source(name) == given}
    if chosen.get("greedy") and context.get_parameter_source("top_k") != given:
        del chosen["greedy"]  # --top-k says how to sample
    return {**speak, **{name: value for name, value in chosen.items() if name in speak}}
