"""What `convert-moss doctor` says about a checkpoint directory: what it is, whether it can be used, what was found."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from convert.checkpoint import Examination, examine
from runtime.config import CodecConfig, ModelConfig
from runtime.manifest import MADE_UP_NOTICE


def doctor_report(source: str | Path) -> tuple[dict[str, Any], Examination]:
    """The facts as JSON, and the examination they come from."""
    examined = examine(source)
    facts = {
        "directory": str(examined.directory),
        "kind": examined.kind,
        "usable": not examined.blocked,
        "made_up": examined.made_up,
        "parameters": examined.num_parameters or None,
        "storage_dtype": examined.storage_dtype,
        "tied_heads": examined.tied,
        "tokenizer_pieces": examined.tokenizer_pieces,
        "config": asdict(examined.config) if examined.config else None,
        "files": examined.files,
        "findings": [asdict(finding) for finding in examined.findings],
    }
    return facts, examined


def doctor_lines(examined: Examination) -> list[str]:
    """The same for people."""
    lines = [f"{examined.directory}: {_what(examined)}"]
    if examined.made_up:
        lines.append(f"note: {MADE_UP_NOTICE}")
    if examined.num_parameters:
        lines.append(f"weights: {examined.num_parameters:,} parameters stored as {examined.storage_dtype}")
    if examined.tied is not None:
        lines.append("heads: tied to the embeddings" if examined.tied else "heads: not all tied to the embeddings")
    if examined.kind == "model":
        pieces = examined.tokenizer_pieces
        lines.append(f"tokenizer: {pieces:,} pieces" if pieces is not None else "tokenizer: none that loads")
    lines += [f"{'BLOCKS' if f.blocks else 'notice'} [{f.rule}] {f}" for f in examined.findings]
    faults = sum(f.blocks for f in examined.findings)
    lines.append(f"not usable: {faults} faults" if faults > 1 else "not usable: 1 fault" if faults else "usable")
    return lines


def _what(examined: Examination) -> str:
    config = examined.config
    if isinstance(config, ModelConfig):
        return (
            f"language model, {config.num_layers} global and {config.local_layers} local blocks of width "
            f"{config.hidden_size}, {config.vocab_size} ids, {config.n_vq} codebooks of {config.codebook_size}"
        )
    if isinstance(config, CodecConfig):
        return (
            f"codec, {config.sample_rate_hz} Hz, {config.num_channels} channels, {config.samples_per_frame} samples "
            f"per frame, {config.n_vq} codebooks of {config.codebook_size}"
        )
    return "not recognised as a language model or a codec"
