"""The codec's transformer stages: pre-LN attention inside a window of keys, and the patches between the stages.

    x = x + W_out attention(LN(x));   x = x + W2 gelu(W1 LN(x))          (MODEL.md 6.2; layer scale lies in W_out, W2)
    a query at token t sees the keys t - context + 1 … t

Values are [B, …, tokens, size]. Where the keys before a token come from is the business of a `Window`: `Blocks` takes
them from the frames before in the same graph, `Ring` from the caches that come in. The layers do not know which.

RoPE pairs lie as halves (the q and k rows of the weights are permuted, runtime/modules/codec_state.py), and the angle
of token t = 1024 a + b is the sum of two angles from tables: cos(a + b) = cos a cos b - sin a sin b. The tables are
computed in float64, so the angle is exact for 2^20 tokens: 43 minutes at 400 tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.config import CodecStage
from runtime.graphs import BLOCK_FRAMES, NO_FRAME
from runtime.modules.scope import label, scope
from runtime.sampling import MASKED

ROPE_TABLE = 1024  # entries of each of the two tables; their product is the number of tokens
LAYER_NORM_EPS = 1e-5


def weight(*shape: int) -> nn.Parameter:
    """A place for a tensor of the derived state."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Window(Protocol):
    """What the queries of one attention layer may look at."""

    def positions(self, stage: int, positions: Tensor) -> Tensor:
        """The frames of all keys, from the frames of the queries."""
        ...

    def extend(self, stage: CodecStage, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [B, …, H, tokens, D], from those of the queries. Called once per layer, in order."""
        ...


class Blocks:
    """Blocks of BLOCK_FRAMES frames [B, blocks, …]; a block sees itself and as many frames before as the window needs.

    The work per block is constant, so it grows with the number of frames, not with its square.
    """

    def __init__(self, stages: tuple[CodecStage, ...]) -> None:
        self.stages = stages

    def positions(self, stage: int, positions: Tensor) -> Tensor:
        return _with_blocks_before(positions, -1, _frames_before(self.stages[stage]), 1, NO_FRAME)

    def extend(self, stage: CodecStage, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        frames, per_frame = _frames_before(stage), stage.tokens_per_frame
        return tuple(_with_blocks_before(x, -2, frames, per_frame, 0) for x in (key, value))  # type: ignore[return-value]  # two in, two out


class Ring:
    """The caches that came in, and then the chunk itself. Collects the new rows on the way."""

    def __init__(self, past_positions: list[Tensor], past: list[Tensor]) -> None:
        self.past_positions, self.past = past_positions, past
        self.new: list[Tensor] = []

    @staticmethod
    def of(stages: tuple[CodecStage, ...], rings: Sequence[Tensor]) -> Ring:
        """From the ring inputs of a graph in the order of its spec: past_positions_s, then past_key_i, past_value_i."""
        return Ring(list(rings[: len(stages)]), list(rings[len(stages) :]))

    def positions(self, stage: int, positions: Tensor) -> Tensor:
        return torch.cat([self.past_positions[stage], positions], -1)

    def extend(self, stage: CodecStage, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        at = len(self.new)
        self.new += [key, value]
        return torch.cat([self.past[at], key], -2), torch.cat([self.past[at + 1], value], -2)


def _frames_before(stage: CodecStage) -> int:
    return -(-(stage.context - 1) // stage.tokens_per_frame)


def _with_blocks_before(x: Tensor, axis: int, frames: int, per_frame: int, fill: float) -> Tensor:
    """Prepend to each block [B, blocks, …] the `frames` before it along `axis`; `fill` stands before the first one."""
    if not frames:
        return x
    count = -(-frames // BLOCK_FRAMES)
    padded = functional.pad(x, [0, 0] * (x.ndim - 2) + [count, 0], value=fill)
    pieces = [padded[:, i : i - count] for i in range(count)]
    if surplus := (count * BLOCK_FRAMES - frames) * per_frame:
        pieces[0] = pieces[0][..., surplus:] if axis == -1 else pieces[0][..., surplus:, :]
    return torch.cat([*pieces, x], axis)


class Rope(nn.Module):
    """cos and sin of every angle of one head size; sin carries the sign of the half that it multiplies."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.coarse_cos, self.coarse_sin = weight(ROPE_TABLE, head_size), weight(ROPE_TABLE, head_size)
        self.fine_cos, self.fine_sin = weight(ROPE_TABLE, head_size), weight(ROPE_TABLE, head_size)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, …, n] -> cos, sin [B, …, 1, n, D], one for all heads."""
        fine = torch.remainder(tokens, ROPE_TABLE)
        # exact in float32 (multiples of a power of two below 2**24); an integer Div is not documented to truncate in GE
        coarse = ((tokens - fine).to(torch.float32) * (1.0 / ROPE_TABLE)).to(torch.int32)
        coarse_cos, coarse_sin = (functional.embedding(coarse, t) for t in (self.coarse_cos, self.coarse_sin))
        fine_cos, fine_sin = (functional.embedding(fine, t) for t in (self.fine_cos, self.fine_sin))
        cos = coarse_cos * fine_cos - coarse_sin * fine_sin
        sin = coarse_sin * fine_cos + coarse_cos * fine_sin
        return label(cos, "cos").unsqueeze(-3), label(sin, "sin").unsqueeze(-3)


class Attention(nn.Module):
    def __init__(self, stage: CodecStage) -> None:
        super().__init__()
        self.stage = stage
        self.qkv = weight(stage.model_size, 3 * stage.model_size)
        self.out = weight(stage.model_size, stage.model_size)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, window: Window) -> Tensor:
        H, D = self.stage.num_heads, self.stage.head_size
        heads = torch.unflatten(label(x @ self.qkv, "qkv"), -1, (3 * H, D)).transpose(-3, -2)
        rotated, value = torch.split(heads, [2 * H, H], -3)
        query, key = torch.split(_rotate(rotated, rope, D), [H, H], -3)
        keys, values = window.extend(self.stage, key, value)
        scores = label(query @ keys.transpose(-1, -2), "scores") + mask
        mixed = label(torch.softmax(scores, -1) @ values, "mixed")
        return label(mixed.transpose(-3, -2).flatten(-2) @ self.out, "out")


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor], head_size: int) -> Tensor:
    cos, sin = rope
    first, second = torch.split(x, [head_size // 2, head_size // 2], -1)
    return label(x * cos + torch.cat([second, first], -1) * sin, "rotated")


class FeedForward(nn.Module):
    def __init__(self, stage: CodecStage) -> None:
        super().__init__()
        self.up = weight(stage.model_size, stage.inner_size)
        self.down = weight(stage.inner_size, stage.model_size)

    def forward(self, x: Tensor) -> Tensor:
        return label(functional.gelu(label(x @ self.up, "up")) @ self.down, "down")


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight, self.bias = weight(size), weight(size)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (self.size,), self.weight, self.bias, LAYER_NORM_EPS)


class Layer(nn.Module):
    def __init__(self, stage: CodecStage) -> None:
        super().__init__()
        self.norm_1, self.attention = Norm(stage.model_size), Attention(stage)
        self.norm_2, self.feed_forward = Norm(stage.model_size), FeedForward(stage)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, window: Window) -> Tensor:
        attended: Tensor = x + self.attention(self.norm_1(x), rope, mask, window)
        out: Tensor = attended + self.feed_forward(self.norm_2(attended))
        return out


class Transformer(nn.Module):
    """One stage without its patch: project in, layers, project out."""

    def __init__(self, stage: CodecStage, number: int) -> None:
        super().__init__()
        self.stage, self.number = stage, number
        self.input_proj = weight(stage.input_size, stage.model_size)
        self.output_proj = weight(stage.model_size, stage.output_size)
        self.layers = nn.ModuleList([Layer(stage) for _ in range(stage.num_layers)])

    def forward(self, x: Tensor, positions: Tensor, rope: nn.Module, window: Window) -> Tensor:
        tokens = self._tokens(positions)
        with scope("window"):
            mask = self._mask(tokens, self._tokens(window.positions(self.number, positions)))
        cos_sin = rope(tokens)
        x = label(x @ self.input_proj, "input_proj")
        for layer in self.layers:
            x = layer(x, cos_sin, mask, window)
        return label(x @ self.output_proj, "output_proj")

    def _tokens(self, frames: Tensor) -> Tensor:
        """Token positions from frame positions."""
        per_frame = self.stage.tokens_per_frame
        within = torch.arange(per_frame, dtype=torch.int32, device=self.input_proj.device)
        return (frames.unsqueeze(-1) * per_frame + within).flatten(-2)

    def _mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What is added to the scores, [B, …, 1, queries, keys]: 0 inside the window, MASKED outside."""
        age = queries.unsqueeze(-1) - keys.unsqueeze(-2)
        seen = torch.logical_and(age >= 0, age < self.stage.context)
        open_, closed = (torch.tensor(v, dtype=self.input_proj.dtype) for v in (0.0, MASKED))
        return label(torch.where(seen, open_, closed), "mask").unsqueeze(-3)


class Ropes(nn.ModuleDict):
    """One set of RoPE tables for each kind of head; the published codec has one kind."""

    def __init__(self, stages: tuple[CodecStage, ...]) -> None:
        super().__init__({rope_name(s): Rope(s.head_size) for s in stages})

    def of(self, stage: CodecStage) -> nn.Module:
        return self[rope_name(stage)]


def rope_name(stage: CodecStage) -> str:
    return f"rope_{stage.head_size}_{stage.rope_base:g}".replace(".", "_")


class Encoder(nn.Module):
    """Samples [B, …, n, 1] to latents [B, …, frames, latent_size]."""

    def __init__(self, stages: tuple[CodecStage, ...], last_patch: int) -> None:
        super().__init__()
        self.last_patch = last_patch
        self.stages = nn.ModuleList([Transformer(s, number) for number, s in enumerate(stages)])

    def forward(self, x: Tensor, positions: Tensor, ropes: Ropes, window: Window) -> Tensor:
        for module in self.stages:
            stage = cast(Transformer, module).stage
            x = module(_join(x, stage.patch_size), positions, ropes.of(stage), window)
        return _join(x, self.last_patch)


class Decoder(nn.Module):
    """Latents [B, …, frames, latent_size] to samples [B, …, n, 1]."""

    def __init__(self, stages: tuple[CodecStage, ...], last_patch: int) -> None:
        super().__init__()
        self.last_patch = last_patch
        self.stages = nn.ModuleList([Transformer(s, number) for number, s in enumerate(stages)])

    def forward(self, x: Tensor, positions: Tensor, ropes: Ropes, window: Window) -> Tensor:
        for module in self.stages:
            stage = cast(Transformer, module).stage
            x = module(_split(x, stage.patch_size, stage.input_size), positions, ropes.of(stage), window)
        return _split(x, self.last_patch, 1)


def _join(x: Tensor, patch_size: int) -> Tensor:
    """Patch: [..., n, size] -> [..., n / patch, patch * size]. The weights behind it expect this order."""
    return x if patch_size == 1 else torch.unflatten(x, -2, (-1, patch_size)).flatten(-2)


def _split(x: Tensor, patch_size: int, size: int) -> Tensor:
    """Unpatch: [..., n, patch * size] -> [..., n * patch, size]. The weights before it compute this order."""
    return x if patch_size == 1 else torch.unflatten(x, -1, (patch_size, size)).flatten(-3, -2)
