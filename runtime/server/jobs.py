"""What goes between the HTTP process and the worker process: jobs one way, events the other. Both are pickled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.sampling import SamplingParams
from runtime.sfx.prompt import SoundPrompt
from runtime.sfx.sampling import SfxSampling


@dataclass(frozen=True, slots=True, eq=False)
class SegmentJob:
    """One prompt of a request; long texts have several, spoken one after the other."""

    rows: npt.NDArray[np.int32]  # [T, 1 + n_vq]
    seed: int
    plausible_tokens: float  # of the text, for the runaway rule
    pause_samples: int  # silence behind it


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the worker needs to speak one request."""

    id: str
    segments: tuple[SegmentJob, ...]
    sampling: SamplingParams
    max_frames: int  # per segment


@dataclass(frozen=True, slots=True)
class SoundJob:
    """Everything the worker of MOSS-SoundEffect needs to make one sound."""

    id: str
    prompt: SoundPrompt
    seed: int
    sampling: SfxSampling
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody listens any more: free the slot at the next frame boundary."""

    id: str


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """A reference clip to encode, [channels, samples] at the codec's rate."""

    id: str
    waveform: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded, warmed up and checked its model."""

    backend: str
    slots: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The worker cannot start, or its backend failed; it ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Beat:
    """One frame boundary was passed."""


@dataclass(frozen=True, slots=True)
class Started:
    """A job has its slot; its prompt is read next."""

    id: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Audio of a job: s16le mono."""

    id: str
    pcm: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """A job is done."""

    id: str
    num_frames: int
    reasons: tuple[str, ...]  # finish reason of each segment


@dataclass(frozen=True, slots=True)
class Failed:
    """A job, or an encoding, that gives no result; its neighbours go on."""

    id: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The codes [F, n_vq] of an EncodeJob."""

    id: str
    codes: npt.NDArray[np.int32]


Work = Job | SoundJob
Request = Work | Cancel | EncodeJob
Event = Ready | Broken | Beat | Started | Piece | Finished | Failed | Encoded
