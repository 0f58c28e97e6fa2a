"""Write new key and value rows into the device cache: one 2-D copy, or one copy per row where the chip has none.

Device-to-device 2-D copies exist on A2, A3 and 950, not on 310P, and one project saw them corrupt memory on its CANN
build (ATC_AND_ACL.md C.6a). So the copier proves the call on scratch memory before it trusts it.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from runtime.backends.acl_api import AclError, PitchedRows
from runtime.backends.om_device import OmDevice, OmStream, Releases
from runtime.backends.om_layout import HeadRows
from runtime.errors import BackendError

MAX_WIDTH, MAX_HEIGHT = 5_000_000, 5_242_880  # of one 2-D copy (C.6a)


class RowCopy(Enum):
    """How rows are copied; AUTO proves the 2-D copy first and falls back to single rows."""

    AUTO = "auto"
    ONE_2D_COPY = "2d"
    SINGLE_ROWS = "rows"


class RowCopier:
    """Copies runs between two HeadRows layouts, in the way that works on this device."""

    def __init__(self, device: OmDevice, stream: OmStream, wanted: RowCopy = RowCopy.AUTO) -> None:
        self._stream = stream
        reason = "as asked" if wanted is RowCopy.SINGLE_ROWS else prove_2d_copy(device)
        if reason and wanted is RowCopy.ONE_2D_COPY:
            raise BackendError(f"2-D device copies were asked for, but {reason}; leave the choice open or ask for rows")
        self.in_one_copy = not reason
        self.description = "one 2-D copy" if not reason else f"one copy per row ({reason})"

    def copy(self, target: tuple[HeadRows, int], source: tuple[HeadRows, int], width: int, column: int) -> None:
        """Copy the first `width` bytes of every run of `source` to byte `column` of the same run of `target`.

        `target` and `source` are each a layout and the address where it begins.
        """
        (to, to_address), (origin, origin_address) = target, source
        assert (to.num_tensors, to.heads, to.spare) == (origin.num_tensors, origin.heads, origin.spare)
        assert column + width <= to.run_bytes  # the caller refused what does not fit
        if self.in_one_copy and width <= MAX_WIDTH and to.num_runs <= MAX_HEIGHT:
            self._stream.copy_rows(
                PitchedRows(to_address + column, to.run_bytes),
                PitchedRows(origin_address, origin.run_bytes),
                width,
                to.num_runs,
            )
            return
        for tensor in range(to.num_tensors):
            for head in range(to.heads):
                row = to_address + to.offset(tensor, head) + column
                self._stream.copy(row, origin_address + origin.offset(tensor, head), width)


def prove_2d_copy(device: OmDevice) -> str:
    """Copy a pattern with different pitches; "" when exactly the right bytes arrived, else what went wrong."""
    source = np.arange(4 * 128, dtype=np.uint16).astype(np.uint8).reshape(4, 128)
    expected = np.zeros((4, 192), np.uint8)
    expected[:, 64:128] = source[:, :64]
    releases = Releases()
    stream = OmStream(device, releases)  # its own, so that the traffic of the caller stays the caller's
    try:
        pinned = device.malloc_host(source.nbytes + expected.nbytes, releases)
        from_, to = device.malloc(source.nbytes, releases), device.malloc(expected.nbytes, releases)
        releases.add(stream.drain)
        device.acl.memset(to, expected.nbytes, 0)
        pinned.data[: source.nbytes] = source.reshape(-1)
        stream.upload(from_, pinned, source.nbytes)
        try:
            stream.copy_rows(PitchedRows(to + 64, 192), PitchedRows(from_, 128), 64, 4)
            stream.download(pinned, to, expected.nbytes, offset=source.nbytes)
            stream.synchronize()
        except AclError as error:
            return f"acl.{error.call} answered {error.code}"
        except BackendError as error:
            return str(error)
        got = pinned.data[source.nbytes :].reshape(expected.shape)
        return "" if np.array_equal(got, expected) else "the 2-D copy put bytes in wrong places"
    finally:
        releases.abandon()
