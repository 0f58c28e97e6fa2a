"""What a config says twice or contradicts, and tensors held against the expected list. Every fault is a Finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from convert.checkpoint_files import DOWNLOAD_AGAIN, FLOAT_DTYPES
from convert.expected_tensors import Shape
from convert.findings import Finding, fault, notice
from runtime.config import CodecConfig, ModelConfig

CONFIG_NAME = "config.json"


def model_config_findings(raw: Mapping[str, Any], config: ModelConfig) -> list[Finding]:
    """What the config says twice, or leaves out."""
    findings = []
    if raw.get("pad_token_id") is None:
        findings.append(
            notice("pad-token", CONFIG_NAME, "pad_token_id is missing", f"{config.pad_id} is used, as published")
        )  # fmt: skip
    if config.audio_end_id == config.audio_assistant_slot_id:
        findings.append(
            fault("special-ids", CONFIG_NAME, f"the end token and the slot token are both {config.audio_end_id}",
                  "correct audio_end_token_id or audio_assistant_slot_token_id")
        )  # fmt: skip
    doubles = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "audio_vocab_size": config.codebook_size,
        "max_position_embeddings": config.max_positions,
    }
    for name, used in doubles.items():
        if raw.get(name) not in (None, used):
            findings.append(
                notice("config-twice", CONFIG_NAME, f"{name} is {raw[name]!r} and the part it repeats says {used}",
                       f"{used} is used; the tensors have to agree with it")
            )  # fmt: skip
    return findings


def codec_config_findings(raw: Mapping[str, Any], config: CodecConfig) -> list[Finding]:
    """What the config says twice and differently; whether the stages fit each other CodecConfig checks itself."""
    problems: list[str] = []
    if raw["quantizer_kwargs"].get("output_dim") not in (None, config.latent_size):
        problems.append(f"quantizer_kwargs: output_dim differs from input_dim {config.latent_size}")
    if raw.get("sample_rate") not in (None, config.sample_rate_hz):
        problems.append(f"sample_rate {raw['sample_rate']!r} and sampling_rate {config.sample_rate_hz} differ")
    return [fault("config", CONFIG_NAME, p, "correct the config, or fetch it again") for p in problems]


def tensor_findings(
    tensors: Mapping[str, torch.Tensor], file_of: Mapping[str, str], expected: Mapping[str, Shape], complete: bool
) -> list[Finding]:
    """Unknown, missing, mis-shaped and non-finite tensors; missing ones count only when the files are `complete`."""
    findings = []
    weights = ", ".join(sorted(set(file_of.values()))) or "weights"
    for name in sorted(tensors.keys() - expected.keys()):
        findings.append(
            fault("unknown", file_of[name], f"this model has no such tensor (shape {_dims(tensors[name].shape)})",
                  "does config.json belong to these weights? Remove it if it is left over from training", name)
        )  # fmt: skip
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            if complete:
                findings.append(
                    fault("missing", weights, f"expected {_dims(shape)}, the tensor is not there",
                          "does config.json belong to these weights? Otherwise download them again", name)
                )  # fmt: skip
        elif tuple(tensor.shape) != shape:
            hint = " (transposed: a Conv1D layout)" if len(shape) == 2 and tuple(tensor.shape) == shape[::-1] else ""
            findings.append(
                fault("shape", file_of.get(name, weights), f"expected {_dims(shape)}, got {_dims(tensor.shape)}{hint}",
                      "config.json and weights disagree: take both from one place", name)
            )  # fmt: skip
        elif name in file_of:
            findings += _value_findings(name, tensor, file_of[name])
    return findings


def _value_findings(name: str, tensor: torch.Tensor, file: str) -> list[Finding]:
    """Non-finite values, and weight-norm directions of length 0 (they would divide by zero)."""
    if tensor.dtype not in FLOAT_DTYPES:
        return []
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        bad = (~finite).flatten()
        where = int(bad.nonzero()[0])
        value = float(tensor.flatten()[where])
        message = f"{int(bad.sum())} of {tensor.numel()} values are not finite, the first is {value} at {where}"
        return [fault("non-finite", file, message, "training diverged or the file is damaged; use another", name)]
    if name.endswith("original1") and bool((tensor.float().flatten(1).norm(dim=1) == 0).any()):
        message = "a row of this weight-norm direction is zero: the weight would be 0 / 0"
        return [fault("non-finite", file, message, DOWNLOAD_AGAIN, name)]
    return []


def _dims(shape: Shape | torch.Size) -> str:
    return f"[{', '.join(map(str, shape))}]"
