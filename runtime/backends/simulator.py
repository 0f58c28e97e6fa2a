"""A strict stand-in for pyACL, for tests and `--simulate`; it runs fake .om files with ONNX Runtime on the CPU.

It implements the calls that this project makes. What a device answers with an error code gets that code; what
corrupts memory or crashes on a device (double free, freed or unaligned memory, outputs over inputs, a host buffer
touched before synchronize, a leak at finalize) raises AclMisuse. Queued work runs at `synchronize_stream` and not
before, and pinned memory that a queued copy will fill holds 0xFF until then. Never a device result: everything that
prints what ran says "simulated". What it cannot show: time, rounding of float16 builds, kernels, real memory sizes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.acl_api import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    DTYPE_BY_CODE,
    HOST_TO_DEVICE,
    release_number,
)
from runtime.backends.simulator_core import (
    Buffer,
    Context,
    Dataset,
    Description,
    Model,
    SimulatorConfig,
    SimulatorCore,
    Stream,
    Task,
    acl_call,
)
from runtime.backends.simulator_memory import POISON, AclMisuse, Span
from runtime.backends.simulator_model import Failure, SimulatedModel, describe, num_bytes
from runtime.errors import BackendUnavailableError

__all__ = ["AclMisuse", "Simulator", "SimulatorConfig", "ensure_installed", "install", "installed", "uninstall"]

MAX_2D_WIDTH, MAX_2D_HEIGHT = 5_000_000, 5_242_880  # C.6a
_DTYPE_CODES = {name: code for code, name in DTYPE_BY_CODE.items()}


class Simulator(SimulatorCore):
    """The calls; each is named as in pyACL with the dot written as an underscore."""

    # -- process, device, context, stream

    @acl_call(initialized=False)
    def init(self) -> None:
        if self._state == "ready":
            raise Failure(100002, "acl.init was called before")
        if self._state == "finalized":
            raise Failure(500001, "acl.init after acl.finalize is not documented to work")
        self._state = "ready"

    @acl_call()
    def finalize(self) -> None:
        if leaks := self.live():
            raise AclMisuse(f"leaks at acl.finalize: {'; '.join(leaks)}")
        self._state = "finalized"

    @acl_call(values=None)
    def get_soc_name(self) -> str:
        return self.config.soc

    @acl_call(values=1)
    def get_cann_version(self, package: int) -> dict[str, str]:
        return {"version": self.config.cann}

    @acl_call(values=None, initialized=False)
    def get_recent_err_msg(self) -> str | None:
        message = getattr(self._local, "message", None)
        self._local.message = None
        return message

    @acl_call()
    def rt_set_device(self, device: int) -> None:
        if not 0 <= device < self.config.num_devices:
            raise Failure(107001, f"device {device}: this machine has {self.config.num_devices}")
        self._devices.add(device)

    @acl_call()
    def rt_reset_device(self, device: int) -> None:
        if device not in self._devices:
            raise Failure(107001, f"device {device} is not set")
        if any(isinstance(item, Context) and item.device == device for item in self._in_use()):
            raise AclMisuse(f"reset_device({device}) before its contexts are destroyed")
        self._devices.remove(device)

    @acl_call(values=1)
    def rt_create_context(self, device: int) -> int:
        if device not in self._devices:
            raise Failure(107001, f"device {device}: call acl.rt.set_device first")
        context = Context(device)
        self._local.context = context
        return self._new(context)

    @acl_call()
    def rt_set_context(self, context: int) -> None:
        self._local.context = self._item(context, Context)

    @acl_call()
    def rt_destroy_context(self, context: int) -> None:
        item = self._item(context, Context)
        for other in self._in_use():
            if isinstance(other, Stream | Model) and other.context is item:
                raise AclMisuse(f"a context is destroyed before its {type(other).__name__.lower()}")
        self._remove(context, Context).alive = False

    @acl_call(values=1, context=True)
    def rt_create_stream(self) -> int:
        return self._new(Stream(self._context))

    @acl_call(context=True)
    def rt_destroy_stream(self, stream: int) -> None:
        if self._stream(stream).queue:
            raise AclMisuse("a stream is destroyed with queued work; synchronize it first")
        self._remove(stream, Stream)

    @acl_call(context=True)
    def rt_synchronize_stream(self, stream: int) -> None:
        queue = self._stream(stream).queue
        tasks, queue[:] = list(queue), []  # a failing task drops the rest of the queue
        for task in tasks:
            task.run()

    # -- memory

    @acl_call(values=2, context=True)
    def rt_get_mem_info(self, attribute: int) -> tuple[int, int]:
        return self.config.memory_bytes - self.device_bytes, self.config.memory_bytes

    @acl_call(values=1, context=True)
    def rt_malloc(self, size: int, policy: int) -> int:
        if size <= 0 or policy not in (0, 1, 2):
            raise Failure(100000, f"malloc of {size} bytes with policy {policy}")
        if self.device_bytes + size > self.config.memory_bytes:
            raise Failure(207001, f"malloc of {size} bytes: {self.config.memory_bytes - self.device_bytes} are free")
        return self._memory.allocate_device(size)

    @acl_call(context=True)
    def rt_free(self, pointer: int) -> None:
        self._refuse_live_buffers(pointer)
        self._memory.free(pointer, device=True)

    @acl_call(values=1, context=True)
    def rt_malloc_host(self, size: int) -> int:
        if size <= 0:
            raise Failure(100000, f"malloc_host of {size} bytes")
        return self._memory.allocate_host(size)

    @acl_call(context=True)
    def rt_free_host(self, pointer: int) -> None:
        self._refuse_live_buffers(pointer)
        self._memory.free(pointer, device=False)

    def _refuse_live_buffers(self, pointer: int) -> None:
        if pointer not in self._memory.starts():
            return  # Memory.free says what is wrong with it
        allocation = self._memory.span(pointer, 1).allocation
        inside = range(allocation.address, allocation.address + allocation.size)
        if any(isinstance(item, Buffer) and item.pointer in inside for item in self._in_use()):
            raise AclMisuse(f"{pointer:#x} is freed before the data buffers that point into it")
        self._refuse_if_queued(f"{pointer:#x} is freed", lambda task: any(p in inside for p in task.pointers))

    @acl_call(context=True)
    def rt_memset(self, pointer: int, max_bytes: int, value: int, count: int) -> None:
        if count > max_bytes:
            raise Failure(100000, f"memset of {count} bytes into {max_bytes}")
        span = self._memory.span(pointer, count)
        span.view()[:] = value
        if span.allocation.is_device:
            span.written()[:] = True

    @acl_call(context=True)
    def rt_memcpy_async(self, target: int, max_bytes: int, source: int, count: int, kind: int, stream: int) -> None:
        if not 0 < count <= max_bytes:
            raise Failure(100000, f"memcpy of {count} bytes into {max_bytes}")
        self._queue_copy(self._memory.span(target, count), self._memory.span(source, count), kind, self._stream(stream))

    @acl_call(context=True)
    def rt_memcpy2d_async(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
    ) -> None:
        if not (0 < width <= min(MAX_2D_WIDTH, target_pitch, source_pitch) and 0 < height <= MAX_2D_HEIGHT):
            raise Failure(100000, f"memcpy2d of {height} x {width}, pitches {target_pitch} and {source_pitch}")
        if kind == DEVICE_TO_DEVICE and self.config.soc.startswith("Ascend310"):
            raise Failure(100000, "memcpy2d from device to device is not supported on this chip")
        to, origin = (
            self._memory.span(target, width, target_pitch, height),
            self._memory.span(source, width, source_pitch, height),
        )
        self._queue_copy(to, origin, kind, self._stream(stream))

    def _queue_copy(self, target: Span, source: Span, kind: int, stream: Stream) -> None:
        sides = (source.allocation.is_device, target.allocation.is_device)
        wanted = {HOST_TO_DEVICE: (False, True), DEVICE_TO_HOST: (True, False), DEVICE_TO_DEVICE: (True, True)}
        if wanted.get(kind) != sides:
            raise Failure(100000, f"memcpy kind {kind}, but source and target on the device: {sides}")
        if target.overlaps(source):
            raise AclMisuse("source and target of a copy overlap")
        pointers = tuple(s.allocation.address + s.offset for s in (target, source))
        if kind == HOST_TO_DEVICE:
            stream.queue.append(Task(_checked_upload(target, source), 0, pointers))
            return
        if kind == DEVICE_TO_HOST:
            target.view()[:] = POISON  # who reads before synchronize reads this
        stream.queue.append(Task(lambda: _copy(target, source), 0, pointers))

    # -- models

    @acl_call(values=2)
    def mdl_query_size(self, path: str) -> tuple[int, int]:
        om = describe(Path(path))
        return om.work_bytes, om.weight_bytes

    @acl_call(values=1, context=True)
    def mdl_load_from_file(self, path: str) -> int:
        model = SimulatedModel(Path(path), self.config.soc, self.config.cann)
        if self.device_bytes + model.device_bytes > self.config.memory_bytes:
            raise Failure(207018, f"loading needs {model.device_bytes} bytes of device memory")
        return self._new(Model(self._context, model))

    @acl_call(context=True)
    def mdl_unload(self, model: int) -> None:
        item = self._model(model)
        self._refuse_if_queued("a model is unloaded", lambda task: task.model == model)
        if any(isinstance(other, Description) and other.model is item.model for other in self._in_use()):
            raise AclMisuse("a model is unloaded before its description is destroyed")
        self._remove(model, Model)

    def _model(self, handle: int) -> Model:
        if not isinstance(self._handles.get(handle), Model):
            raise Failure(100011, f"{handle} is no loaded model")
        item = self._item(handle, Model)
        if item.context is not self._current:
            raise Failure(107004, "the model was loaded in another context")
        return item

    @acl_call(values=None)
    def mdl_create_desc(self) -> int:
        return self._new(Description())

    @acl_call(context=True)
    def mdl_get_desc(self, description: int, model: int) -> None:
        self._item(description, Description).model = self._model(model).model

    @acl_call()
    def mdl_destroy_desc(self, description: int) -> None:
        self._remove(description, Description)

    def _described(self, description: int) -> SimulatedModel:
        model = self._item(description, Description).model
        if model is None:
            raise Failure(100000, "the description is empty: call acl.mdl.get_desc first")
        return model

    @acl_call(values=None)
    def mdl_get_num_inputs(self, description: int) -> int:
        return len(self._described(description).tensors("input"))

    @acl_call(values=None)
    def mdl_get_num_outputs(self, description: int) -> int:
        return len(self._described(description).tensors("output"))

    @acl_call(values=None)
    def mdl_get_input_name_by_index(self, description: int, index: int) -> str:
        return self._described(description).tensors("input")[index].name

    @acl_call(values=None)
    def mdl_get_output_name_by_index(self, description: int, index: int) -> str:
        return self._described(description).tensors("output")[index].name

    @acl_call(values=None)
    def mdl_get_input_data_type(self, description: int, index: int) -> int:
        return _DTYPE_CODES[self._described(description).tensors("input")[index].dtype]

    @acl_call(values=None)
    def mdl_get_output_data_type(self, description: int, index: int) -> int:
        return _DTYPE_CODES[self._described(description).tensors("output")[index].dtype]

    @acl_call(values=1)
    def mdl_get_input_dims(self, description: int, index: int) -> dict[str, Any]:
        return _dims(self._described(description), "input", index)

    @acl_call(values=1)
    def mdl_get_output_dims(self, description: int, index: int) -> dict[str, Any]:
        return _dims(self._described(description), "output", index)

    @acl_call(values=None)
    def mdl_get_input_size_by_index(self, description: int, index: int) -> int:
        return num_bytes(self._described(description).tensors("input")[index])

    @acl_call(values=None)
    def mdl_get_output_size_by_index(self, description: int, index: int) -> int:
        return num_bytes(self._described(description).tensors("output")[index])

    @acl_call(context=True)
    def mdl_execute_async(self, model: int, inputs: int, outputs: int, stream: int) -> None:
        item, queue = self._model(model), self._stream(stream)
        for other in self._handles.values():
            if isinstance(other, Stream) and other is not queue and any(t.model == model for t in other.queue):
                raise AclMisuse("one model is queued on two streams at once")
        sides = {"input": self._buffers(inputs), "output": self._buffers(outputs)}
        for side, buffers in sides.items():
            item.model.check_buffers(side, buffers)
        spans = {side: [self._tensor_span(item, side, i, b) for i, b in enumerate(bs)] for side, bs in sides.items()}
        _refuse_overlaps(spans["input"], spans["output"])
        pointers = tuple(pointer for buffers in sides.values() for pointer, _ in buffers)
        run = functools.partial(item.model.execute, spans["input"], spans["output"])
        queue.queue.append(Task(run, model, pointers))

    def _tensor_span(self, item: Model, side: str, index: int, buffer: tuple[int, int]) -> Span:
        span = self._memory.span(buffer[0], num_bytes(item.model.tensors(side)[index]))
        if not span.allocation.is_device:
            raise AclMisuse(f"{side} {index} of a model is host memory")
        return span

    # -- datasets

    @acl_call(values=None)
    def mdl_create_dataset(self) -> int:
        return self._new(Dataset())

    @acl_call()
    def mdl_destroy_dataset(self, dataset: int) -> None:
        if any(b in self._handles and b not in self._stuck for b in self._item(dataset, Dataset).buffers):
            raise AclMisuse("a dataset is destroyed before its data buffers, which nobody else can find")
        self._remove(dataset, Dataset)

    @acl_call(values=None)
    def create_data_buffer(self, pointer: int, size: int) -> int:
        self._memory.span(pointer, size)
        return self._new(Buffer(pointer, size))

    @acl_call()
    def destroy_data_buffer(self, buffer: int) -> None:
        self._remove(buffer, Buffer)

    @acl_call(values=1)
    def mdl_add_dataset_buffer(self, dataset: int, buffer: int) -> int:
        self._item(buffer, Buffer)
        self._item(dataset, Dataset).buffers.append(buffer)
        return dataset

    def _buffers(self, dataset: int) -> list[tuple[int, int]]:
        items = [self._item(handle, Buffer) for handle in self._item(dataset, Dataset).buffers]
        return [(item.pointer, item.size) for item in items]


def _dims(model: SimulatedModel, side: str, index: int) -> dict[str, Any]:
    tensor = model.tensors(side)[index]
    return {"name": tensor.name, "dimCount": len(tensor.shape), "dims": list(tensor.shape)}


def _copy(target: Span, source: Span) -> None:
    target.view()[:] = source.view()
    if target.allocation.is_device:
        target.written()[:] = source.written() if source.allocation.is_device else True


def _checked_upload(target: Span, source: Span) -> Callable[[], None]:
    """A queued upload; the device reads the host buffer at some time until synchronize, so it must not change."""
    queued = source.view().copy()

    def upload() -> None:
        if not np.array_equal(source.view(), queued):
            raise AclMisuse("a host buffer changed while a queued copy was reading it; synchronize first")
        _copy(target, source)

    return upload


def _refuse_overlaps(inputs: list[Span], outputs: list[Span]) -> None:
    for a, b in itertools.combinations([*inputs, *outputs], 2):
        if a.overlaps(b):
            raise AclMisuse(
                "two tensors of one run overlap in memory; an output over an input is not proven safe (section J, 5)"
            )


def install(config: SimulatorConfig | None = None) -> Simulator:
    """Make `import acl` find a new simulator; refused where the real pyACL is loaded already."""
    present = sys.modules.get("acl")
    if present is not None and not getattr(present, "SIMULATED", False):
        raise BackendUnavailableError("the real pyACL is loaded in this process; simulate in a process of its own")
    simulator = Simulator(config)
    module = simulator.module()
    sys.modules.update({"acl": module, "acl.rt": module.rt, "acl.mdl": module.mdl})
    return simulator


def uninstall() -> None:
    """Take the simulator away again; whatever it still holds is forgotten."""
    if getattr(sys.modules.get("acl"), "SIMULATED", False):
        for name in ("acl", "acl.rt", "acl.mdl"):
            sys.modules.pop(name, None)


def ensure_installed(targets: Sequence[tuple[str, str]]) -> SimulatorConfig:
    """For `--simulate`: the device and the newest CANN that fake .om files were compiled for, (SoC, CANN) each."""
    present = getattr(sys.modules.get("acl"), "simulator", None)
    if isinstance(present, Simulator):
        return present.config
    if not targets:
        raise BackendUnavailableError(
            "--simulate runs what the fake atc of the tests compiled, and the manifest lists nothing of that kind; "
            "make a tree with python -m tests.fake_cann.tree DIR, source its set_env.sh, and run convert-moss atc"
        )
    soc = targets[0][0]
    cann = max((cann for made_for, cann in targets if made_for == soc), key=release_number)
    return install(SimulatorConfig(soc=soc, cann=cann)).config


@contextlib.contextmanager
def installed(config: SimulatorConfig | None = None) -> Iterator[Simulator]:
    """The simulator for the length of a with block."""
    try:
        yield install(config)
    finally:
        uninstall()
