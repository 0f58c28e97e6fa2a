"""The delay pattern: the state of one request between rows, and rows back to frames (docs/soundeffect.md).

Codebook i lags i rows behind codebook 0. A run is
    audio_start, G x gen_slot, n_vq x delay_slot, audio_end, im_end
and holds G + 1 frames: frame t of codebook i stands in row t + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from runtime.sfx.config import SfxConfig

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class TextChoice(Enum):
    """How the text id of the next row comes about."""

    FORCED = "forced"  # the state knows it: delay_slot until the codebooks have run out, then audio_end
    INSIDE = "inside"  # gen_slot or delay_slot
    OUTSIDE = "outside"  # any id but the ones that need audio around them


class DelayState:
    """Where one request stands. Ask `text_choice`, `forced_text`, `sampled_books`; then `advance` with the text id."""

    def __init__(self, config: SfxConfig, prompt: Ints) -> None:
        self.config = config
        self.step = 0
        self.audio_len = 0  # rows since audio_start; codebook k has codes once it exceeds k
        self.delayed: int | None = None  # delay rows so far; None while frames still start
        self.in_audio = False
        self.finished = False
        text = prompt[:, 0]
        if text[-1] in (config.audio_start_id, config.gen_slot_id):  # the prompt ends inside audio: continue it
            starts = np.flatnonzero(text == config.audio_start_id)
            if len(starts):
                self.in_audio = True
                self.audio_len = len(text) - int(starts[-1])

    @property
    def text_choice(self) -> TextChoice:
        if self.delayed is not None:
            return TextChoice.FORCED
        return TextChoice.INSIDE if self.in_audio else TextChoice.OUTSIDE

    @property
    def forced_text(self) -> int:
        """The text id when text_choice is FORCED."""
        assert self.delayed is not None
        return self.config.delay_slot_id if self.delayed < self.config.n_vq else self.config.audio_end_id

    def banned_text(self) -> tuple[int, ...]:
        """Ids that may not be chosen when text_choice is INSIDE (of the two slots) or OUTSIDE (of all)."""
        c = self.config
        if self.text_choice is TextChoice.INSIDE:
            return (c.delay_slot_id,) if self.step == 0 else ()
        early = (c.im_end_id,) if self.step <= c.n_vq else ()  # the end is legal after 17 rows, with or without audio
        return (c.pad_id, c.gen_slot_id, c.delay_slot_id, c.audio_end_id, *early)

    def sampled_books(self) -> Bools:
        """Which codebooks get a code in this row; the others get the pad code."""
        books = np.arange(self.config.n_vq)
        started = books < self.audio_len
        return started if self.delayed is None else started & (books >= self.delayed)

    def advance(self, text_id: int) -> None:
        """Take note of the row's text id."""
        c = self.config
        self.step += 1
        if text_id == c.im_end_id:
            self.finished = True
        if text_id == c.audio_start_id:
            self.in_audio = True
        if text_id in (c.audio_start_id, c.gen_slot_id, c.delay_slot_id):
            self.audio_len += 1
        if text_id == c.audio_end_id:
            self.in_audio, self.audio_len = False, 0
        if self.delayed is None and text_id == c.delay_slot_id:
            self.delayed = 0
        if self.delayed is not None:
            self.delayed += 1
            if self.delayed > c.n_vq:
                self.delayed = None


def delay(codes: Ints, pad: int) -> Ints:
    """Frames [T, n_vq] -> delayed rows [T + n_vq - 1, n_vq], the gaps filled with the pad code."""
    num_frames, n_vq = codes.shape
    rows = np.full((num_frames + n_vq - 1, n_vq), pad, codes.dtype)
    for book in range(n_vq):
        rows[book : book + num_frames, book] = codes[:, book]
    return rows


def undelay(rows: Ints) -> Ints:
    """The inverse of `delay`: rows [N, n_vq] -> frames [N - n_vq + 1, n_vq]; fewer rows than codebooks hold none."""
    n_vq = rows.shape[1]
    num_frames = max(0, len(rows) - n_vq + 1)
    return np.stack([rows[book : book + num_frames, book] for book in range(n_vq)], axis=1)


@dataclass(frozen=True, slots=True)
class Segments:
    """The frames of a run: each segment [T, n_vq] is whole; `dropped_rows` held codes of frames that were cut off."""

    codes: tuple[Ints, ...]
    dropped_rows: int


def segments(rows: Ints, config: SfxConfig) -> Segments:
    """Generated rows [N, 1 + n_vq] -> runs of complete frames; rows without any code separate them."""
    pad = config.audio_pad_code
    frames = undelay(np.asarray(rows)[:, 1:])
    whole = (frames != pad).all(axis=1)
    edges = np.flatnonzero(np.diff(whole, prepend=False, append=False))
    parts = tuple(frames[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
    # Codebook 0 has one code per frame that was begun; the last n_vq - 1 of them stay incomplete in a run that was cut.
    begun = int((np.asarray(rows)[:, 1] != pad).sum())
    return Segments(parts, begun - sum(map(len, parts)))
