"""Text + voice -> waveform: wires tokenizer, prompt, frame model, loop and codec; owns no mathematics.

clip   ─ audio.read_clip ─ codec.encode ─► reference codes ┐
text   ─ tokenizer ───────────────────── prompt rows ◄─────┘
rows   ─ generate(frame model) ─► codes ─ codec ─► waveform
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.assembly import open_codec, open_frame_model
from runtime.audio import Clip, read_clip
from runtime.backends.base import Backend
from runtime.codec import SpeechCodec
from runtime.errors import GenerationError, TextError
from runtime.frame_model import FrameModel
from runtime.generate import MAX_FRAMES, Generation, OnFrame, generate
from runtime.manifest import Manifest
from runtime.prompt import PromptBuilder, Template
from runtime.sampling import SamplingParams
from runtime.tokenizer import Tokenizer

TOKENIZER_NAME = "tokenizer.model"


@dataclass(frozen=True, slots=True)
class Request:
    """What to say and how. Without reference codes the text is continued from nothing (continuation mode)."""

    text: str
    reference_codes: npt.NDArray[np.int32] | None = None  # [R, n_vq]
    reference_text: str | None = None  # what the reference says: continuation instead of cloning
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    max_frames: int = MAX_FRAMES


@dataclass(frozen=True, slots=True)
class Speech:
    """A spoken request, with what a person wants to know about it."""

    waveform: npt.NDArray[np.float32]  # [channels, samples]
    sample_rate_hz: int
    generation: Generation
    decode_seconds: float
    backend_name: str

    @property
    def seconds(self) -> float:
        return float(self.waveform.shape[1] / self.sample_rate_hz)

    @property
    def wall_seconds(self) -> float:
        """Prefill, frames and codec; loading excluded."""
        return self.generation.prefill_seconds + self.generation.frames_seconds + self.decode_seconds

    @property
    def rtf(self) -> float:
        """Wall seconds per second of audio: below 1 is faster than real time."""
        return self.wall_seconds / self.seconds


class Synthesizer:
    """One model, ready to speak; a context manager that frees its sessions."""

    def __init__(
        self, manifest: Manifest, frame_model: FrameModel, codec: SpeechCodec, template: Template = Template.PYTORCH
    ) -> None:
        self.manifest, self.frame_model, self.codec = manifest, frame_model, codec
        self.tokenizer = Tokenizer(manifest.path(TOKENIZER_NAME))
        self.prompt = PromptBuilder(manifest.model, self.tokenizer, template)

    def read_voice(self, path: Path) -> tuple[Clip, npt.NDArray[np.int32]]:
        """A reference clip and its codes [R, n_vq]."""
        clip = read_clip(path, self.manifest.codec.sample_rate_hz, self.manifest.codec.num_channels)
        return clip, self.codec.encode(clip.waveform)[:, : self.manifest.model.n_vq]

    def rows(self, request: Request) -> npt.NDArray[np.int32]:
        """The prompt rows of a request."""
        if not request.text.strip():
            raise TextError("the text is empty; give some words to speak")
        if request.reference_text is not None or request.reference_codes is None:
            return self.prompt.continuation(request.text, request.reference_text, request.reference_codes)
        return self.prompt.voice_clone(request.text, request.reference_codes)

    def say(
        self,
        request: Request,
        keep_logits: bool = False,
        on_frame: OnFrame = lambda codes: None,
    ) -> Speech:
        """Speak one request; `on_frame` sees the codes of each frame as it comes."""
        rows = self.rows(request)
        generation = generate(
            self.frame_model, rows, request.seed, request.sampling, request.max_frames, keep_logits, on_frame
        )
        if not generation.num_frames:
            raise GenerationError("the model ended the utterance before the first frame; try another seed or text")
        start = time.perf_counter()
        waveform = self.decode(request, generation.codes)
        seconds = time.perf_counter() - start
        rate = self.manifest.codec.sample_rate_hz
        return Speech(waveform, rate, generation, seconds, self.frame_model.backend_name)

    def decode(self, request: Request, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """The waveform of new codes; a continuation is decoded behind its prompt, and the prompt's part cut off."""
        if request.reference_text is None or request.reference_codes is None:
            return self.codec.decode(codes)
        prompt = request.reference_codes
        whole = self.codec.decode(np.concatenate([prompt, codes]))
        return whole[:, len(prompt) * self.manifest.codec.samples_per_frame :]

    def close(self) -> None:
        self.frame_model.close()
        self.codec.close()

    def __enter__(self) -> Synthesizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_synthesizer(
    manifest: Manifest, backend: Backend, template: Template = Template.PYTORCH, fused: bool = True
) -> Synthesizer:
    """Load the graphs that speaking needs; `fused` runs one graph per frame where there are two ways."""
    manifest.check_hashes([])  # weights and tokenizer
    codec = open_codec(manifest, backend)
    try:
        frame_model = open_frame_model(manifest, backend, fused)
    except BaseException:
        codec.close()
        raise
    return Synthesizer(manifest, frame_model, codec, template)
