"""Open exported parts: ONNX Runtime on the CPU, or compiled .om files through pyACL.

With .om files the cache lives on the host and travels with every launch (144 MiB per step at full size and capacity
1024); a cache that stays on the device, as MOSS-TTS-Nano has it, is not built for this model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runtime.backends.base import Session
from runtime.codec import Codec
from runtime.errors import BackendUnavailableError
from runtime.graphs import derived_axes
from runtime.sfx.manifest import EMBEDDINGS_NAME, SfxManifest
from runtime.sfx.prompt import PromptEncoder
from runtime.sfx.session_model import SessionRowModel
from runtime.sfx.sound_effects import SoundEffects
from runtime.sfx.weights import Embeddings
from runtime.spec import GraphSpec
from runtime.weights import map_weights

BACKENDS = ("ort", "om")


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens a graph by name; `name` is what the stats print."""

    name: str
    open: Callable[[str], Session]


def open_artifacts(
    directory: Path,
    backend: str = "ort",
    device: int = 0,
    simulate: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> SoundEffects:
    """Open what convert-moss sfx-export wrote (and, for om, what its ATC script compiled)."""
    if backend not in BACKENDS:
        raise BackendUnavailableError(f"backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    manifest = SfxManifest.load(directory)
    config, plan = manifest.config, manifest.plan
    tables = map_weights(directory / EMBEDDINGS_NAME, manifest.embeddings)
    embeddings = Embeddings(tables["text"], [tables[f"codes_{i}"] for i in range(config.n_vq)])
    with ExitStack() as opened:  # what is open already is closed again when a later part cannot be opened
        opener = _om(manifest, device, simulate, report, opened) if backend == "om" else _ort(manifest)

        def session(name: str) -> Session:
            found = opener.open(name)
            opened.callback(found.close)
            return found

        blocks = [session(block.name) for block in plan.blocks(config)]
        heads = session("inside_heads"), session("text_head")
        model = SessionRowModel(config, plan, embeddings, blocks, *heads, f"{opener.name} {plan.dtype}")
        codec = Codec(manifest.codec, encode=(), stream=(session("codec_stream"),))
        encoder = PromptEncoder(directory, config)
        return SoundEffects(encoder, model, codec, opener.name, opened.pop_all().close)


def om_path(directory: Path, soc: str, name: str) -> Path:
    """Where the ATC script puts a compiled graph."""
    return directory / "om" / f"{soc}-origin" / f"{name}.om"


def bound_spec(manifest: SfxManifest, name: str) -> GraphSpec:
    """The interface of a compiled graph: every axis at the number of the plan."""
    spec = manifest.graph(name).spec
    axes = {**manifest.plan.axes(), **derived_axes(manifest.codec, manifest.plan.codec_frames)}
    return spec.bind(**{axis: axes[axis] for axis in spec.dynamic_axes()})


def _ort(manifest: SfxManifest) -> _Opener:
    from runtime.backends.ort import OrtBackend

    backend = OrtBackend()

    def open_graph(name: str) -> Session:
        graph = manifest.graph(name)
        return backend.open(graph.spec, manifest.directory / graph.file)

    return _Opener(backend.name, open_graph)


def _om(
    manifest: SfxManifest, device: int, simulate: bool, report: Callable[[str], None], opened: ExitStack
) -> _Opener:
    from runtime.backends.om import OmBackend

    if simulate:
        from runtime.backends.fake_om import is_fake_om, read_fake_om
        from runtime.backends.simulator import ensure_installed

        files = sorted(manifest.directory.glob("om/*/*.om"))
        compiled = [read_fake_om(file) for file in files if is_fake_om(file)]
        config = ensure_installed([(om.soc_version, om.cann_version) for om in compiled])
        report(f"simulated: {config.soc} with CANN {config.cann}, on the CPU; nothing here is a device result")
    backend = OmBackend(device)
    opened.callback(backend.close)
    soc = backend.device.soc

    def open_graph(name: str) -> Session:
        path = om_path(manifest.directory, soc, name)
        if not path.is_file():
            raise BackendUnavailableError(
                f"{path} does not exist: {name} is not compiled for {soc}; run convert-moss sfx-plan "
                f"{manifest.directory} --target soc={soc} --script build_sfx.sh, then the script"
            )
        return backend.open(bound_spec(manifest, name), path)

    return _Opener(backend.name, open_graph)
