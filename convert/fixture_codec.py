"""Made-up weights of the codec: random, every layer with a voice in the result, the loudness that of speech."""

from __future__ import annotations

import numpy as np
import torch

from convert.expected_tensors import expected_codec_tensors
from runtime.config import CodecConfig

SPEECH_RMS = 0.07  # of full scale; noise of this level peaks below 0.5
CALIBRATION_FRAMES = 32


def codec_weights(config: CodecConfig, seed: int) -> dict[str, torch.Tensor]:
    """All tensors by their published names, float32, in published order."""
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_codec_tensors(config).items():
        noise = torch.randn(shape, generator=rng)
        if name.endswith("original0"):  # the lengths of the rows of a weight-normed convolution
            tensors[name] = 1 + 0.2 * torch.rand(shape, generator=rng)
        elif name.endswith("original1") or "codebook" in name:
            tensors[name] = noise
        elif "layer_scale" in name:
            tensors[name] = 0.5 + 0.1 * noise
        elif "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            tensors[name] = 0.05 * noise
        else:
            tensors[name] = noise / shape[1] ** 0.5
    last = f"decoder.{config.decoder[-1].index}.output_proj.weight"
    tensors[last] *= SPEECH_RMS / _rms(config, tensors, seed)
    return tensors


def _rms(config: CodecConfig, tensors: dict[str, torch.Tensor], seed: int) -> float:
    """The level of decoded random codes."""
    from runtime.modules.codec import build_codec_module
    from runtime.modules.codec_state import derive_codec_state

    state = derive_codec_state(config, tensors, with_encoder=False)
    decode = build_codec_module("codec_decode", config, state)
    codes = np.random.default_rng(seed).integers(0, config.codebook_size, (1, config.n_vq, CALIBRATION_FRAMES))
    positions = torch.arange(CALIBRATION_FRAMES, dtype=torch.int32)[None]
    with torch.inference_mode():
        waveform = decode(torch.from_numpy(codes.astype(np.int32)), positions)
    return float(waveform.square().mean().sqrt())
