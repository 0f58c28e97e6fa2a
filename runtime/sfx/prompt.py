"""A description in words -> prompt rows int32 [T, 1 + n_vq] (docs/soundeffect.md).

One user message and an open assistant turn. A field that is not given is the literal `None`; the description goes in
as it is (English or Chinese). The tokenizer is the checkpoint's own tokenizer.json (Qwen's byte-level BPE).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from runtime.errors import BackendUnavailableError, CheckpointError, TextError
from runtime.sfx.config import SfxConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ints = npt.NDArray[np.int32]

_IM_START, _IM_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class SoundPrompt:
    """What to generate. `tokens` is a hint in words: 12.5 per second; the only hard limit is max_new_tokens."""

    ambient_sound: str
    tokens: int | None = None
    sound_event: str | None = None
    quality: str | None = None
    language: str | None = None
    instruction: str | None = None

    def __post_init__(self) -> None:
        if not self.ambient_sound.strip():
            raise TextError('the description is empty; expected words such as "a dog barks in the rain"')
        if self.tokens is not None and self.tokens < 1:
            raise TextError(f"tokens: expected a number above 0, got {self.tokens}; 12.5 tokens are one second")
        for name in ("ambient_sound", "sound_event", "quality", "language", "instruction"):
            if "<|" in (getattr(self, name) or ""):
                raise TextError(f"{name}: '<|' begins a control token of the model; remove it from the text")

    def content(self) -> str:
        """The user message."""
        fields = (
            ("Reference(s)", None),
            ("Instruction", self.instruction),
            ("Tokens", self.tokens),
            ("Quality", self.quality),
            ("Sound Event", self.sound_event),
            ("Ambient Sound", self.ambient_sound),
            ("Language", self.language),
            ("Text", None),
        )
        return "<user_inst>\n" + "".join(f"- {name}:\n{value}\n" for name, value in fields) + "</user_inst>"

    def text(self) -> str:
        """The whole prompt; the final newline belongs to it."""
        return f"{_IM_START}user\n{self.content()}{_IM_END}\n{_IM_START}assistant\n"


class PromptEncoder:
    """Turn prompts into rows with the tokenizer of a checkpoint directory."""

    def __init__(self, directory: Path, config: SfxConfig) -> None:
        self.config = config
        self._tokenizer = _open_tokenizer(directory / "tokenizer.json")
        for name, want in ((_IM_START, config.im_start_id), (_IM_END, config.im_end_id)):
            got = self._tokenizer.token_to_id(name)
            if got != want:
                raise CheckpointError(f"{directory / 'tokenizer.json'}: {name} is {got}, config.json says {want}; "
                                      "download both files of the same release")  # fmt: skip

    def rows(self, prompt: SoundPrompt) -> Ints:
        """Prompt rows [T, 1 + n_vq]: the text ids in column 0, the pad code in every other column."""
        ids = self._tokenizer.encode(prompt.text(), add_special_tokens=False).ids
        rows = np.full((len(ids), self.config.row_size), self.config.audio_pad_code, np.int32)
        rows[:, 0] = ids
        if rows[:, 0].max() >= self.config.vocab_size:
            raise TextError(f"a token id of the prompt lies outside the vocabulary of {self.config.vocab_size}")
        return rows


def _open_tokenizer(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BackendUnavailableError(
            "the package tokenizers is not installed; install the extra: pip install 'moss-tts-nano-ascend[sfx]'"
        ) from error
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); it belongs to the checkpoint: download it") from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the tokenizers package raises plain Exception for a damaged file
        raise CheckpointError(f"{path} is no tokenizer ({error}); download it again") from error
