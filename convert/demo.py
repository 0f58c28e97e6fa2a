"""make demo: checkpoint -> ONNX graphs -> speech on ONNX Runtime and on PyTorch -> one page that compares them.

Without a model it makes up a checkpoint of the full published size; the page, the terminal and the manifest say so.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import onnx

from convert.export import export_artifacts
from convert.fixture import write_fixture
from op_patches.pipeline import apply_lowerings
from op_patches.readiness import check_model, summary_line
from op_patches.targets import Target
from runtime import page
from runtime.audio_writer import write_audio
from runtime.backends.select import open_backend
from runtime.compare import Difference, Tolerance, compare_tensors
from runtime.errors import GenerationError
from runtime.manifest import Manifest, write_atomically
from runtime.synthesizer import Request, Speech, open_synthesizer

DEMO_BACKENDS = ("ort", "torch")
DEMO_TARGET = "cann=8.5,soc=Ascend910B4,precision=origin"
TEXT = "The quick brown fox jumps over the lazy dog, and then it takes a short rest in the sun."
SEED = 0
# Both backends decode the same codes through the codec in float32; see convert/verify.py for the same bound.
WAVEFORM = Tolerance(2e-5, 5e-5, "float32 through the whole codec")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo made."""

    manifest: Manifest
    voice: Path
    speeches: dict[str, Speech]  # backend -> what it said
    files: dict[str, Path]
    codes: Difference
    waveform: Difference
    readiness: tuple[str, ...]  # one line per graph
    seconds: float

    @property
    def agree(self) -> bool:
        return self.codes.passed and self.waveform.passed


def run_demo(
    model: str | None, codec: str | None, voice: Path, text: str, directory: Path, checkpoints: Path, report: Report
) -> Demo:
    """The whole path; `model` and `codec` are directories or hub ids, or both None for made-up weights."""
    start = time.perf_counter()
    if model is None or codec is None:
        report("no MODEL and CODEC given: making up a checkpoint of the full published size (it cannot speak)")
        write_fixture(checkpoints, size="full", seed=SEED)
        model, codec = str(checkpoints / "model"), str(checkpoints / "codec")
    report(f"exporting {model} and {codec} to {directory}")
    manifest = export_artifacts(model, codec, directory, report=report)
    speeches: dict[str, Speech] = {}
    files: dict[str, Path] = {}
    for name in DEMO_BACKENDS:
        speeches[name] = _speak(manifest, name, voice, text)
        speech, files[name] = speeches[name], directory / f"demo_{name}.wav"
        written = write_audio(files[name], speech.waveform, speech.sample_rate_hz)
        report(
            f"{files[name]}: {written.seconds:.2f} s from {speech.generation.num_frames} frames "
            f"on {speech.backend_name}, {speech.generation.frames_per_second:.1f} frames/s"
        )
    codes, waveform = _compare(speeches)
    demo = Demo(
        manifest, voice, speeches, files, codes, waveform, _readiness(manifest, report), time.perf_counter() - start
    )
    write_atomically(directory / "demo.html", demo_page(demo))
    return demo


def _speak(manifest: Manifest, backend_name: str, voice: Path, text: str) -> Speech:
    with open_synthesizer(manifest, open_backend(backend_name, manifest)) as synthesizer:
        _, codes = synthesizer.read_voice(voice)
        return synthesizer.say(Request(text, codes, seed=SEED))


def _compare(speeches: dict[str, Speech]) -> tuple[Difference, Difference]:
    first, second = (speeches[name] for name in DEMO_BACKENDS)
    codes = compare_tensors("codes", first.generation.codes, second.generation.codes, WAVEFORM)
    return codes, compare_tensors("waveform", first.waveform, second.waveform, WAVEFORM)


def _readiness(manifest: Manifest, report: Report) -> tuple[str, ...]:
    """What ATC would say about each exported graph after the lowerings for DEMO_TARGET."""
    target = Target.parse(DEMO_TARGET)
    lines = []
    for graph in manifest.graphs.values():
        model = onnx.load(manifest.path(graph.file), load_external_data=False)
        patched, _ = apply_lowerings(model, target)
        lines.append(summary_line(check_model(patched, target)))
        report(lines[-1])
    return tuple(lines)


def demo_page(demo: Demo) -> str:
    """The page: verdict, what was made and where it lies, both waveforms to see and hear, readiness."""
    first, second = (demo.speeches[name] for name in DEMO_BACKENDS)
    frames = first.generation.num_frames
    if demo.agree:
        text = f"ONNX Runtime and PyTorch agree in all {frames} frames; waveform: {demo.waveform.reason}."
    else:
        text = f"The backends differ. Codes: {demo.codes.reason}. Waveform: {demo.waveform.reason}."
    notice = [page.verdict("warn", f"Not a voice: {demo.manifest.notice}.")] if demo.manifest.notice else []
    rows = [
        [s.backend_name, s.generation.prompt_rows, s.generation.num_frames, s.generation.finish_reason, s.seconds,
         s.generation.frames_per_second, s.rtf]
        for s in (first, second)
    ]  # fmt: skip
    heard = [
        f"<p>{escape(name)}: <code>{escape(str(demo.files[name]))}</code></p>"
        + page.waveform_plot(s.waveform[0], s.seconds, color)
        + _player(demo.files[name])
        for (name, s), color in zip(demo.speeches.items(), ("var(--a)", "var(--b)"), strict=True)
    ]
    graphs = [
        [name, g.file, g.num_nodes, max(g.max_abs_difference.values())] for name, g in demo.manifest.graphs.items()
    ]
    return page.page(
        f"MOSS-TTS-Nano demo: {demo.manifest.name}",
        page.verdict("good" if demo.agree else "bad", text),
        *notice,
        page.section(
            "What ran",
            page.table(["backend", "prompt rows", "frames", "ended by", "audio s", "frames/s", "RTF"], rows),
            page.paragraph("The CPU ran everything on this page. No Ascend device took part."),
        ),
        page.section("What was said", *heard),
        page.section(
            f"Graphs in {demo.manifest.directory}",
            page.table(["graph", "file", "nodes", "largest difference torch - ONNX"], graphs),
        ),
        page.section(f"Readiness for {DEMO_TARGET}", "<pre>" + escape("\n".join(demo.readiness)) + "</pre>"),
        page.paragraph(f"Made in {demo.seconds:.0f} s with {demo.manifest.versions}."),
    )


def _player(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<audio controls src='data:audio/wav;base64,{data}'></audio>"


def require_agreement(demo: Demo) -> None:
    """Fail when the backends differ: a demo that disagrees must not look like one that worked."""
    if not demo.agree:
        raise GenerationError(
            f"ONNX Runtime and PyTorch differ. Codes: {demo.codes.reason}. Waveform: {demo.waveform.reason}. "
            f"See {demo.manifest.directory / 'demo.html'}"
        )


def speech_level(speech: Speech) -> tuple[float, float]:
    """RMS and peak of the waveform."""
    return float(np.sqrt(np.mean(np.square(speech.waveform)))), float(np.abs(speech.waveform).max())
