"""Write a made-up checkpoint in the published layout: DIR/model and DIR/codec, tokenizer included.

tiny    model.safetensors in bfloat16 without the tied heads, as transformers saves it
full    pytorch_model.bin in bfloat16, 194 keys, tied tensors sharing their storage, as published
codec   one float32 safetensors shard with an index, weight norm as parametrizations, as published

The weights mean nothing: the sound is noise. config.json and a README beside it say so; each directory is written
aside and then moved, so there is never half a checkpoint. How the weights are arranged: convert/fixture_model.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from convert.expected_tensors import expected_model_tensors, tied_heads
from convert.fixture_codec import codec_weights
from convert.fixture_configs import SIZES, Size, codec_config_json, model_config_json
from convert.fixture_model import ModelDesigner
from convert.fixture_tokenizer import train_tokenizer
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import CheckpointError
from runtime.manifest import MADE_UP_NOTICE
from runtime.prompt import PromptBuilder
from runtime.tokenizer import Tokenizer

README = f"""# Not a voice

This is a fixture: {MADE_UP_NOTICE}.
Written by `convert-moss fixture --size {{size}} --seed {{seed}}`, to test without the published weights.
"""


def write_fixture(directory: Path, size: Size = "tiny", seed: int = 0) -> tuple[Path, Path]:
    """Write `directory`/model and `directory`/codec; return both paths. Other contents there are refused."""
    if seed < 0:
        raise CheckpointError(f"seed: expected 0 or more, got {seed}")
    for name in ("model", "codec"):
        _refuse_foreign(directory / name)
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / "model", lambda scratch: _write_model(scratch, size, seed))
    _replace(directory / "codec", lambda scratch: _write_codec(scratch, size, seed))
    return directory / "model", directory / "codec"


def _refuse_foreign(target: Path) -> None:
    """Only a directory that a fixture wrote may be replaced."""
    readme = target / "README.md"
    if target.exists() and not (readme.is_file() and readme.read_text(encoding="utf-8").startswith("# Not a voice")):
        raise CheckpointError(f"{target} exists and is not a fixture; choose another directory")


def _replace(target: Path, write: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        scratch.chmod(0o755)
        write(scratch)
        for file in scratch.iterdir():
            file.chmod(0o644)  # safetensors writes 0600
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write_model(scratch: Path, size: Size, seed: int) -> None:
    import safetensors.torch

    raw = model_config_json(SIZES[size])
    config = ModelConfig.from_dict(raw)
    _write_common(scratch, raw, size, seed)
    (scratch / "tokenizer.model").write_bytes(train_tokenizer())
    weights = ModelDesigner(config, _text_distance(config, scratch / "tokenizer.model"), seed).build()
    tensors = {name: torch.from_numpy(value).to(torch.bfloat16).contiguous() for name, value in weights.items()}
    heads = tied_heads(config)
    order = list(expected_model_tensors(config))
    if size == "tiny":
        stored = {name: tensors[name] for name in order if name not in heads}
        safetensors.torch.save_file(stored, scratch / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save({name: tensors[heads.get(name, name)] for name in order}, scratch / "pytorch_model.bin")


def _write_codec(scratch: Path, size: Size, seed: int) -> None:
    import safetensors.torch

    raw = codec_config_json(SIZES[size])
    _write_common(scratch, raw, size, seed)
    tensors = codec_weights(CodecConfig.from_dict(raw), seed)
    shard = "model-00001-of-00001.safetensors"
    safetensors.torch.save_file(tensors, scratch / shard, metadata={"format": "pt"})
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), shard)}
    (scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _write_common(scratch: Path, raw: dict[str, object], size: Size, seed: int) -> None:
    (scratch / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    (scratch / "README.md").write_text(README.format(size=size, seed=seed), encoding="utf-8")


def _text_distance(config: ModelConfig, tokenizer_path: Path) -> int:
    """Rows from the last [audio_start] back to the last but one token of the text: what follows the text, and one."""
    tokenizer = Tokenizer(tokenizer_path)
    builder = PromptBuilder(config, tokenizer)
    first, second = (builder.continuation(text)[::-1, 0] for text in ("!", "?"))
    return next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b) + 1
