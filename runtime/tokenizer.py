"""Text -> token ids with the SentencePiece model of the checkpoint.

The published model declares its control tokens (<|im_start|>, <user_inst>, …) as *user-defined symbols*: SentencePiece
finds them in any text, so a sentence that contains "<|im_start|>" would end the user's turn. Two encodings follow:

    encode(text)           for text from people: the same model with those symbols declared as *control* symbols, which
                           SentencePiece never produces from text; "<|im_start|>" becomes ordinary pieces
    encode_template(text)  for our own literals: the model as published

Both give the same ids for every text without such a literal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError, TextError

_USER_DEFINED, _CONTROL = 4, 3  # sentencepiece_model.proto, SentencePiece.Type


class Tokenizer:
    """The tokenizer.model of a checkpoint, loaded and checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model = _read_model(path)
        self._published = _load(model, path)
        self._for_people = _load(_user_defined_as_control(model, path), path)

    @property
    def vocab_size(self) -> int:
        return int(self._published.vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a text from people; never a control token, whatever the text says."""
        return list(self._for_people.encode(_utf8(text)))

    def encode_template(self, text: str) -> list[int]:
        """Ids of one of our own literals; control tokens in it become their ids."""
        return list(self._published.encode(_utf8(text)))

    def control_literals(self, text: str) -> list[str]:
        """Control tokens that `text` spells out (in any form that normalises to one) and that encode() disarms."""
        ids = self.encode_template(text)
        return list(dict.fromkeys(self.piece(i) for i in ids if self._for_people.is_control(i)))

    def piece(self, token_id: int) -> str:
        return str(self._published.id_to_piece(token_id))

    def piece_id(self, piece: str) -> int | None:
        """The id of a piece as the model spells it; None when it has no such piece."""
        found = int(self._published.piece_to_id(piece))
        return found if self.piece(found) == piece else None

    def decode(self, ids: list[int]) -> str:
        return str(self._published.decode(ids))

    def count_bytes(self, ids: list[int]) -> int:
        """How many ids stand for a single byte of a character that the vocabulary lacks."""
        return sum(self._published.is_byte(i) for i in ids)

    def count_unknown(self, ids: list[int]) -> int:
        """How many ids are <unk>: text that the model cannot see at all (a vocabulary without byte pieces)."""
        return sum(self._published.is_unknown(i) for i in ids)


def _utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"character {error.start + 1} is half of a surrogate pair (U+{ord(text[error.start]):04X}); "
            "the text was decoded wrongly: read it as UTF-8"
        ) from error
    return text


def _read_model(path: Path) -> bytes:
    try:
        model = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the tokenizer ({error.strerror}); download it again") from error
    if model.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not a tokenizer; run: git lfs pull")
    if not model:
        raise CheckpointError(f"{path} is empty; expected a SentencePiece model. Download it again")
    return model


def _load(model: bytes, path: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=model)
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model; download it again") from error


def _user_defined_as_control(model: bytes, path: Path) -> bytes:
    """The same model with every USER_DEFINED piece declared CONTROL.

    Edits the protobuf in place: ModelProto.pieces is field 1, SentencePiece.type is field 3; 4 -> 3 keeps all lengths.
    """
    edited = bytearray(model)
    try:
        for field, start, end in _fields(model, 0, len(model)):
            if field != 1:
                continue
            for inner, at, _ in _fields(model, start, end):
                if inner == 3 and model[at] == _USER_DEFINED:
                    edited[at] = _CONTROL
    except (IndexError, ValueError) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model (damaged protobuf); download it again") from error
    return bytes(edited)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, end) of each protobuf field's value in data[at:end]."""
    while at < end:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 2:
            size, at = _varint(data, at)
        elif wire == 0:
            size = _varint(data, at)[1] - at
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > end:
            raise ValueError("field runs past the end")
        yield key >> 3, at, at + size
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
