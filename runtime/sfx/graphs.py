"""The graphs of MOSS-SoundEffect: from config and plan to the interface of every exported part.

    block_0 … block_n   layers in order; hidden float32 in and out, keys and values of the past in, of the new rows out
    inside_heads        hidden -> slot logits and code logits
    text_head           hidden -> logits of the whole vocabulary, needed outside audio only
    codec_stream        codes -> waveform (runtime/graphs.py, with this codec's config)

One block shape serves prompt and steps: R rows per launch, so the weights are on the device once; a step uses one of
the R rows. Axes that stay names until they are bound: B batch, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import SpecMismatchError
from runtime.sfx.config import SfxConfig
from runtime.spec import Axis, GraphSpec, TensorSpec

HEADS = ("inside_heads", "text_head")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class SfxPlan:
    """How the model is cut into graphs, and the numbers that they are compiled for."""

    layers_per_block: int = 9  # 3.5 GB of bfloat16 weights per block at full size
    rows: int = 16  # R: one tile of the matrix unit, so that a step costs no more than its weights
    capacity: int = 1024  # C: rows of prompt and sound; 1024 hold a prompt of 250 rows and 60 s
    dtype: str = "bfloat16"
    codec_frames: int = 100  # per launch of codec_stream: upstream's 8 s

    def __post_init__(self) -> None:
        for name in ("layers_per_block", "rows", "capacity", "codec_frames"):
            if getattr(self, name) < 1:
                raise SpecMismatchError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if self.rows > self.capacity:
            raise SpecMismatchError(f"rows {self.rows} per launch do not fit into a cache of {self.capacity}")
        if self.dtype not in DTYPES:
            raise SpecMismatchError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")

    def blocks(self, config: SfxConfig) -> list[Block]:
        """The blocks in order."""
        n = self.layers_per_block
        firsts = range(0, config.num_layers, n)
        return [Block(f"block_{i}", first, min(first + n, config.num_layers)) for i, first in enumerate(firsts)]

    def axes(self, batch: int = 1) -> dict[str, int]:
        """The numbers of the open axes of the language model's graphs."""
        return {"B": batch, "C": self.capacity}


@dataclass(frozen=True, slots=True)
class Block:
    """Layers [first, last) as one graph."""

    name: str
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


def sfx_graph_specs(config: SfxConfig, plan: SfxPlan) -> dict[str, GraphSpec]:
    """Every graph of the language model, by name, in the order they run."""
    specs = [block_spec(config, block, plan) for block in plan.blocks(config)]
    return {spec.name: spec for spec in (*specs, inside_spec(config), text_spec(config))}


def block_spec(config: SfxConfig, block: Block, plan: SfxPlan) -> GraphSpec:
    """R rows through some layers. `hidden`, rotations and masks are float32; the cache has the dtype of the weights."""
    D, G, E, R = config.head_size, config.num_kv_heads, config.hidden_size, plan.rows

    def cache(prefix: str, length: Axis) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(f"{prefix}_{kind}_{layer}", plan.dtype, ("B", G, length, D))
            for layer in range(block.first, block.last)
            for kind in ("key", "value")
        )

    return GraphSpec(
        block.name,
        (
            TensorSpec("hidden", "float32", ("B", R, E)),
            TensorSpec("cos", "float32", ("B", 1, 1, R, D)),
            TensorSpec("sin", "float32", ("B", 1, 1, R, D)),
            TensorSpec("cache_mask", "float32", ("B", 1, 1, "C")),
            TensorSpec("row_mask", "float32", (R * config.heads_per_kv, R)),
            *cache("past", "C"),
        ),
        (TensorSpec("hidden_next", "float32", ("B", R, E)), *cache("new", R)),
    )


def inside_spec(config: SfxConfig) -> GraphSpec:
    """The heads that count inside audio."""
    return GraphSpec(
        "inside_heads",
        (TensorSpec("hidden", "float32", ("B", config.hidden_size)),),
        (
            TensorSpec("slot_logits", "float32", ("B", 2)),  # gen_slot, delay_slot
            TensorSpec("code_logits", "float32", ("B", config.n_vq, config.codebook_size)),
        ),
    )


def text_spec(config: SfxConfig) -> GraphSpec:
    """The whole text head."""
    return GraphSpec(
        "text_head",
        (TensorSpec("hidden", "float32", ("B", config.hidden_size)),),
        (TensorSpec("text_logits", "float32", ("B", config.vocab_size)),),
    )
