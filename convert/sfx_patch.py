"""The lowerings of a target on the parts of MOSS-SoundEffect, each compared with its original before it is kept.

The blocks and heads need none; the codec's decoder is the one of MOSS-TTS-Nano and is lowered as there. A patched file
lies beside the exported one and shares its weights: `codec_stream.Ascend910B4-8.5-origin.onnx`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx

from convert.sfx_verify import compare_files
from op_patches.pipeline import apply_lowerings
from op_patches.targets import Target
from runtime.graphs import derived_axes
from runtime.sfx.manifest import SfxGraph, SfxManifest


def patch_parts(manifest: SfxManifest, target: Target) -> dict[str, Path]:
    """The file that ATC shall read for each graph: the patched one, or the exported one where nothing was lowered."""
    return {name: _patch(manifest, graph, target) for name, graph in manifest.graphs.items()}


def patched_path(manifest: SfxManifest, graph: SfxGraph, target: Target) -> Path:
    """Where the patched form of a graph lies."""
    return manifest.directory / f"{graph.spec.name}.{target.soc}-{target.cann}-{target.precision}.onnx"


def _patch(manifest: SfxManifest, graph: SfxGraph, target: Target) -> Path:
    exported = manifest.directory / graph.file
    model, report = apply_lowerings(onnx.load(str(exported), load_external_data=False), target)
    if not any(rule.count for rule in report.rules):
        return exported
    path = patched_path(manifest, graph, target)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".onnx")
    os.close(handle)
    scratch = Path(name)
    try:
        scratch.write_bytes(model.SerializeToString())
        examples = [{"C": 5, "B": batch, **derived_axes(manifest.codec, n)} for batch, n in ((1, 3), (2, 1))]
        compare_files(graph.spec, exported, scratch, examples, manifest.codec.codebook_size)
        scratch.chmod(0o644)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path
