"""Words -> sound: wires prompt, model, sampling, delay pattern and codec; owns no mathematics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from runtime.errors import GenerationError
from runtime.sfx.codec import Decoding, decode_pieces
from runtime.sfx.config import read_sfx_config
from runtime.sfx.delay import segments
from runtime.sfx.generate import FinishReason, RowModel, Run, generate
from runtime.sfx.prompt import PromptEncoder, SoundPrompt
from runtime.sfx.sampling import SfxSampling

if TYPE_CHECKING:
    from runtime.codec import Codec

Floats = npt.NDArray[np.float32]

MAX_NEW_TOKENS = 4096  # the model card's limit: 5 minutes


@dataclass(frozen=True, slots=True)
class Sound:
    """One generated sound and how it came about."""

    waveform: Floats  # [1, N]
    sample_rate_hz: int
    num_frames: int  # 80 ms each
    num_rows: int  # generated rows, delay and control rows included
    finish_reason: FinishReason
    llm_seconds: float  # of the whole batch
    codec_seconds: float
    notices: tuple[str, ...] = field(default=())

    @property
    def seconds(self) -> float:
        return float(self.waveform.shape[1] / self.sample_rate_hz)


class SoundEffects:
    """An opened model with its tokenizer and codec; a context manager."""

    def __init__(
        self,
        encoder: PromptEncoder,
        model: RowModel,
        codec: Codec,
        codec_name: str,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`codec_name`: what runs the codec, as reports print it; `release` frees what model and codec do not own."""
        self._release = release
        self.encoder, self.model, self.codec, self.codec_name = encoder, model, codec, codec_name

    @staticmethod
    def open(
        checkpoint: Path, codec: Path, device: str = "cpu", dtype: str | None = None, codec_device: str = "cpu"
    ) -> SoundEffects:
        """Open the published checkpoints with PyTorch; `dtype` is the stored one unless given."""
        from runtime.sfx.codec import open_sfx_codec
        from runtime.sfx.torch_model import TorchRowModel
        from runtime.sfx.weights import SfxWeights

        config = read_sfx_config(checkpoint)
        encoder = PromptEncoder(checkpoint, config)
        opened = open_sfx_codec(codec, config, codec_device)
        return SoundEffects(
            encoder, TorchRowModel(SfxWeights(checkpoint, config), device, dtype), opened, f"torch {codec_device}"
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """What the checkpoint left out and the published table filled in."""
        return self.model.config.notices

    def create(
        self,
        prompts: Sequence[SoundPrompt],
        seeds: Sequence[int],
        sampling: SfxSampling | None = None,
        max_new_tokens: int | None = None,
        decoding: Decoding = Decoding.UPSTREAM,
        on_row: Callable[[int], None] = lambda rows: None,
        on_piece: Callable[[Floats], None] = lambda waveform: None,
    ) -> list[Sound]:
        """One sound per prompt and seed, side by side; GenerationError when one of them has no audio.

        `on_row` hears of every row, `on_piece` every chunk [1, N] of the waveforms; what they raise ends the work.
        Without max_new_tokens a sound may be as long as the model card and the cache allow.
        """
        rows = [self.encoder.rows(prompt) for prompt in prompts]
        if max_new_tokens is None:
            max_new_tokens = max(1, min(MAX_NEW_TOKENS, self.model.max_rows - max(map(len, rows), default=0)))
        begin = time.perf_counter()
        runs = generate(self.model, rows, sampling or SfxSampling(), seeds, max_new_tokens, on_row)
        llm_seconds = time.perf_counter() - begin
        return [self._sound(p, r, llm_seconds, decoding, on_piece) for p, r in zip(prompts, runs, strict=True)]

    def _sound(
        self, prompt: SoundPrompt, run: Run, llm_seconds: float, decoding: Decoding, on_piece: Callable[[Floats], None]
    ) -> Sound:
        found = segments(run.rows, self.model.config)
        if not found.codes:
            ended = "ended" if run.finish_reason is FinishReason.END else "was cut by max_new_tokens"
            raise GenerationError(
                f'"{prompt.ambient_sound}": the run {ended} after {len(run.rows)} rows without a complete frame of '
                "audio; try another seed, or raise --max-new-tokens"
            )
        begin = time.perf_counter()
        pieces = []
        for codes in found.codes:
            for piece in decode_pieces(self.codec, codes, decoding):
                on_piece(piece)
                pieces.append(piece)
        waveform = np.concatenate(pieces, axis=1)
        codec_seconds = time.perf_counter() - begin
        notices = []
        if run.finish_reason is FinishReason.LENGTH:
            notices.append(f"cut after {len(run.rows)} rows by max_new_tokens; {found.dropped_rows} incomplete frames "
                           "at the end were dropped")  # fmt: skip
        if len(found.codes) > 1:
            notices.append(f"the model began {len(found.codes)} times; the parts follow each other")
        return Sound(
            waveform, self.codec.config.sample_rate_hz, sum(map(len, found.codes)), len(run.rows), run.finish_reason,
            llm_seconds, codec_seconds, tuple(notices),
        )  # fmt: skip

    def close(self) -> None:
        """Free model and codec."""
        self.model.close()
        self.codec.close()
        self._release()

    def __enter__(self) -> SoundEffects:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
