"""Open a checkpoint strictly: the config, every tensor by its published name in float32, and what was found.

    open_model("OpenMOSS-Team/MOSS-TTS-Nano")  or  open_model(directory)  -> Checkpoint[ModelConfig]
    open_codec(…)                                                        -> Checkpoint[CodecConfig]

A source is a directory or a hub id whose files lie in the local Hugging Face cache; only `convert-moss fetch`
downloads. What can be handled without doubt is handled and noted (tied heads that are absent, tool prefixes, older
names); everything else is refused with file, tensor, expected, got, and what to do. Nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch

from convert.checkpoint_checks import CONFIG_NAME, codec_config_findings, model_config_findings, tensor_findings
from convert.checkpoint_files import DOWNLOAD_AGAIN, FLOAT_DTYPES, damage, read_weight_files
from convert.expected_tensors import (
    STRAY_TENSOR,
    Shape,
    expected_codec_tensors,
    expected_model_tensors,
    tied_heads,
    uniform_prefix,
)
from convert.findings import Finding, fault, notice, refuse
from convert.hub_cache import resolve_source
from runtime.config import CodecConfig, ModelConfig, read_config_json
from runtime.errors import CheckpointError
from runtime.manifest import sha256_of
from runtime.modules.codec_names import canonical_codec_name
from runtime.onnx_package import is_package

ConfigT = TypeVar("ConfigT", ModelConfig, CodecConfig)
Kind = Literal["model", "codec"]
KIND_OF_MODEL_TYPE: dict[str, Kind] = {
    "moss_tts_nano": "model",
    "moss-audio-tokenizer": "codec",
    "speech_tokenizer": "codec",
}
CODEC_WITHOUT_EQUAL_PROJECTIONS = "speech_tokenizer"  # 24 kHz: a projection between equal widths does not exist
MADE_UP_KEY = "made_up_weights"  # our key in the config.json of a fixture
TOKENIZER_NAME = "tokenizer.model"


@dataclass(frozen=True, slots=True)
class Checkpoint(Generic[ConfigT]):
    """A checkpoint that can be used: no finding blocks."""

    config: ConfigT
    tensors: dict[str, torch.Tensor]  # float32, every published name; a tied head is the embedding's own object
    findings: tuple[Finding, ...]  # notices
    files: dict[str, str]  # file -> sha256
    directory: Path
    made_up: bool  # a fixture: its weights mean nothing
    storage_dtype: str  # "bfloat16", "float16", "float32", or "mixed"


@dataclass(slots=True)
class Examination:
    """All that is known about a directory, faults included; `config` is None when it cannot be read."""

    directory: Path
    kind: Kind | None = None
    config: ModelConfig | CodecConfig | None = None
    made_up: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    storage_dtype: str = "unknown"
    tokenizer_pieces: int | None = None  # None when there is no tokenizer.model, or it does not load

    @property
    def blocked(self) -> bool:
        return any(f.blocks for f in self.findings)

    @property
    def tied(self) -> bool | None:
        """Whether every head is its embedding; None for a codec, or when tensors are missing."""
        if not isinstance(self.config, ModelConfig):
            return None
        pairs = tied_heads(self.config).items()
        if not all(head in self.tensors and embedding in self.tensors for head, embedding in pairs):
            return None
        return all(self.tensors[head] is self.tensors[embedding] for head, embedding in pairs)

    @property
    def num_parameters(self) -> int:
        """Numbers stored, a tied head counted once."""
        return sum(t.numel() for t in {id(t): t for t in self.tensors.values()}.values())


def open_model(source: str | Path) -> Checkpoint[ModelConfig]:
    """Open the checkpoint of the language model; CheckpointError names every blocking finding."""
    examined = examine(source, "model")
    refuse(str(examined.directory), examined.findings)
    assert isinstance(examined.config, ModelConfig)
    return _checkpoint(examined, examined.config)


def open_codec(source: str | Path) -> Checkpoint[CodecConfig]:
    """Open the checkpoint of the codec; CheckpointError names every blocking finding."""
    examined = examine(source, "codec")
    refuse(str(examined.directory), examined.findings)
    assert isinstance(examined.config, CodecConfig)
    return _checkpoint(examined, examined.config)


def _checkpoint(examined: Examination, config: ConfigT) -> Checkpoint[ConfigT]:
    return Checkpoint(
        config=config,
        tensors=examined.tensors,
        findings=tuple(examined.findings),
        files=examined.files,
        directory=examined.directory,
        made_up=examined.made_up,
        storage_dtype=examined.storage_dtype,
    )


def examine(source: str | Path, wanted: Kind | None = None) -> Examination:
    """Look at everything in the directory and record it; `wanted` adds a fault when it is the other checkpoint."""
    examined = Examination(resolve_source(source))
    raw = _read_config(examined, wanted)
    if raw is None:
        return examined
    read = read_weight_files(examined.directory)
    files_are_whole = not any(f.blocks for f in read.findings)
    examined.findings += read.findings
    examined.files |= read.files
    if examined.config is None:
        return examined
    tensors, file_of = _canonical_names(examined, read.tensors, read.file_of)
    examined.storage_dtype = _storage_dtype(examined, tensors, file_of)
    if isinstance(examined.config, ModelConfig):
        expected = expected_model_tensors(examined.config)
        if files_are_whole:
            _tie_heads(examined, examined.config, tensors, raw.get("tie_word_embeddings") is not False)
        _examine_tokenizer(examined, examined.config)
    else:
        expected = expected_codec_tensors(examined.config)
        if raw["model_type"] == CODEC_WITHOUT_EQUAL_PROJECTIONS and files_are_whole:
            _identity_projections(examined, tensors, expected)
    if not any(f.rule == "lora" for f in examined.findings):
        examined.findings += tensor_findings(tensors, file_of, expected, files_are_whole)
    if not examined.blocked:
        converted = {id(t): t.detach().to(torch.float32).contiguous() for t in tensors.values()}
        examined.tensors = {name: converted[id(tensors[name])] for name in expected}
    return examined


def _read_config(examined: Examination, wanted: Kind | None) -> Mapping[str, Any] | None:
    """Fill kind, config and made_up from config.json; None when there is no JSON object to go on with."""
    path = examined.directory / CONFIG_NAME
    found = damage(path)
    if found and is_package(examined.directory):
        found = fault("onnx-package", CONFIG_NAME, "this directory is a published ONNX package, not a checkpoint",
                      "make one of it: convert-moss import-onnx DIR --out CHECKPOINT")  # fmt: skip
    if found:
        examined.findings.append(found)
        return None
    try:
        raw = read_config_json(examined.directory)
    except CheckpointError as error:
        examined.findings.append(fault("config", CONFIG_NAME, str(error).removeprefix(f"{path} "), DOWNLOAD_AGAIN))
        return None
    examined.files[CONFIG_NAME] = sha256_of(path)
    examined.made_up = bool(raw.get(MADE_UP_KEY))
    model_type = raw.get("model_type")
    examined.kind = KIND_OF_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if examined.kind is None or (wanted and examined.kind != wanted):
        names = [name for name, kind in KIND_OF_MODEL_TYPE.items() if wanted in (None, kind)]
        examined.findings.append(
            fault("model-type", CONFIG_NAME, f"expected model_type {' or '.join(names)}, got {model_type!r}",
                  "point to the right directory: the language model and the codec are two checkpoints")
        )  # fmt: skip
        return raw
    try:
        if examined.kind == "model":
            examined.config = model = ModelConfig.from_dict(raw)
            examined.findings += model_config_findings(raw, model)
        else:
            examined.config = codec = CodecConfig.from_dict(raw)
            examined.findings += codec_config_findings(raw, codec)
    except CheckpointError as error:
        message = str(error).removeprefix(f"{CONFIG_NAME}: ")
        examined.findings.append(fault("config", CONFIG_NAME, message, "correct the field, or fetch config.json again"))
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        message = f"a field has a value of the wrong type ({type(error).__name__}: {error})"
        examined.findings.append(fault("config", CONFIG_NAME, message, DOWNLOAD_AGAIN))
    return raw


def _canonical_names(
    examined: Examination, stored: Mapping[str, torch.Tensor], file_of: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Take off a uniform tool prefix, map older names, drop the stray table; refuse LoRA tensors."""
    prefix = uniform_prefix(stored)
    file = next(iter(file_of.values()), str(examined.directory))
    if prefix:
        examined.findings.append(
            notice("prefix", file, f"every name starts with {prefix!r}, from a training tool", "it was taken off")
        )
    lora = sorted(name for name in stored if "lora_" in name or ".base_layer." in name or ".modules_to_save." in name)
    if lora:
        examined.findings.append(
            fault("lora", file_of[lora[0]], f"{len(lora)} tensors belong to an adapter that is not merged",
                  "merge it (peft: merge_and_unload) and save the model again", lora[0])
        )  # fmt: skip
        return {}, {}
    tensors, files = {}, {}
    renamed: list[str] = []
    for name, tensor in stored.items():
        plain = name.removeprefix(prefix)
        canonical = canonical_codec_name(plain) if examined.kind == "codec" else plain
        if examined.kind == "model" and plain == STRAY_TENSOR:
            examined.findings.append(
                notice("stray", file_of[name], "the local transformer has no table of its own", "it was left out", name)
            )
            continue
        if canonical != plain:
            renamed.append(name)
        if canonical in tensors:
            examined.findings.append(
                fault("duplicate", file_of[name], f"{canonical} is here under two names", "keep one of them", name)
            )
        tensors[canonical], files[canonical] = tensor, file_of[name]
    if renamed:
        examined.findings.append(
            notice("older-name", file_of[renamed[0]], f"{len(renamed)} tensors carry older names, this is the first",
                   "they were read as the published ones", renamed[0])
        )  # fmt: skip
    return tensors, files


def _storage_dtype(examined: Examination, tensors: Mapping[str, torch.Tensor], file_of: Mapping[str, str]) -> str:
    """The one dtype of all tensors, or "mixed" with a notice; other dtypes than the three floats are faults."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_DTYPES or tensor.layout != torch.strided:
            got = str(tensor.dtype).removeprefix("torch.")
            examined.findings.append(
                fault("dtype", file_of[name], f"expected float32, float16 or bfloat16, got {got}",
                      "quantized and double checkpoints are not read: save it as one of the three", name)
            )  # fmt: skip
    names = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    if len(names) > 1:
        file = next(iter(file_of.values()))
        examined.findings.append(notice("mixed-dtypes", file, f"tensors are stored as {', '.join(names)}",
                                        "all were read as float32"))  # fmt: skip
        return "mixed"
    return names[0] if names else "unknown"


def _tie_heads(examined: Examination, config: ModelConfig, tensors: dict[str, torch.Tensor], says_tied: bool) -> None:
    """Give every head a tensor: the embedding itself when tied, its own when fine-tuning has moved it."""
    for head, embedding in tied_heads(config).items():
        if head not in tensors and embedding in tensors:
            if says_tied:
                tensors[head] = tensors[embedding]
        elif embedding not in tensors and head in tensors and says_tied:
            tensors[embedding] = tensors[head]  # safetensors.torch.save_model keeps one name of a shared tensor
        elif head in tensors and embedding in tensors:
            a, b = tensors[head], tensors[embedding]
            if a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b):
                tensors[head] = tensors[embedding]
            else:
                says = "tied" if says_tied else "not tied"
                examined.findings.append(
                    notice("untied", CONFIG_NAME, f"this head differs from {embedding}; the config says {says}",
                           "the head is used as it is", head)
                )  # fmt: skip


def _identity_projections(
    examined: Examination, tensors: dict[str, torch.Tensor], expected: Mapping[str, Shape]
) -> None:
    """Write out the projections that the 24 kHz codec leaves away: the identity, exactly what upstream computes."""
    for name, shape in expected.items():
        if name not in tensors and name.endswith(("input_proj.weight", "output_proj.weight")) and shape[0] == shape[1]:
            tensors[name] = torch.eye(shape[0])
            examined.findings.append(
                notice("identity", CONFIG_NAME, "this codec has no projection between equal widths",
                       "the identity stands for it", name)
            )  # fmt: skip


def _examine_tokenizer(examined: Examination, config: ModelConfig) -> None:
    """The SentencePiece model beside the weights: there, loading, and inside the vocabulary."""
    import sentencepiece

    path = examined.directory / TOKENIZER_NAME
    if not path.exists():
        examined.findings.append(
            notice("tokenizer", TOKENIZER_NAME, "the tokenizer is not here: no text can be spoken with this checkpoint",
                   "everything else works; copy tokenizer.model here, or run convert-moss fetch")
        )  # fmt: skip
        return
    found = damage(path)
    if found:
        examined.findings.append(found)
        return
    examined.files[TOKENIZER_NAME] = sha256_of(path)
    try:
        pieces = int(sentencepiece.SentencePieceProcessor(model_file=str(path)).get_piece_size())
    except (RuntimeError, OSError) as error:
        examined.findings.append(
            fault("tokenizer", TOKENIZER_NAME, f"SentencePiece cannot load it: {str(error).splitlines()[0][:200]}",
                  DOWNLOAD_AGAIN)
        )  # fmt: skip
        return
    examined.tokenizer_pieces = pieces
    if pieces > config.vocab_size:
        examined.findings.append(
            fault("tokenizer", TOKENIZER_NAME, f"{pieces} pieces for a vocabulary of {config.vocab_size}",
                  "take the tokenizer that belongs to these weights")
        )  # fmt: skip
