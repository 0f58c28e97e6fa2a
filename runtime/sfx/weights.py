"""The checkpoint of MOSS-SoundEffect: which tensors it holds (docs/soundeffect.md), and the state of each module.

The host gathers embedding rows straight from the mapped file, so the tables need neither RAM nor device memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from runtime.sfx.config import SfxConfig
from runtime.sfx.mapped import MappedTensors

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class SfxWeights:
    """The tensors of a checkpoint directory by name; construction checks every name and shape."""

    def __init__(self, directory: Path, config: SfxConfig) -> None:
        self.directory, self.config = directory, config
        self._mapped = MappedTensors(directory)
        self._mapped.check(tensor_shapes(config), "MOSS-SoundEffect")

    @property
    def dtype(self) -> str:
        """The dtype of the stored matrices: "bfloat16" as released."""
        return self._mapped.dtype("language_model.layers.0.self_attn.q_proj.weight")

    def tensor(self, name: str) -> torch.Tensor:
        """The mapped tensor as a torch view."""
        return self._mapped.tensor(name)

    def embeddings(self) -> Embeddings:
        """The embedding tables, where they lie in the mapped file."""
        codes = [self._mapped.array(f"emb_ext.{i}.weight") for i in range(self.config.n_vq)]
        return Embeddings(self._mapped.array("language_model.embed_tokens.weight"), codes)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Tables on the host: 17 rows are gathered for each row of the model."""

    text: npt.NDArray[Any]  # [vocabulary, E]
    codes: Sequence[npt.NDArray[Any]]  # n_vq of [V + 1, E]

    def embed(self, rows: Ints) -> Floats:
        """Rows [..., 1 + n_vq] -> the sum of the text and code embeddings, float32 [..., E]."""
        total = as_float32(np.asarray(self.text[rows[..., 0]]))
        for book, table in enumerate(self.codes):
            total = total + as_float32(np.asarray(table[rows[..., 1 + book]]))
        return total


def as_float32(array: npt.NDArray[Any]) -> Floats:
    """Values as float32; uint16 is bfloat16, the upper half of a float32."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def tensor_shapes(config: SfxConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape."""
    E, F, D, V = config.hidden_size, config.inner_size, config.head_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"language_model.embed_tokens.weight": (V, E)}
    for i in range(config.num_layers):
        at = f"language_model.layers.{i}."
        shapes |= {
            at + "self_attn.q_proj.weight": (config.num_heads * D, E),
            at + "self_attn.k_proj.weight": (config.num_kv_heads * D, E),
            at + "self_attn.v_proj.weight": (config.num_kv_heads * D, E),
            at + "self_attn.o_proj.weight": (E, config.num_heads * D),
            at + "self_attn.q_norm.weight": (D,),
            at + "self_attn.k_norm.weight": (D,),
            at + "mlp.gate_proj.weight": (F, E),
            at + "mlp.up_proj.weight": (F, E),
            at + "mlp.down_proj.weight": (E, F),
            at + "input_layernorm.weight": (E,),
            at + "post_attention_layernorm.weight": (E,),
        }
    shapes["language_model.norm.weight"] = (E,)
    codes = config.codebook_size + 1
    shapes |= {f"emb_ext.{i}.weight": (codes, E) for i in range(config.n_vq)}
    shapes["lm_heads.0.weight"] = (V, E)
    shapes |= {f"lm_heads.{i + 1}.weight": (codes, E) for i in range(config.n_vq)}
    return shapes


def layer_state(weights: SfxWeights, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The state of one SfxLayer, tensor by tensor: matrices [in, out] as views, norms in float32."""
    at = f"language_model.layers.{layer}."
    matrices = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
                "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
    for ours, theirs in matrices.items():
        yield ours, weights.tensor(f"{at}{theirs}.weight").t()
    norms = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "norm_q": "self_attn.q_norm",
             "norm_k": "self_attn.k_norm"}  # fmt: skip
    for ours, theirs in norms.items():
        vector = weights.tensor(f"{at}{theirs}.weight").float()
        yield ours, vector * weights.config.head_size**-0.5 if ours == "norm_q" else vector


def block_state(weights: SfxWeights, first: int, last: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The state of the SfxBlock of layers [first, last)."""
    for layer in range(first, last):
        for name, tensor in layer_state(weights, layer):
            yield f"layers.{layer - first}.{name}", tensor
    if last == weights.config.num_layers:
        yield "norm.weight", norm_state(weights)


def norm_state(weights: SfxWeights) -> torch.Tensor:
    """The weight of the norm behind the last layer."""
    return weights.tensor("language_model.norm.weight").float()


def inside_state(weights: SfxWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """The state of SfxInsideHeads: two rows of the text head, and the code heads side by side without the pad row."""
    import torch

    c = weights.config
    yield "slots", weights.tensor("lm_heads.0.weight")[[c.gen_slot_id, c.delay_slot_id]].t()
    heads = [weights.tensor(f"lm_heads.{i + 1}.weight")[: c.codebook_size] for i in range(c.n_vq)]
    yield "codes", torch.cat(heads).t()


def text_state(weights: SfxWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """The state of SfxTextHead."""
    yield "text", weights.tensor("lm_heads.0.weight").t()
