"""The RowModel in PyTorch: CPU, or an Ascend NPU through torch_npu. The cache stays on the device.

On the host with the stored dtype nothing is copied: the weights are views of the mapped checkpoint, paged in on use.
Embeddings are gathered on the host from the mapped file, so that 1.4 GB of tables never reach the device.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.backends.npu import prepare_npu
from runtime.errors import BackendUnavailableError
from runtime.modules.sfx import SfxInsideHeads, SfxLayer, SfxNorm, SfxTextHead
from runtime.sfx.generate import InsideLogits
from runtime.sfx.row_feeds import row_feeds
from runtime.sfx.row_reader import RowReader
from runtime.sfx.weights import SfxWeights, inside_state, layer_state, norm_state, text_state

if TYPE_CHECKING:
    from collections.abc import Iterable

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

CHUNK_ROWS = 256  # prompt rows read at once
VIEW_ROWS = 64  # the cache is attended in whole multiples of this many rows


class TorchRowModel(RowReader):
    """All layers in one process on one device."""

    def __init__(self, weights: SfxWeights, device: str = "cpu", dtype: str | None = None) -> None:
        super().__init__(weights.config, CHUNK_ROWS, weights.config.max_positions)
        self.device, self.dtype = open_device(device), getattr(torch, dtype or weights.dtype)
        self._embeddings = weights.embeddings()

        def state(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
            """On the device; matrices in the wanted dtype, vectors (norms) in float32."""
            return {n: t.to(self.device, self.dtype if t.ndim > 1 else torch.float32) for n, t in tensors}

        c = self.config
        self._layers = [SfxLayer(c, state(layer_state(weights, i))) for i in range(c.num_layers)]
        self._norm = SfxNorm(c, state([("weight", norm_state(weights))]))
        self._inside = SfxInsideHeads(c, state(inside_state(weights)))
        self._text = SfxTextHead(state(text_state(weights)))
        self._cache: list[tuple[Tensor, Tensor]] = []

    @property
    def backend_name(self) -> str:
        return f"torch {self.device.type} {str(self.dtype).removeprefix('torch.')}"

    def _make_room(self, batch: int, num_rows: int) -> None:
        c = self.config
        shape = (batch, c.num_kv_heads, _whole_views(num_rows), c.head_size)
        self._cache = [
            (torch.zeros(shape, dtype=self.dtype, device=self.device),
             torch.zeros(shape, dtype=self.dtype, device=self.device))
            for _ in range(c.num_layers)
        ]  # fmt: skip

    @torch.no_grad()
    def _read_chunk(self, rows: Ints, counts: Ints) -> Floats:
        used = _whole_views(max(1, int(self._num_cached.max())))
        feeds = row_feeds(self.config, self._num_cached, rows.shape[1], used)
        cos, sin, cache_mask, row_mask = (torch.from_numpy(x).to(self.device) for x in feeds.by_name().values())
        hidden = torch.from_numpy(self._embeddings.embed(rows)).to(self.device)
        for layer, (keys, values) in zip(self._layers, self._cache, strict=True):
            past = keys[:, :, :used], values[:, :, :used]
            hidden, key, value = layer(hidden, cos, sin, cache_mask, row_mask, *past)
            for i, (at, n) in enumerate(zip(self._num_cached.tolist(), counts.tolist(), strict=True)):
                keys[i, :, at : at + n] = key[i, :, :n]
                values[i, :, at : at + n] = value[i, :, :n]
        normed: Floats = self._norm(hidden).cpu().numpy()
        return normed

    @torch.no_grad()
    def inside(self, hidden: Floats) -> InsideLogits:
        """The heads that count inside audio."""
        slots, codes = self._inside(torch.from_numpy(hidden).to(self.device))
        return InsideLogits(slots.cpu().numpy(), codes.cpu().numpy())

    @torch.no_grad()
    def text(self, hidden: Floats) -> Floats:
        """The whole text head."""
        logits: Floats = self._text(torch.from_numpy(hidden).to(self.device)).cpu().numpy()
        return logits

    def close(self) -> None:
        """Drop weights and cache."""
        self._layers, self._cache = [], []
        del self._norm, self._inside, self._text


def _whole_views(num_rows: int) -> int:
    return -(-num_rows // VIEW_ROWS) * VIEW_ROWS


def open_device(name: str) -> torch.device:
    """ "cpu", "npu" or "npu:1"; BackendUnavailableError says what an NPU needs."""
    if name == "cpu":
        return torch.device(name)
    if not re.fullmatch(r"npu(:\d+)?", name):
        raise BackendUnavailableError(f"device {name!r}: expected cpu, npu or npu:N")
    prepare_npu(name)
    return torch.device(name)
