"""Token ids and reference codes -> prompt rows int32 [T, 1 + n_vq].

A row is [text_id, code_0 … code_{n_vq-1}]. Text rows carry audio_pad in every code channel; audio rows carry a slot id
and the codes of one frame. Source: MODEL.md 5.1 and the published modelling code; vectors in tests/data/prompts.

    voice_clone    [im_start] P0 P1 [audio_start] | reference frames (user slot) |
                   [audio_end] P2 text S [im_end] "\\n" [im_start] A [audio_start]
    continuation   [im_start] P0 P1 "None" P2 prompt_text+text S [im_end] "\\n" [im_start] A [audio_start] |
                   prompt frames (assistant slot)

Each literal is tokenised by itself. Published ONNX packages leave the leading im_start out: `Template.ONNX`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig
from runtime.errors import AudioError, TextError

Rows = npt.NDArray[np.int32]

_P0 = "user\n"
_P1 = "<user_inst>\n- Reference(s):\n"
_P2 = (
    "\n- Instruction:\nNone\n- Tokens:\nNone\n- Quality:\nNone\n- Sound Event:\nNone\n"
    "- Ambient Sound:\nNone\n- Language:\nNone\n- Text:\n"
)
_S = "\n</user_inst>"
_A = "assistant\n"


class Template(str, Enum):
    """Whose prompt to build: the PyTorch code's (default), or the one of the published ONNX packages."""

    PYTORCH = "pytorch"
    ONNX = "onnx"  # the same without the leading im_start


@dataclass(frozen=True, slots=True)
class TemplateIds:
    """The fixed token ids around a reference and a text in voice cloning; audio start and end ids not included."""

    before_reference: list[int]
    after_reference: list[int]
    after_text: list[int]


class TextEncoder(Protocol):
    """What prompt building needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def encode_template(self, text: str) -> list[int]: ...


class PromptBuilder:
    """Builds the rows of a request for one model."""

    def __init__(self, config: ModelConfig, tokenizer: TextEncoder, template: Template = Template.PYTORCH) -> None:
        self.config, self.tokenizer, self.template = config, tokenizer, template
        encode = tokenizer.encode_template
        lead = [config.im_start_id] if template is Template.PYTORCH else []
        self._before_reference = [*lead, *encode(_P0), *encode(_P1)]
        self._none = encode("None")
        self._after_reference = encode(_P2)
        self._after_text = [*encode(_S), config.im_end_id, *encode("\n"), config.im_start_id, *encode(_A)]
        self._after_text.append(config.audio_start_id)
        fixed = [*self._before_reference, *self._none, *self._after_reference, *self._after_text]
        self._check_ids(fixed, "the prompt template")

    def template_ids(self) -> TemplateIds:
        """What this builder puts around reference and text."""
        return TemplateIds(list(self._before_reference), list(self._after_reference), self._after_text[:-1])

    def voice_clone(self, text: str, reference_codes: npt.ArrayLike) -> Rows:
        """Rows [78 + F + N, 1 + n_vq] that ask for `text` in the voice of `reference_codes` [F, nq], nq <= n_vq."""
        before = [*self._before_reference, self.config.audio_start_id]
        after = [self.config.audio_end_id, *self._after_reference, *self._text_ids(text), *self._after_text]
        reference = self._audio_rows(reference_codes, self.config.audio_user_slot_id)
        return np.concatenate([self._text_rows(before), reference, self._text_rows(after)])

    def continuation(
        self, text: str, prompt_text: str | None = None, prompt_codes: npt.ArrayLike | None = None
    ) -> Rows:
        """Rows that ask for `text`, as the sequel of a clip (`prompt_codes` [F, nq]) that says `prompt_text`.

        The two texts are joined as they are, without a space, before they are tokenised.
        """
        if (prompt_text is None) != (prompt_codes is None):
            have, lack = ("text", "clip") if prompt_codes is None else ("clip", "text")
            raise TextError(f"continuation got the prompt {have} without the prompt {lack}; give both or neither")
        ids = self._text_ids((prompt_text or "") + text)
        rows = self._text_rows([*self._before_reference, *self._none, *self._after_reference, *ids, *self._after_text])
        if prompt_codes is None:
            return rows
        return np.concatenate([rows, self._audio_rows(prompt_codes, self.config.audio_assistant_slot_id)])

    def _text_ids(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        if not ids:
            raise TextError(f"the text {text[:40]!r} has nothing to speak; give at least one visible character")
        self._check_ids(ids, f"the text {text[:40]!r}")
        return ids

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        if max(ids, default=0) >= self.config.vocab_size:
            raise TextError(
                f"{what}: token id {max(ids)} lies outside the model's vocabulary of {self.config.vocab_size}; "
                "the tokenizer belongs to another checkpoint"
            )

    def _text_rows(self, ids: Sequence[int]) -> Rows:
        rows = np.full((len(ids), 1 + self.config.n_vq), self.config.audio_pad_id, np.int32)
        rows[:, 0] = ids
        return rows

    def _audio_rows(self, codes: npt.ArrayLike, slot_id: int) -> Rows:
        checked = check_codes(codes, self.config)
        rows = self._text_rows([slot_id] * len(checked))
        rows[:, 1 : 1 + checked.shape[1]] = checked
        return rows


def check_codes(codes: npt.ArrayLike, config: ModelConfig) -> npt.NDArray[np.int32]:
    """Codes [F, nq] as int32; AudioError when they are not codes of this model."""
    array = np.asarray(codes)
    expected = f"expected integers [frames, 1 to {config.n_vq}]"
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise AudioError(f"codes: {expected}, got {array.dtype}{list(array.shape)}")
    if not len(array) or not 1 <= array.shape[1] <= config.n_vq:
        raise AudioError(f"codes: {expected}, got {list(array.shape)}; a clip needs at least one whole frame (80 ms)")
    sizes = np.asarray(config.codebook_sizes[: array.shape[1]])
    frame, channel = (int(i[0]) if len(i) else -1 for i in np.nonzero((array < 0) | (array >= sizes)))
    if frame >= 0:
        raise AudioError(
            f"codes: frame {frame}, codebook {channel}: expected 0 to {sizes[channel] - 1}, "
            f"got {array[frame, channel]}; they were made for another model"
        )
    return array.astype(np.int32)
