"""What one side of a comparison did: every stage from token ids to the waveform, and who did it.

Three ways of generating are recorded: `greedy` and `seeded` run freely on the side's own prompt rows; `replay` feeds
given rows and codes (teacher forcing), so that two sides can be compared frame by frame after they have parted.
A recording is made on one machine and compared on another: <dir>/recording.npz and <dir>/recording.json.
"""

from __future__ import annotations

import dataclasses
import io
import json
import platform
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Backend
from runtime.errors import MossError, ParityError
from runtime.frame_model import CacheReader, Frame, FrameModel
from runtime.manifest import FLOAT32, Manifest, write_atomically
from runtime.parity_latents import codec_latents
from runtime.prompt import Template
from runtime.sampling import SamplingParams, draw_uniforms
from runtime.synthesizer import Request, Synthesizer
from runtime.voices import VoiceStore, codec_id, find_voice
from runtime.weights import WEIGHTS_NAME

FORMAT_VERSION = 1
ARRAYS_NAME, JSON_NAME = "recording.npz", "recording.json"
TRACES = ("greedy", "seeded", "replay")
GREEDY = SamplingParams.greedy()
DEFAULT_FRAMES = 48  # about 4 s of audio

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Plan:
    """What both sides are asked to do."""

    text: str
    voice: Path | None = None  # a clip, which each side encodes itself
    seed: int = 0
    frames: int = DEFAULT_FRAMES
    sampling: SamplingParams = field(default_factory=SamplingParams)  # of the seeded run
    stored_voice: str | None = None  # a name in the voice store instead of a clip: the same codes on both sides

    @property
    def voice_text(self) -> str:
        """For people."""
        return self.stored_voice or str(self.voice or "none")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The decisions of one run, the one that ended it included. What a model did not give is None."""

    codes: Ints  # [F, n_vq]
    go_on: npt.NDArray[np.bool_]  # [F]
    hidden: Floats | None  # [F, E]
    slot_logits: Floats | None  # [F, 2]
    code_logits: Floats | None  # [F, n_vq, V]

    @property
    def num_frames(self) -> int:
        """Frames that would be heard."""
        return int(self.go_on.sum())

    @staticmethod
    def of(frames: list[Frame]) -> Trace:
        def stacked(name: str) -> Any:
            values = [getattr(f, name) for f in frames]
            return None if not values or any(v is None for v in values) else np.stack(values)

        codes = np.stack([f.codes for f in frames]).astype(np.int32) if frames else np.zeros((0, 0), np.int32)
        go_on = np.array([f.go_on for f in frames], bool)
        return Trace(codes, go_on, stacked("hidden"), stacked("slot_logits"), stacked("code_logits"))


@dataclass(frozen=True, slots=True)
class Identity:
    """Who ran what: enough to find the same files and programs again."""

    backend: str
    artifacts: str  # name in the manifest
    directory: str
    made_up: bool
    graphs: dict[str, str]  # graph -> sha256 of the file that ran: .om where there is one
    weights: str  # sha256
    tokenizer: str
    template: str
    capacity: int
    fused: bool
    simulated: bool
    versions: dict[str, str]
    cpu_weights: str = FLOAT32  # as in the manifest; recordings before 2026-12 have no such field


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Everything one side gave. `replay_rows` and `replay_codes` are what its replay was fed."""

    identity: Identity
    plan: Plan
    sample_rate_hz: int
    token_ids: Ints
    rows: Ints
    traces: dict[str, Trace]
    replay_rows: Ints
    replay_codes: Ints
    reference_codes: Ints | None = None
    cache: Floats | None = None  # after the prefill of the replay
    latents: Floats | None = None  # of replay_codes
    waveform: Floats | None = None  # of replay_codes
    failures: dict[str, str] = field(default_factory=dict)  # stage -> message
    notes: tuple[str, ...] = ()

    @property
    def template(self) -> Template:
        """Whose prompt was built."""
        return Template(self.identity.template)


def record(
    synthesizer: Synthesizer,
    backend: Backend | None,
    plan: Plan,
    replay_of: Recording | None = None,
    fused: bool = True,
    traces: tuple[str, ...] = TRACES,
    voices: VoiceStore | None = None,
) -> Recording:
    """Run one side; `backend` is None for a published package, which runs its own graphs.

    With `replay_of` the replay is fed what that recording was fed. `voices` are looked up for a stored voice.
    """
    reference = _reference(synthesizer, plan, replay_of, voices or VoiceStore())
    rows = synthesizer.rows(Request(plan.text, reference))
    model = synthesizer.frame_model
    if replay_of is not None and replay_of.rows.shape[1:] != rows.shape[1:]:
        raise ParityError(
            f"the sides are different models: rows of {rows.shape[1]} numbers against {replay_of.rows.shape[1]}"
        )
    done: dict[str, Trace] = {}
    cache: list[Floats] = []
    notes: list[str] = []
    if replay_of is not None:  # first, so that no row of an earlier run lies in the cache
        fed_rows, fed = replay_of.replay_rows, replay_of.replay_codes
        _check_codes(fed, synthesizer.manifest)
        done["replay"] = run_frames(model, fed_rows, GREEDY, plan.seed, len(fed), fed, cache=cache)
    done["greedy"] = run_frames(model, rows, GREEDY, plan.seed, plan.frames)
    if "seeded" in traces:
        done["seeded"] = run_frames(model, rows, plan.sampling, plan.seed, plan.frames)
    if replay_of is None:
        fed_rows, fed = rows, done["greedy"].codes[done["greedy"].go_on]
        if not len(fed):
            notes.append("the greedy run ended before its first frame; the replay goes on behind the end")
            fed = run_frames(model, rows, GREEDY, plan.seed, plan.frames, past_end=True).codes
        _check_codes(fed, synthesizer.manifest)
        done["replay"] = run_frames(model, fed_rows, GREEDY, plan.seed, len(fed), fed, cache=cache)
    failures: dict[str, str] = {}
    waveform = latents = None
    try:
        waveform = synthesizer.codec.decode(fed)
        latents = codec_latents(synthesizer.manifest, backend, fed)
    except MossError as error:
        failures["waveform"] = str(error)
    return Recording(
        identity=identify(synthesizer, backend, fused),
        plan=plan,
        sample_rate_hz=synthesizer.manifest.codec.sample_rate_hz,
        token_ids=np.asarray(synthesizer.tokenizer.encode(plan.text), np.int32),
        rows=rows,
        reference_codes=reference,
        traces=done,
        replay_rows=fed_rows,
        replay_codes=fed,
        cache=cache[0] if cache else None,
        latents=latents,
        waveform=waveform,
        failures=failures,
        notes=tuple(notes),
    )


def _reference(synthesizer: Synthesizer, plan: Plan, replay_of: Recording | None, voices: VoiceStore) -> Ints | None:
    """Each side encodes a clip; the codes of a stored voice are those that the first side found."""
    if plan.stored_voice is None:
        return synthesizer.read_voice(plan.voice)[1] if plan.voice is not None else None
    if replay_of is not None and replay_of.plan.stored_voice == plan.stored_voice:
        return replay_of.reference_codes
    codec, manifest = synthesizer.codec, synthesizer.manifest
    return find_voice(plan.stored_voice, voices, codec, codec_id(manifest)).codes[:, : manifest.model.n_vq]


def _check_codes(codes: Ints, manifest: Manifest) -> None:
    """Codes that another side chose are fed to this one: numbers that are no codes would read foreign memory."""
    largest = max(manifest.model.codebook_size - 1, manifest.model.audio_pad_id)
    if codes.size and not (codes.min() >= 0 and codes.max() <= largest):
        raise ParityError(
            f"the reference chose codes from {codes.min()} to {codes.max()}, expected 0 to {largest}; take the other "
            "side as the reference (--a)"
        )


def run_frames(
    model: FrameModel,
    rows: Ints,
    sampling: SamplingParams,
    seed: int,
    num_frames: int,
    forced: Ints | None = None,
    past_end: bool = False,
    cache: list[Floats] | None = None,
) -> Trace:
    """Up to `num_frames` decisions on the uniforms of `seed`; with `forced` codes the end decision does not end it."""
    rng = np.random.default_rng(seed)
    model.prefill(rows)
    if cache is not None and isinstance(model, CacheReader):
        cache.append(model.cache_rows())
    frames: list[Frame] = []
    for index in range(num_frames):
        frame = model.next_frame(draw_uniforms(rng, rows.shape[1] - 1), sampling, keep_logits=True)
        frames.append(dataclasses.replace(frame, codes=frame.codes.copy()))
        if forced is not None:
            model.force_frame(forced[index])
        elif not (frame.go_on or past_end):
            break
    return Trace.of(frames)


def identify(synthesizer: Synthesizer, backend: Backend | None, fused: bool) -> Identity:
    """The identity of a side, from its manifest and from what is installed."""
    manifest = synthesizer.manifest
    return Identity(
        backend=synthesizer.frame_model.backend_name,
        artifacts=manifest.name,
        directory=str(manifest.directory),
        made_up=manifest.made_up,
        graphs=_graph_hashes(manifest, backend),
        weights=manifest.data_files.get(WEIGHTS_NAME, ""),  # a package has none of that form: unknown
        tokenizer=next((sha for name, sha in manifest.data_files.items() if "token" in name), ""),
        template=synthesizer.prompt.template.value,
        capacity=synthesizer.frame_model.capacity,
        fused=fused,
        simulated="simulated" in synthesizer.frame_model.backend_name,
        versions={
            "python": platform.python_version(),
            "machine": platform.machine(),
            **{name: _version(name) for name in ("numpy", "onnxruntime", "torch", "torch-npu") if _version(name)},
            **_om_versions(backend),
        },
        cpu_weights=manifest.cpu_weights,
    )


def _graph_hashes(manifest: Manifest, backend: Backend | None) -> dict[str, str]:
    if backend is None:
        return {name: sha256 for name, sha256 in manifest.data_files.items() if name.endswith((".onnx", ".data"))}
    opened = [line for line in getattr(backend, "opened", []) if isinstance(line, str)]
    hashes = {name: graph.sha256 for name, graph in manifest.graphs.items()}
    for build in manifest.builds:
        if any(line.endswith(build.file) for line in opened):
            hashes[f"{build.graph} {build.axes}"] = build.sha256
    return hashes


def _om_versions(backend: Backend | None) -> dict[str, str]:
    device = getattr(backend, "device", None)
    if getattr(device, "soc", None) is None:
        return {}
    return {"soc": str(device.soc), "cann": str(device.cann)}  # type: ignore[union-attr]  # an OmDevice has both


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# -- files

_ARRAYS = ("token_ids", "rows", "reference_codes", "replay_rows", "replay_codes", "cache", "latents", "waveform")


def save(recording: Recording, directory: Path) -> None:
    """Write both files; recording.json last."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in _ARRAYS:
        if getattr(recording, name) is not None:
            arrays[name] = getattr(recording, name)
    for mode, trace in recording.traces.items():
        for f in dataclasses.fields(trace):
            if getattr(trace, f.name) is not None:
                arrays[f"{mode}.{f.name}"] = getattr(trace, f.name)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for options
    write_atomically(directory / ARRAYS_NAME, buffer.getvalue())
    plan = {**dataclasses.asdict(recording.plan), "voice": str(recording.plan.voice) if recording.plan.voice else None}
    data = {
        "format_version": FORMAT_VERSION,
        "identity": dataclasses.asdict(recording.identity),
        "plan": plan,
        "sample_rate_hz": recording.sample_rate_hz,
        "failures": recording.failures,
        "notes": list(recording.notes),
    }
    write_atomically(directory / JSON_NAME, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def load(directory: Path) -> Recording:
    """Read a recording; ParityError when it is missing, damaged, or of another version."""
    try:
        data = json.loads((directory / JSON_NAME).read_text(encoding="utf-8"))
        with np.load(directory / ARRAYS_NAME, allow_pickle=False) as file:
            arrays = dict(file)
    except FileNotFoundError as error:
        raise ParityError(f"{directory} holds no recording ({error}); make one with run-om parity --record") from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ParityError(f"{directory}: the recording cannot be read ({error}); record again") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise ParityError(f"{directory}: recording version {version!r}, expected {FORMAT_VERSION}; record again")
    try:
        return _assemble(data, arrays)
    except (KeyError, TypeError, AttributeError, ValueError, MossError) as error:
        raise ParityError(f"{directory}: the recording is damaged ({type(error).__name__}: {error})") from error


def _assemble(data: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Recording:
    plan = dict(data["plan"])
    plan["voice"] = Path(plan["voice"]) if plan["voice"] else None
    plan["sampling"] = SamplingParams(**plan["sampling"])
    given: dict[str, Any] = {name: arrays[name] for name in _ARRAYS if name in arrays}
    identity = Identity(**data["identity"])
    Template(identity.template)  # ValueError when there is none of that name
    return Recording(
        identity=identity,
        plan=Plan(**plan),
        sample_rate_hz=data["sample_rate_hz"],
        traces={mode: _trace(mode, arrays) for mode in TRACES if f"{mode}.codes" in arrays},
        failures=data["failures"],
        notes=tuple(data["notes"]),
        **given,
    )


def _trace(mode: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Trace:
    optional: dict[str, Any] = {n: arrays.get(f"{mode}.{n}") for n in ("hidden", "slot_logits", "code_logits")}
    return Trace(arrays[f"{mode}.codes"], arrays[f"{mode}.go_on"], **optional)
