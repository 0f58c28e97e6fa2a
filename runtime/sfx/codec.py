"""The 24 kHz codec of MOSS-SoundEffect: the one codec implementation of this project with another config.

The checkpoint holds 32 codebooks and an encoder of 3.5 GB; sounds need the first 16 codebooks and the decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from runtime.config import CodecConfig, read_config_json
from runtime.errors import CheckpointError
from runtime.graphs import codec_stream_spec
from runtime.modules.codec_names import canonical_codec_name
from runtime.sfx.config import SfxConfig
from runtime.sfx.mapped import MappedTensors

if TYPE_CHECKING:
    import torch

    from runtime.codec import Codec

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

UPSTREAM_CHUNK_FRAMES = 100  # upstream decodes sounds in chunks of 8 s


class Decoding(Enum):
    """How clips of more than 10 s are decoded; up to 10 s both are the same (docs/soundeffect.md)."""

    UPSTREAM = "upstream"  # 8 s chunks; the first frames of a chunk do not see all of their 10 s of context
    WHOLE = "whole"  # every frame sees its 10 s of context


def read_sfx_codec_config(directory: Path, model: SfxConfig) -> CodecConfig:
    """The codec's config with the codebooks that the model speaks; CheckpointError when the two do not fit."""
    codec = CodecConfig.from_dict(read_config_json(directory), str(directory / "config.json"))
    got = f"{codec.n_vq} codebooks of {codec.codebook_size}, {codec.sample_rate_hz} Hz, {codec.num_channels} channel(s)"
    if (
        codec.n_vq < model.n_vq
        or codec.codebook_size != model.codebook_size
        or codec.sample_rate_hz != model.sample_rate_hz
        or codec.num_channels != 1
    ):
        raise CheckpointError(
            f"{directory}: expected {model.n_vq} or more codebooks of {model.codebook_size}, "
            f"{model.sample_rate_hz} Hz, 1 channel(s), got {got}; give the 24 kHz MOSS-Audio-Tokenizer as --codec"
        )
    return dataclasses.replace(codec, n_vq=model.n_vq)


def open_sfx_codec(directory: Path, model: SfxConfig, device: str = "cpu") -> Codec:
    """The decoder in PyTorch, float32, from the published checkpoint."""
    import torch

    from runtime.backends.torch import TorchSession
    from runtime.codec import Codec
    from runtime.modules.codec import build_codec_module
    from runtime.sfx.torch_model import open_device

    config = read_sfx_codec_config(directory, model)
    on = open_device(device)
    spec = codec_stream_spec(config)
    with torch.no_grad(), _named_mismatch(directory):
        module = build_codec_module(spec.name, config, decoder_state(directory, config)).to(on)
    return Codec(config, encode=(), stream=(TorchSession(spec, module, on),))


def decoder_state(directory: Path, config: CodecConfig) -> dict[str, torch.Tensor]:
    """The state of the decoding modules; tensors are read from the mapped file as they are needed."""
    from runtime.modules.codec_state import derive_codec_state

    tensors = _CanonicalTensors(MappedTensors(directory), config)
    with _named_mismatch(directory):
        return derive_codec_state(config, tensors, with_encoder=False)


@contextmanager
def _named_mismatch(directory: Path) -> Iterator[None]:
    """What torch says about tensors that are missing or have another shape than the config asks for."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{directory}: tensor {error} is missing; download the checkpoint again") from error
    except (RuntimeError, ValueError, IndexError) as error:
        line = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(f"{directory}: config.json and weights differ ({line}); download both again") from error


def decode(codec: Codec, codes: Ints, decoding: Decoding) -> Floats:
    """Codes [F, n_vq] to a waveform [1, N]."""
    return np.concatenate(list(decode_pieces(codec, codes, decoding)), axis=1)


def decode_pieces(codec: Codec, codes: Ints, decoding: Decoding) -> Iterator[Floats]:
    """The waveform of `decode` as its chunks are ready."""
    return codec.decode_pieces(codes, UPSTREAM_CHUNK_FRAMES if decoding is Decoding.UPSTREAM else None)


class _CanonicalTensors(Mapping[str, "torch.Tensor"]):
    """The mapped tensors under the names of the 48 kHz checkpoint, which has a projection where this one has none."""

    def __init__(self, mapped: MappedTensors, config: CodecConfig) -> None:
        self._mapped = mapped
        self._name = {canonical_codec_name(name): name for name in mapped.stored}
        ends = [
            (f"{side}.{stage.index}.{end}_proj.weight", size, stage.model_size)
            for side, stages in (("encoder", config.encoder), ("decoder", config.decoder))
            for stage in stages
            for end, size in (("input", stage.input_size), ("output", stage.output_size))
        ]
        self._identity = {name: size for name, size, model in ends if size == model and name not in self._name}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._identity:
            import torch

            return torch.eye(self._identity[name])
        return self._mapped.tensor(self._name[name]).float()

    def __iter__(self) -> Iterator[str]:
        return iter((*self._name, *self._identity))

    def __len__(self) -> int:
        return len(self._name) + len(self._identity)
