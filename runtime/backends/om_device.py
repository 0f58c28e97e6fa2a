"""One NPU as this process uses it: initialisation, context, memory, and a stream that counts what it is asked to do.

Order of release (ATC_AND_ACL.md C.1): data buffers, memory, datasets, description, model, stream, context,
reset_device, finalize. `Releases` runs what was registered in reverse, all of it, whatever fails on the way.
acl.finalize runs once, when the process ends: no document says that acl.init works a second time.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.backends.acl_api import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    Acl,
    PitchedRows,
    import_acl,
)
from runtime.errors import BackendError

LOG = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]


class Releases:
    """What must be freed, in reverse order of registration; a failure never keeps the rest from being freed."""

    def __init__(self) -> None:
        self._pending: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def add(self, release: Callable[..., None], *args: Any) -> None:
        self._pending.append((release, args))

    def close(self) -> None:
        """Free everything; BackendError with the first failure after all has been tried. Idempotent."""
        failures: list[BackendError] = []
        while self._pending:
            release, args = self._pending.pop()
            try:
                release(*args)
            except BackendError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def abandon(self) -> None:
        """Free everything on the way out of another error, which must stay the one that is seen."""
        try:
            self.close()
        except BackendError as error:
            LOG.warning("while cleaning up after an error: %s", error)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Launches, copies and bytes; subtract two readings to get what happened in between."""

    launches: int = 0
    host_to_device_copies: int = 0
    host_to_device_bytes: int = 0
    device_to_host_copies: int = 0
    device_to_host_bytes: int = 0
    device_copies: int = 0
    device_bytes: int = 0
    synchronizations: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __str__(self) -> str:
        return (
            f"{self.launches} launches, {self.host_to_device_copies} copies up ({self.host_to_device_bytes} B), "
            f"{self.device_to_host_copies} down ({self.device_to_host_bytes} B), "
            f"{self.device_copies} on the device ({self.device_bytes} B), {self.synchronizations} synchronizations"
        )


class _Process:
    """acl.init and acl.finalize of this process, and its open devices."""

    def __init__(self, acl: Acl) -> None:
        self.acl = acl
        self.owned = acl.init()  # False: torch_npu did it, and will finalize
        self.devices: dict[int, OmDevice] = {}


_lock = threading.RLock()
_process: _Process | None = None


def open_device(device_id: int) -> OmDevice:
    """The device, shared by all its users in this process; each of them calls `close` once."""
    global _process  # noqa: PLW0603  ACL itself is one per process
    with _lock:
        acl = import_acl()
        if _process is None or not _process.acl.same_module(acl):
            _process = _Process(acl)
            atexit.register(close_all)
        device = _process.devices.get(device_id)
        if device is None:
            device = _process.devices[device_id] = OmDevice(_process.acl, device_id, _process.owned)
        device.users += 1
        return device


def shutdown() -> None:
    """Call acl.finalize; for the end of the process. Devices must be closed before."""
    global _process
    with _lock:
        process, _process = _process, None
        if process is not None and process.owned:
            process.acl.finalize()


def close_all() -> None:
    """Close what backends left open, then finalize."""
    if _process is not None:
        for device in list(_process.devices.values()):
            device.users = 1
            device.close()
    shutdown()


class OmDevice:
    """One NPU with one context, which any thread may use after `activate`."""

    def __init__(self, acl: Acl, device_id: int, owned: bool) -> None:
        self.acl, self.id = acl, device_id
        self.users = 0
        self._releases = Releases()
        try:
            acl.set_device(device_id)
            if owned:  # resetting a device that torch_npu set up would take its memory away
                self._releases.add(acl.reset_device, device_id)
            self._context = acl.create_context(device_id)
            self._releases.add(acl.destroy_context, self._context)
            self.activate()
            self.soc, self.cann = acl.soc_name(), acl.cann_version()
        except BaseException:
            self._releases.abandon()
            raise

    @property
    def label(self) -> str:
        """What the stats print: "om", or "om (simulated)"."""
        return self.acl.label

    def activate(self) -> None:
        """Make the context current in this thread; every entry point calls this first (H10)."""
        self.acl.set_context(self._context)

    def share(self) -> OmDevice:
        """The same device for one user more, who calls `close` once."""
        with _lock:
            self.users += 1
        return self

    def close(self) -> None:
        """One user less; the last one frees context and device."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            if _process is not None and _process.devices.get(self.id) is self:
                del _process.devices[self.id]
            self._releases.close()

    def malloc(self, num_bytes: int, releases: Releases) -> int:
        """Device memory, 64-byte aligned, with undefined content; `releases` frees it."""
        pointer = self.acl.malloc(num_bytes)
        releases.add(self.acl.free, pointer)
        return pointer

    def malloc_host(self, num_bytes: int, releases: Releases) -> PinnedMemory:
        """Pinned host memory for queued copies; `releases` frees it."""
        pointer = self.acl.malloc_host(num_bytes)
        releases.add(self.acl.free_host, pointer)
        raw = (ctypes.c_uint8 * num_bytes).from_address(pointer)
        return PinnedMemory(pointer, np.ctypeslib.as_array(raw))


@dataclass(frozen=True, slots=True, eq=False)
class PinnedMemory:
    """Page-locked host memory: `data` is the same bytes as seen from NumPy."""

    pointer: int
    data: Bytes


class OmStream:
    """A queue of work on a device, in order. Nothing that it copies to the host may be read before `synchronize`."""

    def __init__(self, device: OmDevice, releases: Releases) -> None:
        self._acl, self._device = device.acl, device
        self._handle = self._acl.create_stream()
        releases.add(self._acl.destroy_stream, self._handle)
        self._queued = False
        self._counts = dict.fromkeys((f.name for f in fields(Traffic)), 0)

    @property
    def traffic(self) -> Traffic:
        """Everything since the stream was made."""
        return Traffic(**self._counts)

    def upload(self, target: int, source: PinnedMemory, num_bytes: int, offset: int = 0) -> None:
        """Pinned host memory, from `offset`, to device memory."""
        self._copy(target, source.pointer + offset, num_bytes, HOST_TO_DEVICE, "host_to_device")

    def download(self, target: PinnedMemory, source: int, num_bytes: int, offset: int = 0) -> None:
        """Device memory to pinned host memory, from `offset`."""
        self._copy(target.pointer + offset, source, num_bytes, DEVICE_TO_HOST, "device_to_host")

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Device memory to device memory."""
        self._copy(target, source, num_bytes, DEVICE_TO_DEVICE, "device")

    def copy_rows(self, target: PitchedRows, source: PitchedRows, width: int, height: int) -> None:
        """`height` rows of `width` bytes from device memory to device memory, in one call."""
        self._queued = True
        self._acl.memcpy2d_async(target, source, width, height, DEVICE_TO_DEVICE, self._handle)
        self._count("device", width * height)

    def launch(self, model: int, inputs: int, outputs: int) -> None:
        """Run a model on two datasets."""
        self._queued = True
        self._acl.execute_async(model, inputs, outputs, self._handle)
        self._counts["launches"] += 1

    def synchronize(self) -> None:
        """Wait until everything that was queued is done; errors of the queued work appear here."""
        self._counts["synchronizations"] += 1
        self._acl.synchronize_stream(self._handle)
        self._queued = False  # after a failure work may be left: `drain` waits again

    def drain(self) -> None:
        """Before memory is freed or used again: wait for work that an error left in the queue."""
        if self._queued:
            self.synchronize()

    def recover(self) -> None:
        """Drain on the way out of another error, which must stay the one that is seen."""
        try:
            self.drain()
        except BackendError as error:
            LOG.warning("while waiting for queued work after an error: %s", error)

    def _copy(self, target: int, source: int, num_bytes: int, kind: int, counter: str) -> None:
        self._queued = True
        self._acl.memcpy_async(target, source, num_bytes, kind, self._handle)
        self._count(counter, num_bytes)

    def _count(self, counter: str, num_bytes: int) -> None:
        self._counts[f"{counter}_copies"] += 1
        self._counts[f"{counter}_bytes"] += num_bytes
