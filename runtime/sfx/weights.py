"""The checkpoint of MOSS-SoundEffect, mapped into memory and never read as a whole.

Names and shapes are in docs/soundeffect.md. A safetensors file is 8 bytes of header length, a JSON header, and the
tensors; the host gathers embedding rows straight from the mapped file, and torch tensors are views of it (bfloat16 included).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from runtime.errors import CheckpointError
from runtime.sfx.config import SfxConfig

if TYPE_CHECKING:
    import torch

    Matrix = Callable[[torch.Tensor], torch.Tensor]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: str  # F32, F16 or BF16
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class SfxWeights:
    """The tensors of a checkpoint directory by name; construction checks every name and shape."""

    def __init__(self, directory: Path, config: SfxConfig) -> None:
        self.directory, self.config = directory, config
        self._stored = dict(_stored_tensors(directory))
        expected = tensor_shapes(config)
        missing = sorted(set(expected) - set(self._stored))
        if missing:
            raise CheckpointError(f"{directory}: {len(missing)} of {len(expected)} tensors are missing, "
                                  f"{missing[0]} for one; download the checkpoint again")  # fmt: skip
        unknown = sorted(set(self._stored) - set(expected))
        if unknown:
            raise CheckpointError(f"{directory}: {len(unknown)} tensors that MOSS-SoundEffect does not have, "
                                  f"{unknown[0]} for one; is it this model?")  # fmt: skip
        for name, shape in expected.items():
            if self._stored[name].shape != shape:
                raise CheckpointError(f"{directory}: {name}: expected {list(shape)}, got "
                                      f"{list(self._stored[name].shape)}; config.json and weights differ")  # fmt: skip

    @property
    def dtype(self) -> str:
        """The dtype of the stored matrices: "bfloat16" as released."""
        return DTYPE_NAMES[self._stored["language_model.layers.0.self_attn.q_proj.weight"].dtype]

    def array(self, name: str) -> npt.NDArray[Any]:
        """The mapped tensor; bfloat16 as uint16 bit patterns."""
        stored = self._stored[name]
        # Mode "c": pages are read on use; a write (nobody writes) would stay private. torch warns about read-only maps.
        return np.memmap(stored.file, STORED[stored.dtype], mode="c", offset=stored.offset, shape=stored.shape)

    def floats(self, name: str, rows: Ints) -> Floats:
        """Rows of a matrix, gathered from the file, as float32."""
        found = np.asarray(self.array(name)[rows])
        if found.dtype == np.uint16:
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32)

    def tensor(self, name: str) -> torch.Tensor:
        """The mapped tensor as a torch view."""
        import torch

        view = torch.from_numpy(np.asarray(self.array(name)))
        return view.view(torch.bfloat16) if view.dtype == torch.uint16 else view

    def embed(self, rows: Ints) -> Floats:
        """Rows [..., 1 + n_vq] -> the sum of the text and code embeddings, float32 [..., E]."""
        total = self.floats("language_model.embed_tokens.weight", rows[..., 0])
        for book in range(self.config.n_vq):
            total = total + self.floats(f"emb_ext.{book}.weight", rows[..., 1 + book])
        return total


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


def layer_state(weights: SfxWeights, layer: int, matrix: Matrix) -> dict[str, torch.Tensor]:
    """The state of one SfxLayer; `matrix` brings a matrix to its dtype and device (identity keeps the mapped view)."""
    at = f"language_model.layers.{layer}."
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
             "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
    state = {f"layers.{layer}.{k}": matrix(weights.tensor(f"{at}{v}.weight")).t() for k, v in names.items()}
    norms = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "norm_q": "self_attn.q_norm",
             "norm_k": "self_attn.k_norm"}  # fmt: skip
    for k, v in norms.items():
        vector = weights.tensor(f"{at}{v}.weight").float()
        state[f"layers.{layer}.{k}"] = vector * weights.config.head_size**-0.5 if k == "norm_q" else vector
    return state


def inside_state(weights: SfxWeights, matrix: Matrix) -> dict[str, torch.Tensor]:
    """The state of SfxInsideHeads: two rows of the text head, and the code heads side by side without the pad row."""
    import torch

    c = weights.config
    slots = weights.tensor("lm_heads.0.weight")[[c.gen_slot_id, c.delay_slot_id]]
    codes = torch.cat([weights.tensor(f"lm_heads.{i + 1}.weight")[: c.codebook_size] for i in range(c.n_vq)])
    return {"heads.slots": matrix(slots).t(), "heads.codes": matrix(codes).t()}


def _stored_tensors(directory: Path) -> Iterator[tuple[str, StoredTensor]]:
    for file in _files(directory):
        yield from _header(file)


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is no safetensors index ({error!r}); download it again") from error
    else:
        names = ["model.safetensors"]
    files = [directory / name for name in names]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; expected model.safetensors or the shards of {INDEX_NAME}")
    return files


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise CheckpointError(f"{file} is no safetensors file ({size} bytes); download it again")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file}: its header is not JSON ({error}); download it again") from error
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: damaged entry for {name}; download it again") from error
        if dtype not in STORED:
            raise CheckpointError(f"{file}: {name} is {dtype}; expected {', '.join(STORED)}")
        if end - begin != math.prod(shape) * STORED[dtype].itemsize or 8 + length + end > size:
            raise CheckpointError(f"{file}: {name} does not fit into the file of {size} bytes; download it again")
        yield name, StoredTensor(file, dtype, shape, 8 + length + begin)
