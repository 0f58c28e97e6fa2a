"""Test a guess: rerun one side with a deliberate fault and see whether it becomes the other side.

A fault changes what a graph is fed. `position + 1` looks like any other wrong number in a metric; a rerun with that
fault that lands within rounding of the other side is evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Backend, Session
from runtime.frame_model import HostFrameModel
from runtime.manifest import Manifest
from runtime.parity_record import GREEDY, run_frames
from runtime.sampling import MASKED
from runtime.spec import Array, GraphSpec

FAULT_FRAMES = 5  # enough to tell rows that are late from rows that are never written
CONVINCING = 0.1  # share of the error that may remain

Feeds = dict[str, Array]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Situation:
    """What a fault may need to know."""

    prompt_rows: int
    last_codes: Array | None  # the codes of the row before
    user_slot: int
    capacity: int  # of the other side's cache


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of mistake; `change` gets a graph's name and a copy of its feeds."""

    kind: str
    text: str
    change: Callable[[str, Feeds, Situation], None]


def _shift_positions(by: int) -> Callable[[str, Feeds, Situation], None]:
    def change(graph: str, feeds: Feeds, at: Situation) -> None:
        if graph != "prefill":
            feeds["position"] = feeds["position"] + np.int32(by)

    return change


def _early_last(graph: str, feeds: Feeds, at: Situation) -> None:
    if graph == "prefill":
        feeds["last"] = feeds["last"] - np.int32(1)


def _no_mask(whole_capacity: bool) -> Callable[[str, Feeds, Situation], None]:
    """A host cache shows a graph blocks of rows; a compiled graph always sees the whole capacity."""

    def change(graph: str, feeds: Feeds, at: Situation) -> None:
        if graph == "prefill":
            return
        used = int(feeds["position"][0])
        for name in [n for n in feeds if n.startswith("past_")]:
            shown = feeds[name].shape[2]
            unwritten = max(at.capacity, shown) - used if whole_capacity else shown - used
            feeds[name] = np.pad(feeds[name][:, :, :used], ((0, 0), (0, 0), (0, unwritten), (0, 0)))
        feeds["cache_mask"] = np.zeros((1, 1, 1, feeds["past_key_0"].shape[2]), np.float32)

    return change


def _newest_hidden(graph: str, feeds: Feeds, at: Situation) -> None:
    if graph != "prefill":
        feeds["cache_mask"] = feeds["cache_mask"].copy()
        feeds["cache_mask"][..., int(feeds["position"][0]) - 1] = MASKED


def _rows(move: Callable[[Array, Array, int, int], None]) -> Callable[[str, Feeds, Situation], None]:
    """A fault of the generated rows [prompt, length) of the cache; `move(new, old, prompt, length)`."""

    def change(graph: str, feeds: Feeds, at: Situation) -> None:
        if graph == "prefill":
            return
        length = int(feeds["position"][0])
        for name in [n for n in feeds if n.startswith("past_")]:
            old = feeds[name]
            feeds[name] = old.copy()
            move(feeds[name], old, at.prompt_rows, length)

    return change


def _rows_early(new: Array, old: Array, prompt: int, length: int) -> None:
    if length > prompt:
        new[:, :, prompt - 1 : length - 1] = old[:, :, prompt:length]
        new[:, :, length - 1] = 0


def _rows_late(new: Array, old: Array, prompt: int, length: int) -> None:
    if length > prompt:
        new[:, :, prompt + 1 : length] = old[:, :, prompt : length - 1]
        new[:, :, prompt] = 0


def _rows_lost(new: Array, old: Array, prompt: int, length: int) -> None:
    new[:, :, prompt:length] = 0


def _stale_codes(graph: str, feeds: Feeds, at: Situation) -> None:
    if graph != "prefill" and at.last_codes is not None:
        feeds["row"] = np.concatenate([feeds["row"][..., :1], at.last_codes], axis=-1)


def _user_slot(graph: str, feeds: Feeds, at: Situation) -> None:
    if graph != "prefill":
        feeds["row"] = feeds["row"].copy()
        feeds["row"][..., 0] = at.user_slot


FAULTS = (
    Fault("position", "the position of every step is one too high", _shift_positions(1)),
    Fault("position", "the position of every step is one too low", _shift_positions(-1)),
    Fault("position", "prefill takes the hidden state one row before the last", _early_last),
    Fault("mask", "the cache mask is missing: rows that were never written count", _no_mask(False)),
    Fault("mask", "the cache mask is missing: rows that were never written count", _no_mask(True)),
    Fault("mask", "the cache mask opens a row one step too late", _newest_hidden),
    Fault("cache row", "new cache rows are written one row too early", _rows(_rows_early)),
    Fault("cache row", "new cache rows are written one row too late", _rows(_rows_late)),
    Fault("cache row", "new cache rows never reach the cache", _rows(_rows_lost)),
    Fault("row", "each step reads the codes of the frame before the last", _stale_codes),
    Fault("row", "each step reads the slot token of the user instead of the assistant", _user_slot),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """The side that can be rerun: its manifest and a backend with host memory."""

    side: str  # "a" or "b"
    manifest: Manifest
    backend: Backend


@dataclass(frozen=True, slots=True)
class Match:
    """The fault that explains the other side best."""

    fault: Fault
    error: float  # relative, with the fault
    error_without: float


def find_fault(engine: Engine, rows: Ints, codes: Ints, other_hidden: Floats, other_capacity: int) -> Match | None:
    """The fault under which the engine's side gives `other_hidden`; None when no fault comes close."""
    frames = min(FAULT_FRAMES, len(codes), len(other_hidden))
    faulty = _FaultyBackend(engine.backend)
    model = HostFrameModel(engine.manifest, faulty)
    results: list[tuple[float, Fault]] = []
    try:
        without = _error(model, rows, codes, other_hidden, frames)
        for fault in FAULTS:
            faulty.fault = fault
            faulty.situation = Situation(
                len(rows), None, engine.manifest.model.audio_user_slot_id, min(other_capacity, model.capacity)
            )
            results.append((_error(model, rows, codes, other_hidden, frames), fault))
    finally:
        model.close()
    error, fault = min(results, key=lambda r: r[0])
    return Match(fault, error, without) if error <= CONVINCING * without else None


def _error(model: HostFrameModel, rows: Ints, codes: Ints, other: Floats, frames: int) -> float:
    hidden = run_frames(model, rows, GREEDY, 0, frames, codes).hidden
    assert hidden is not None  # a HostFrameModel keeps what it is asked to keep
    gap = np.linalg.norm(hidden.astype(np.float64) - other[:frames])
    return float(gap / max(float(np.linalg.norm(other[:frames])), 1e-30))


class _FaultyBackend:
    """Opens sessions that make the current fault's mistake."""

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self.fault: Fault | None = None
        self.situation: Situation | None = None
        self._backend = backend

    def open(self, spec: GraphSpec, path: Path) -> Session:
        return _FaultySession(self, self._backend.open(spec, path))


class _FaultySession:
    def __init__(self, owner: _FaultyBackend, session: Session) -> None:
        self.spec = session.spec
        self._owner, self._session = owner, session
        self._last_codes: Array | None = None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        fault, at = self._owner.fault, self._owner.situation
        changed = dict(feeds)
        if self.spec.name == "step_frame":
            codes = feeds["row"][..., 1:]
            if int(feeds["position"][0]) == (at.prompt_rows if at else -1):
                self._last_codes = None
            if at is not None:
                at = Situation(at.prompt_rows, self._last_codes, at.user_slot, at.capacity)
            self._last_codes = codes
        if fault is not None and at is not None and self.spec.name != "frame":
            fault.change(self.spec.name, changed, at)
        return self._session.run(changed)

    def close(self) -> None:
        self._session.close()
