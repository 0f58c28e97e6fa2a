"""Open the two sides of a comparison, run what is not recorded yet, and keep what is needed to test a guess.

A side is a backend with its artifacts, or a directory that holds a recording:

    ort    torch    torch@npu:0    om    om@1    simulated    cann@0    published    path/to/recording

`published` is a published ONNX package in place of artifacts, on its own graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime.accuracy import OpenSide
from runtime.backends.select import BackendOptions, open_backend
from runtime.errors import ParityError
from runtime.manifest import Manifest
from runtime.package_speech import open_published
from runtime.parity_faults import Engine
from runtime.parity_record import JSON_NAME, TRACES, Plan, Recording, load, record
from runtime.prompt import Template
from runtime.synthesizer import open_synthesizer

SIDE_HELP = (
    "ort, ort-shared, torch, torch@npu:0, om, om@1, simulated, cann@0, published (its artifacts are an ONNX package), "
    "or a directory with a recording."
)
PUBLISHED = "published"
_BACKENDS = {
    "ort": BackendOptions(name="ort", device_graphs=True),  # the graphs that ATC compiles
    "ort-shared": BackendOptions(name="ort"),  # as say runs: extend and frame
    "torch": BackendOptions(name="torch"),
    "om": BackendOptions(name="om"),
    "simulated": BackendOptions(name="om", simulate=True),
    "cann": BackendOptions(name="ort", provider="cann"),
    PUBLISHED: BackendOptions(name=PUBLISHED),
}
_HOST_MEMORY = ("ort", "torch")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Side:
    """One side as it was asked for: either a recording, or a backend with its artifacts."""

    spec: str
    recording: Path | None = None
    artifacts: Path | None = None
    options: BackendOptions | None = None

    @property
    def is_recorded(self) -> bool:
        return self.recording is not None


def parse_side(
    spec: str,
    artifacts: Path | None,
    split: bool = False,
    precision: str | None = None,
    threads: int | None = None,
) -> Side:
    """Read `ort`, `torch@npu:0`, …, or the path of a recording; ParityError says what is missing."""
    if (Path(spec) / JSON_NAME).is_file():
        return Side(spec, recording=Path(spec))
    name, _, device = spec.partition("@")
    if name not in _BACKENDS:
        raise ParityError(f"{spec}: no such side and no recording there; expected {SIDE_HELP}")
    if artifacts is None:
        raise ParityError(f"side {spec} needs its artifacts: give --artifacts, or --artifacts-a and --artifacts-b")
    if name == PUBLISHED and (device or split or precision):
        raise ParityError(f"side {spec}: a package runs its own graphs on the CPU: no device, split or precision")
    options = dataclasses.replace(
        _BACKENDS[name], device=device or None, split=split, precision=precision, threads=threads
    )
    return Side(spec, artifacts=artifacts, options=options)


def shared_template(*sides: Side, known: Recording | None = None) -> Template:
    """Whose prompt all sides read: that of the recording, else the package's when one is a package, else PyTorch's."""
    if known is not None:
        return known.template
    published = any(side.options is not None and side.options.name == PUBLISHED for side in sides)
    return Template.ONNX if published else Template.PYTORCH


def run_side(
    side: Side,
    plan: Plan,
    replay_of: Recording | None,
    report: Report,
    traces: tuple[str, ...] = TRACES,
    template: Template = Template.PYTORCH,
) -> tuple[Recording, Engine | None]:
    """The recording of a side, made now unless it exists; the engine is there when the side can be rerun at will."""
    if side.recording is not None:
        return load(side.recording), None
    with open_side(side, report, template) as opened:
        recording = record(opened.synthesizer, opened.backend, plan, replay_of, opened.fused, traces, opened.voices)
    report(f"{side.spec}: {recording.traces['greedy'].num_frames} frames greedy on {recording.identity.backend}")
    assert side.options is not None  # open_side needed them
    host = side.options.name in _HOST_MEMORY and side.options.provider == "cpu"
    return recording, Engine("?", opened.manifest, opened.backend) if host and opened.backend is not None else None


@contextmanager
def open_side(side: Side, report: Report, template: Template = Template.PYTORCH) -> Iterator[OpenSide]:
    """Load a side that is no recording; its sessions are freed at the end."""
    if side.artifacts is None or side.options is None:
        raise ParityError(f"{side.spec} is a recording: it cannot speak; give a backend and its artifacts")
    if side.options.name == PUBLISHED:
        published, voices = open_published(side.artifacts, side.options.threads, template)
        with published:
            yield OpenSide(published.manifest, None, published, voices=voices)
        return
    manifest = Manifest.load(side.artifacts)
    backend = open_backend(side.options.name, manifest, options=side.options, report=report)
    fused = not side.options.split
    with open_synthesizer(manifest, backend, template, fused) as synthesizer:
        yield OpenSide(manifest, backend, synthesizer, fused)


def run_sides(
    a: Side, b: Side, plan: Plan | None, report: Report, traces: tuple[str, ...] = TRACES
) -> tuple[Recording, Recording, Engine | None]:
    """Both recordings. A recorded side says what the other one has to do: its text, seed, frames and codes."""
    recorded = next((s for s in (a, b) if s.recording is not None), None)
    known = load(recorded.recording) if recorded is not None and recorded.recording is not None else None
    asked, template = _agreed_plan(plan, known), shared_template(a, b, known=known)
    if known is not None and b.is_recorded and not a.is_recorded:
        first, engine_a = run_side(a, asked, known, report, traces, template)
        second, engine_b = known, None
    else:
        first, engine_a = run_side(a, asked, None, report, traces, template)
        second, engine_b = run_side(b, asked, first, report, traces, template)
    if engine_a is not None:
        return first, second, dataclasses.replace(engine_a, side="a")
    return first, second, dataclasses.replace(engine_b, side="b") if engine_b is not None else None


def _agreed_plan(plan: Plan | None, known: Recording | None) -> Plan:
    if known is None:
        if plan is None:
            raise ParityError("nothing says what to speak: give --text, or a recording as one side")
        return plan
    if plan is None:
        return known.plan
    if plan.text and plan.text != known.plan.text:
        raise ParityError(f"the recording speaks {known.plan.text!r}, not {plan.text!r}; leave --text out")
    if (plan.voice or plan.stored_voice) and plan.stored_voice != known.plan.stored_voice:
        raise ParityError(f"the recording speaks with the voice {known.plan.voice_text}, not {plan.voice_text}; leave "
                          "--voice out, or give the same clip")  # fmt: skip
    if plan.voice is not None:  # the same clip may lie elsewhere on this machine
        return dataclasses.replace(known.plan, voice=plan.voice)
    return known.plan
