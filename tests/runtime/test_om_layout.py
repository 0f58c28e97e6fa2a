"""Where tensors lie in device memory: both rules of self-managed memory hold, and one pitch covers all heads."""

from __future__ import annotations

import pytest

from runtime.backends.om_layout import ALIGNMENT, HeadRows, owned_bytes, pack, spare_heads


def test_pack_aligns_every_tensor_and_gives_it_what_it_must_own() -> None:
    block = pack({"position": 4, "uniforms": 68, "codes": 64})
    assert block.offsets == {"position": 0, "uniforms": 64, "codes": 192}
    assert block.num_bytes == 192 + 128
    assert block.end("codes") == 256


@pytest.mark.parametrize("heads", [1, 2, 4, 12, 16])
@pytest.mark.parametrize("row_bytes", [8, 32, 64, 100, 256, 512])
def test_spare_heads_keep_alignment_and_ownership_at_every_run_length(heads: int, row_bytes: int) -> None:
    spare = spare_heads(heads, row_bytes)
    for rows in (1, 3, 1024):
        layout = HeadRows(num_tensors=6, heads=heads, spare=spare, run_bytes=rows * row_bytes)
        starts = [layout.offset(tensor) for tensor in range(6)]
        assert not any(start % ALIGNMENT for start in starts)
        assert starts[1] - starts[0] >= owned_bytes(layout.tensor_bytes)
        assert layout.num_bytes - starts[-1] >= owned_bytes(layout.tensor_bytes)
        # One pitch over all tensors and heads, which is what makes one 2-D copy possible.
        runs = [layout.offset(t, h) for t in range(6) for h in range(heads + spare)]
        assert runs == [index * layout.run_bytes for index in range(layout.num_runs)]


def test_the_published_size_wastes_one_spare_head() -> None:
    assert spare_heads(heads=12, row_bytes=256) == 1
