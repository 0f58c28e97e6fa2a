"""The RowModel on exported graphs, its cache in preallocated NumPy arrays: ONNX Runtime, or .om files through pyACL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Session
from runtime.errors import CapacityError
from runtime.sfx.config import SfxConfig
from runtime.sfx.generate import InsideLogits
from runtime.sfx.graphs import SfxPlan
from runtime.sfx.row_feeds import row_feeds
from runtime.sfx.row_reader import RowReader
from runtime.sfx.weights import Embeddings
from runtime.spec import Array, numpy_dtype

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class SessionRowModel(RowReader):
    """Blocks in order, then the heads. Every launch takes R rows; what is missing is padded on the right."""

    def __init__(
        self,
        config: SfxConfig,
        plan: SfxPlan,
        embeddings: Embeddings,
        blocks: Sequence[Session],
        inside_heads: Session,
        text_head: Session,
        backend_name: str,
    ) -> None:
        super().__init__(config, plan.rows, min(plan.capacity, config.max_positions))
        self.plan, self.backend_name = plan, backend_name
        self._embeddings, self._blocks = embeddings, tuple(blocks)
        self._inside, self._text = inside_heads, text_head
        self._cache: dict[str, Array] = {}

    def _make_room(self, batch: int, num_rows: int) -> None:
        compiled = self._blocks[0].spec.inputs[0].shape[0]
        if isinstance(compiled, int) and batch != compiled:
            raise CapacityError(
                f"{batch} requests side by side; the graphs are compiled for {compiled}: run them in turn"
            )
        shape = (batch, self.config.num_kv_heads, self.plan.capacity, self.config.head_size)
        names = [t.name for block in self._blocks for t in block.spec.inputs if t.name.startswith("past_")]
        self._cache = {name: np.zeros(shape, numpy_dtype(self.plan.dtype)) for name in names}

    def _read_chunk(self, rows: Ints, counts: Ints) -> Floats:
        whole = np.zeros((len(rows), self.plan.rows, rows.shape[2]), np.int32)
        whole[:, : rows.shape[1]] = rows
        hidden = self._embeddings.embed(whole)
        feeds = row_feeds(self.config, self._num_cached, self.plan.rows, self.plan.capacity).by_name()
        for block in self._blocks:
            past = {t.name: self._cache[t.name] for t in block.spec.inputs if t.name in self._cache}
            outputs = block.run({"hidden": hidden, **feeds, **past})
            hidden = outputs["hidden_next"]
            for name, cache in past.items():
                new = outputs[name.replace("past_", "new_", 1)]
                for i, (at, n) in enumerate(zip(self._num_cached, counts, strict=True)):
                    cache[i, :, at : at + n] = new[i, :, :n]
        return hidden

    def inside(self, hidden: Floats) -> InsideLogits:
        """The heads that count inside audio."""
        outputs = self._inside.run({"hidden": hidden})
        return InsideLogits(outputs["slot_logits"], outputs["code_logits"])

    def text(self, hidden: Floats) -> Floats:
        """The whole text head."""
        logits: Floats = self._text.run({"hidden": hidden})["text_logits"]
        return logits

    def close(self) -> None:
        """Close every session."""
        for session in (*self._blocks, self._inside, self._text):
            session.close()
