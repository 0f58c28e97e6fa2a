"""Text + reference codes -> the job of a request: segments, prompt rows, seeds, and what they count as tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.audio_check import BYTES_PER_TOKEN
from runtime.errors import CapacityError
from runtime.generate import MAX_FRAMES
from runtime.manifest import Manifest
from runtime.narration import derive_seed
from runtime.prompt import PromptBuilder
from runtime.sampling import SamplingParams
from runtime.server.errors import ApiError
from runtime.server.jobs import Job, SegmentJob
from runtime.server.schema import SpeechRequest
from runtime.server.settings import ServerSettings
from runtime.synthesizer import TOKENIZER_NAME
from runtime.text import TextOptions, plan_text
from runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request counts as: real text tokens, reference frames, and generated frames."""

    text_tokens: int
    audio_tokens: int
    output_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        return self.text_tokens + self.audio_tokens

    def to_dict(self) -> dict[str, object]:
        """As OpenAI's speech.audio.done has it."""
        details = {"text_tokens": self.text_tokens, "audio_tokens": self.audio_tokens}
        total = self.input_tokens + self.output_tokens
        return {
            "input_tokens": self.input_tokens, "output_tokens": self.output_tokens, "total_tokens": total,
            "input_token_details": details,
        }  # fmt: skip

    def headers(self) -> dict[str, str]:
        """As vLLM-Omni names them."""
        counts = {
            "INPUT-TOKENS": self.input_tokens, "OUTPUT-TOKENS": self.output_tokens,
            "TOTAL-TOKENS": self.input_tokens + self.output_tokens, "INPUT-TEXT-TOKENS": self.text_tokens,
            "INPUT-AUDIO-TOKENS": self.audio_tokens,
        }  # fmt: skip
        return {f"X-VLLM-OMNI-{name}": str(count) for name, count in counts.items()}


class Prompter:
    """Builds jobs; needs the tokenizer, not the model."""

    def __init__(self, manifest: Manifest, settings: ServerSettings) -> None:
        self._manifest, self._settings = manifest, settings
        self._tokenizer = Tokenizer(manifest.path(TOKENIZER_NAME))
        self._prompt = PromptBuilder(manifest.model, self._tokenizer)

    def job(self, asked: SpeechRequest, codes: npt.NDArray[np.int32], job_id: str, capacity: int) -> tuple[Job, Usage]:
        """The job of a request; ApiError, TextError or CapacityError when it cannot be spoken."""
        plan = plan_text(asked.input, self._tokenizer, TextOptions())
        if len(plan.segments) > self._settings.max_segments:
            raise ApiError(
                400, f"input makes {len(plan.segments)} segments, the limit is {self._settings.max_segments}", "input"
            )
        # A wrong sign is no error: any 64-bit number is a seed.
        seed = (self._settings.default_seed if asked.seed is None else asked.seed) % 2**64
        max_frames = min(asked.max_new_tokens or MAX_FRAMES, MAX_FRAMES)
        rate_hz = self._manifest.codec.sample_rate_hz
        segments = []
        for index, segment in enumerate(plan.segments):
            rows = self._prompt.voice_clone(segment.text, codes[:, : self._manifest.model.n_vq])
            if len(rows) + max_frames > capacity:
                raise CapacityError(
                    f"{len(rows)} prompt rows and up to {max_frames} frames need {len(rows) + max_frames} rows, the "
                    f"server has {capacity}; use a shorter reference clip, or a smaller max_new_tokens"
                )
            num_bytes = self._tokenizer.count_bytes(list(segment.token_ids))
            plausible = len(segment.token_ids) - num_bytes + num_bytes / BYTES_PER_TOKEN
            pause = round(segment.pause_seconds * rate_hz)
            segments.append(SegmentJob(rows, derive_seed(seed, index, 0), plausible, pause))
        job = Job(job_id, tuple(segments), SamplingParams(), max_frames)
        return job, Usage(plan.num_tokens, len(codes))
