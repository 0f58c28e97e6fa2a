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
    """The next frames of a clip, with the rings of all layers in, and their new rows out behind the codes."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.codec_ropes = Ropes(config.encoder)
        self.codec_encoder = Encoder(config.encoder, config.encoder_last_patch)
        self.codec_codebooks, self.codec_quantizer = Codebooks(config), Quantizer(config)

    def forward(self, waveform: Tensor, positions: Tensor, *rings: Tensor) -> tuple[Tensor, ...]:
        window = Ring.of(self.config.encoder, rings)
        codes: Tensor = self.codec_quantizer(self.latents(waveform, positions, window), self.codec_codebooks)
        return (codes, *window.new)

    def latents(self, waveform: Tensor, positions: Tensor, window: Window) -> Tensor:
        """What the quantizer gets, [B, F, latent_size]."""
        samples = waveform.transpose(1, 2).flatten(1).unsqueeze(-1)  # channels become one stream L0 R0 L1 R1 …
        latents: Tensor = self.codec_encoder(samples, positions, self.codec_ropes, window)
        return latents


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
        latents, frames = (torch.unflatten(x, 1, (-1, BLOCK_FRAMES)) for x in (self.latents(codes), positions))
        return self.waveform(latents, frames, Blocks(self.config.decoder))


class CodecStream(_Decoding):
    """The next frames, with the rings of all layers in and their new rows out."""

    def forward(self, codes: Tensor, positions: Tensor, *rings: Tensor) -> tuple[Tensor, ...]:
        window = Ring.of(self.config.decoder, rings)
        waveform = self.waveform(self.latents(codes), positions, window)
        return (waveform, *window.new)


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
