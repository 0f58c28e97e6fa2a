"""The codec graphs against the plain reading of MODEL.md section 6, for configs that no published checkpoint has.

The reference works in float64 on the published tensors: dense masks, interleaved RoPE at absolute positions, patches
as defined, one codebook after the other on the full residual. It shares no code with the modules.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from convert.expected_tensors import expected_codec_tensors
from runtime.backends.torch import TorchSession
from runtime.codec import Codec
from runtime.config import CodecConfig, CodecStage
from runtime.errors import CheckpointError
from runtime.graphs import BLOCK_FRAMES, codec_decode_spec, codec_encode_spec, codec_stream_spec
from runtime.modules.codec import build_codec_module
from runtime.modules.codec_state import derive_codec_state

Tensors = dict[str, torch.Tensor]
SPECS = {"codec_encode": codec_encode_spec, "codec_decode": codec_decode_spec, "codec_stream": codec_stream_spec}


def raw_config(
    channels: int, patches: tuple[int, ...], layers: tuple[int, ...], windows: tuple[float, ...], n_vq: int, heads: int
) -> dict[str, Any]:
    """A config.json with one stage per window; the patch of the deepest level stands next to the latents."""
    size, width, latent = 8 * heads, 6, 6 * patches[-1]

    def transformer(index: int, size_in: int, size_out: int) -> dict[str, Any]:
        return {
            "module_type": "Transformer", "input_dimension": size_in, "d_model": size, "output_dimension": size_out,
            "num_layers": layers[index], "num_heads": heads, "dim_feedforward": 3 * size, "norm": "layer_norm",
            "positional_embedding": "rope", "gating": "none", "causal": True, "max_period": 1000.0,
            "context_duration": windows[index],
        }  # fmt: skip

    def patch(number: int) -> dict[str, Any]:
        return {"module_type": "PatchedPretransform", "patch_size": patches[number]}

    encoder: list[dict[str, Any]] = [patch(0)]
    decoder: list[dict[str, Any]] = [patch(-1)]
    for i in range(len(windows)):
        encoder += [transformer(i, patches[0] if i == 0 else width * patches[i], width), patch(i + 1)]
        last = i + 1 == len(windows)
        size_out = patches[0] if last else width * patches[-2 - i]
        decoder += [transformer(-1 - i, width, size_out), patch(-2 - i)]
    return {
        "model_type": "moss-audio-tokenizer", "sampling_rate": math.prod(patches) * 10 // channels,
        "downsample_rate": math.prod(patches) // channels, "number_channels": channels,
        "enable_channel_interleave": True, "encoder_kwargs": encoder, "decoder_kwargs": decoder,
        "quantizer_kwargs": {"quantizer_type": "rlfq", "input_dim": latent, "output_dim": latent, "rvq_dim": 16,
                             "num_quantizers": n_vq, "codebook_size": 20, "codebook_dim": 4},
    }  # fmt: skip


# Windows in seconds of 0.1 s frames: shorter than a frame, no whole number of frames, longer than a block of frames.
CONFIGS = {
    "mono, one stage": raw_config(1, (6, 5), (1,), (0.33,), 3, 1),
    "stereo, windows within and beyond a block": raw_config(2, (4, 2, 3), (2, 1), (0.07, 1.23), 5, 2),
    "three channels, three stages": raw_config(3, (6, 2, 2, 2), (1, 2, 1), (0.45, 0.62, 2.0), 2, 3),
    "a window of one token": raw_config(2, (4, 2), (2,), (0.05,), 1, 2),
}


def random_tensors(config: CodecConfig, rng: np.random.Generator) -> Tensors:
    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape)
        if "norm" in name and name.endswith("weight"):
            return 1 + 0.2 * noise
        if name.endswith("bias"):
            return 0.1 * noise
        if "layer_scale" in name:
            return 0.5 + 0.1 * noise
        if name.endswith("original0"):
            return 1 + 0.2 * rng.random(shape)
        return noise if len(shape) == 3 or "codebook" in name else 1.3 * noise / math.sqrt(shape[1])

    shapes = expected_codec_tensors(config)
    return {name: torch.from_numpy(draw(name, shape).astype(np.float32)) for name, shape in shapes.items()}


def reference_encode(config: CodecConfig, tensors: Tensors, waveform: np.ndarray) -> np.ndarray:
    """Codes [F, Q] of a clip [channels, F * samples_per_frame]."""
    x = torch.from_numpy(waveform.T.reshape(1, -1)).double()  # one stream L0 R0 L1 R1 …
    for stage in config.encoder:
        x = reference_stage("encoder", stage, tensors, reference_patch(x, stage.patch_size))
    x = reference_patch(x, config.encoder_last_patch).T
    W, b = folded(tensors, "quantizer.input_proj")
    residual, codes = x @ W.T + b, []
    for q in range(config.n_vq):
        name = f"quantizer.quantizers.{q}"
        W, b = folded(tensors, f"{name}.in_proj")
        book = tensors[f"{name}.codebook.weight"].double()
        seen = torch.nn.functional.normalize(residual @ W.T + b)
        distance = ((seen[:, None] - torch.nn.functional.normalize(book)[None]) ** 2).sum(-1)
        codes.append(distance.argmin(-1))
        W, b = folded(tensors, f"{name}.out_proj")
        residual = residual - (book[codes[-1]] @ W.T + b)
    return torch.stack(codes, 1).numpy().astype(np.int32)


def reference_decode(config: CodecConfig, tensors: Tensors, codes: np.ndarray) -> np.ndarray:
    """Waveform [channels, N] of codes [F, q], q <= Q."""
    total = torch.zeros(len(codes), config.rvq_size, dtype=torch.float64)
    for q in range(codes.shape[1]):
        W, b = folded(tensors, f"quantizer.quantizers.{q}.out_proj")
        book = tensors[f"quantizer.quantizers.{q}.codebook.weight"].double()
        total += book[torch.from_numpy(codes[:, q]).long()] @ W.T + b
    W, b = folded(tensors, "quantizer.output_proj")
    x = (total @ W.T + b).T
    for stage in config.decoder:
        x = reference_stage("decoder", stage, tensors, reference_unpatch(x, stage.patch_size))
    stream = reference_unpatch(x, config.decoder_last_patch)[0]
    return stream.reshape(-1, config.num_channels).T.numpy()


def reference_patch(x: torch.Tensor, h: int) -> torch.Tensor:
    size, length = x.shape
    return x.reshape(size, length // h, h).permute(0, 2, 1).reshape(size * h, length // h)


def reference_unpatch(x: torch.Tensor, h: int) -> torch.Tensor:
    size, length = x.shape
    return x.reshape(size // h, h, length).permute(0, 2, 1).reshape(size // h, length * h)


def reference_stage(side: str, stage: CodecStage, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    """[input_size, T] -> [output_size, T]."""

    def get(name: str) -> torch.Tensor:
        return tensors[f"{side}.{stage.index}.{name}"].double()

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(y, y.shape[-1:], get(f"{name}.weight"), get(f"{name}.bias"), 1e-5)

    y = x.T @ get("input_proj.weight").T
    t = torch.arange(len(y))
    age = t[:, None] - t[None]
    hidden_keys = (age < 0) | (age >= stage.context)
    for layer in range(stage.num_layers):
        at = f"transformer.layers.{layer}"
        qkv = norm(y, f"{at}.norm1") @ get(f"{at}.self_attn.in_proj.weight").T
        q, k, v = qkv.reshape(len(y), 3, stage.num_heads, stage.head_size).permute(1, 2, 0, 3)
        q, k = interleaved_rope(q, stage.rope_base), interleaved_rope(k, stage.rope_base)
        scores = (q @ k.transpose(1, 2) / math.sqrt(stage.head_size)).masked_fill(hidden_keys, -math.inf)
        mixed = (scores.softmax(-1) @ v).permute(1, 0, 2).reshape(len(y), -1)
        y = y + get(f"{at}.layer_scale_1.scale") * (mixed @ get(f"{at}.self_attn.out_proj.weight").T)
        inner = torch.nn.functional.gelu(norm(y, f"{at}.norm2") @ get(f"{at}.ffn.0.weight").T)
        y = y + get(f"{at}.layer_scale_2.scale") * (inner @ get(f"{at}.ffn.2.weight").T)
    return (y @ get("output_proj.weight").T).T


def interleaved_rope(x: torch.Tensor, base: float) -> torch.Tensor:
    size = x.shape[-1]
    angle = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(0, size, 2).double() / size)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1).flatten(-2)


def folded(tensors: Tensors, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    length = tensors[f"{name}.parametrizations.weight.original0"].double()
    direction = tensors[f"{name}.parametrizations.weight.original1"].double()
    return (length * direction / direction.norm(dim=(1, 2), keepdim=True))[..., 0], tensors[f"{name}.bias"].double()


class Case:
    def __init__(self, raw: dict[str, Any]) -> None:
        self.rng = np.random.default_rng(7)
        self.config = CodecConfig.from_dict(raw)
        self.tensors = random_tensors(self.config, self.rng)
        self.state = derive_codec_state(self.config, self.tensors)

    def session(self, name: str) -> TorchSession:
        module = build_codec_module(name, self.config, self.state)
        return TorchSession(SPECS[name](self.config), module, torch.device("cpu"))

    def codec(self) -> Codec:
        return Codec(self.config, [self.session("codec_encode")], [self.session("codec_stream")])

    def codes(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, self.config.codebook_size, shape, dtype=np.int32)


@pytest.fixture(params=CONFIGS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(CONFIGS[request.param])


def test_streamed_decoding_equals_the_dense_reference(case: Case) -> None:
    codes = case.codes(37, case.config.n_vq)
    expected = reference_decode(case.config, case.tensors, codes)
    with case.codec().stream() as stream:
        pieces = [stream.push(part) for part in np.split(codes, [1, 3, 14])]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, atol=2e-5, rtol=1e-5)


def test_decoding_at_once_equals_the_dense_reference(case: Case) -> None:
    codes = case.codes(2, 5 * BLOCK_FRAMES, case.config.n_vq)
    positions = np.repeat(np.arange(5 * BLOCK_FRAMES, dtype=np.int32)[None], 2, 0)
    feeds = {"codes": np.ascontiguousarray(codes.transpose(0, 2, 1)), "positions": positions}
    waveform = case.session("codec_decode").run(feeds)["waveform"]
    for row in (0, 1):
        expected = reference_decode(case.config, case.tensors, codes[row])
        np.testing.assert_allclose(waveform[row], expected, atol=2e-5, rtol=1e-5)


def test_the_first_codebooks_alone_equal_the_dense_reference(case: Case) -> None:
    codes = case.codes(11, max(1, case.config.n_vq - 1))
    expected = reference_decode(case.config, case.tensors, codes)
    np.testing.assert_allclose(case.codec().decode(codes), expected, atol=2e-5, rtol=1e-5)


def test_encoding_equals_the_dense_reference(case: Case) -> None:
    samples = case.config.samples_per_frame
    waveform = case.rng.standard_normal((case.config.num_channels, 21 * samples + samples // 2)).astype(np.float32)
    codes = case.codec().encode(waveform)
    np.testing.assert_array_equal(codes, reference_encode(case.config, case.tensors, waveform[:, : 21 * samples]))


def test_streams_of_one_batch_may_stand_at_different_positions(case: Case) -> None:
    """Two utterances in one launch of codec_stream: one begins, the other is 5 frames in."""
    codes = case.codes(2, 9, case.config.n_vq)
    session = case.session("codec_stream")
    older = case.codec().stream()
    older.push(codes[1, :5])
    rings, fresh = older._open_rings().feeds(), case.codec().stream()._open_rings().feeds()
    feeds = {name: np.concatenate([fresh[name], rings[name]]) for name in rings}
    feeds["codes"] = np.ascontiguousarray(np.stack([codes[0, :4], codes[1, 5:]]).transpose(0, 2, 1))
    feeds["positions"] = np.array([[0, 1, 2, 3], [5, 6, 7, 8]], np.int32)
    waveform = session.run(feeds)["waveform"]
    first = reference_decode(case.config, case.tensors, codes[0, :4])
    second = reference_decode(case.config, case.tensors, codes[1])[:, 5 * case.config.samples_per_frame :]
    np.testing.assert_allclose(waveform[0], first, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(waveform[1], second, atol=2e-5, rtol=1e-5)


class ScoreCounter(TorchFunctionMode):
    """Counts the attention scores that a module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "softmax":
            self.scores += result.numel()
        return result


def test_attention_grows_with_the_length_and_not_with_its_square(case: Case) -> None:
    module = build_codec_module("codec_decode", case.config, case.state)
    counts = []
    for blocks in (1, 2, 16):
        num_frames = blocks * BLOCK_FRAMES
        positions = torch.arange(num_frames, dtype=torch.int32)[None]
        with ScoreCounter() as counter:
            module(torch.zeros(1, case.config.n_vq, num_frames, dtype=torch.int32), positions)
        counts.append(counter.scores)
    assert counts == [counts[0], 2 * counts[0], 16 * counts[0]]
    assert counts[0] > 0


def test_a_zero_codebook_row_is_refused_by_name(case: Case) -> None:
    case.tensors["quantizer.quantizers.0.codebook.weight"][13] = 0
    with pytest.raises(CheckpointError, match="row 13 of codebook 0 is zero"):
        derive_codec_state(case.config, case.tensors)
