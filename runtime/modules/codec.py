"""The graphs of the codec as torch modules: codec_encode, codec_decode, codec_stream (interfaces: runtime/graphs.py).

Positions are frame numbers. They are inputs, so neither RoPE nor a mask needs to know a length.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from runtime.config import CodecConfig
from runtime.graphs import BLOCK_FRAMES
from runtime.modules.codec_quantizer import Codebooks, Dequantizer, Quantizer
from runtime.modules.codec_transformer import Blocks, Decoder, Encoder, Ring, Ropes, Window
from runtime.modules.load import load_state


class CodecEncode(nn.Module):
    """Waveform [B, channels, N], positions [B, F] -> codes [B, Q, F]."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.codec_ropes = Ropes(config.encoder)
        self.codec_encoder = Encoder(config.encoder, config.encoder_last_patch)
        self.codec_codebooks, self.codec_quantizer = Codebooks(config), Quantizer(config)

    def forward(self, waveform: Tensor, positions: Tensor) -> Tensor:
        codes: Tensor = self.codec_quantizer(self.latents(waveform, positions), self.codec_codebooks)
        return codes

    def latents(self, waveform: Tensor, positions: Tensor) -> Tensor:
        """What the quantizer gets, [B, F, latent_size]."""
        block = BLOCK_FRAMES * self.config.samples_per_frame * self.config.num_channels
        samples = torch.unflatten(waveform.transpose(1, 2).flatten(1), 1, (-1, block)).unsqueeze(-1)
        window = Blocks(self.config.encoder)
        latents: Tensor = self.codec_encoder(samples, _blocks(positions), self.codec_ropes, window)
        return latents.flatten(1, 2)


class _Decoding(nn.Module):
    """What codec_decode and codec_stream share."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.codec_ropes = Ropes(config.decoder)
        self.codec_codebooks, self.codec_dequantizer = Codebooks(config), Dequantizer(config)
        self.codec_decoder = Decoder(config.decoder, config.decoder_last_patch)

    def latents(self, codes: Tensor) -> Tensor:
        """What the first stage gets, [B, F, latent_size]."""
        latents: Tensor = self.codec_dequantizer(codes, self.codec_codebooks)
        return latents

    def waveform(self, latents: Tensor, positions: Tensor, window: Window) -> Tensor:
        samples: Tensor = self.codec_decoder(latents, positions, self.codec_ropes, window)
        return torch.unflatten(samples.flatten(1), 1, (-1, self.config.num_channels)).transpose(1, 2)


class CodecDecode(_Decoding):
    """Codes [B, Q, F], positions [B, F] -> waveform [B, channels, N]."""

    def forward(self, codes: Tensor, positions: Tensor) -> Tensor:
        latents = torch.unflatten(self.latents(codes), 1, (-1, BLOCK_FRAMES))
        return self.waveform(latents, _blocks(positions), Blocks(self.config.decoder))


class CodecStream(_Decoding):
    """The next frames, with the rings of all layers in and their new rows out."""

    def forward(self, codes: Tensor, positions: Tensor, *rings: Tensor) -> tuple[Tensor, ...]:
        num_stages = len(self.config.decoder)
        window = Ring(list(rings[:num_stages]), list(rings[num_stages:]))
        waveform = self.waveform(self.latents(codes), positions, window)
        return (waveform, *window.new)


def _blocks(positions: Tensor) -> Tensor:
    return torch.unflatten(positions, 1, (-1, BLOCK_FRAMES))


def build_codec_module(name: str, config: CodecConfig, state: Mapping[str, Tensor]) -> nn.Module:
    """The module of one codec graph with its part of the state; `state` may hold more than the graph needs."""
    builders: dict[str, type[CodecEncode | CodecDecode | CodecStream]] = {
        "codec_encode": CodecEncode,
        "codec_decode": CodecDecode,
        "codec_stream": CodecStream,
    }
    with torch.device("meta"):
        module = builders[name](config)
    return load_state(module, state)
