"""What the simulated driver knows: handles, contexts per thread, injected failures. simulator.py holds the calls."""

from __future__ import annotations

import functools
import itertools
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime.backends.simulator_memory import AclMisuse, Memory
from runtime.backends.simulator_model import Failure, SimulatedModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """The machine that is simulated."""

    soc: str = "Ascend910B4"
    cann: str = "8.5.0"
    num_devices: int = 1
    memory_bytes: int = 32 << 30


@dataclass(slots=True, eq=False)
class Context:
    device: int
    alive: bool = True


@dataclass(slots=True, eq=False)
class Stream:
    context: Context
    queue: list[Task] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Task:
    run: Callable[[], None]
    model: int = 0  # id of the model that runs, 0 for a copy
    pointers: tuple[int, ...] = ()  # memory that must outlive it


@dataclass(slots=True, eq=False)
class Model:
    context: Context
    model: SimulatedModel


@dataclass(slots=True, eq=False)
class Description:
    model: SimulatedModel | None = None


@dataclass(slots=True, eq=False)
class Buffer:
    pointer: int
    size: int


@dataclass(slots=True, eq=False)
class Dataset:
    buffers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Fault:
    call: str
    code: int
    nth: int


def acl_call(*, values: int | None = 0, context: bool = False, initialized: bool = True) -> Callable[..., Any]:
    """Make a method an acl call that returns `values` values and a code; `values=None` returns the plain value."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        head, _, tail = method.__name__.partition("_")
        name = f"{head}.{tail}" if head in ("rt", "mdl") else method.__name__

        @functools.wraps(method)
        def call(self: SimulatorCore, *args: Any) -> Any:
            if name in self._delays:
                time.sleep(self._delays[name])
            with self._lock:
                try:
                    self._enter(name, args, context, initialized)
                    result = method(self, *args)
                except Failure as failure:
                    self._local.message = failure.message
                    return (0 if values is None else failure.code) if not values else (*[0] * values, failure.code)
            if not values:
                return 0 if values == 0 else result
            return (*result, 0) if values > 1 else (result, 0)

        call.acl_name = name  # type: ignore[attr-defined]
        return call

    return decorate


class SimulatorCore:
    """The state of the simulated driver; its decorated methods are the `acl` module."""

    def __init__(self, config: SimulatorConfig | None = None) -> None:
        self.config = config or SimulatorConfig()
        self.calls: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._local = threading.local()  # current context and error message are per thread
        self._state = "new"  # new, ready, finalized
        self._devices: set[int] = set()
        self._memory = Memory()
        self._handles: dict[int, object] = {}
        self._destroyed: dict[int, str] = {}
        self._stuck: set[int] = set()  # an injected failure kept them from being freed: leaks, but nobody's bad order
        self._numbers = itertools.count(0x5000, 8)
        self._faults: list[_Fault] = []
        self._delays: dict[str, float] = {}

    # -- for tests

    def fail(self, call: str, code: int, nth: int = 1) -> None:
        """Let the nth call from now of e.g. "rt.malloc" fail with `code`, without doing anything."""
        self._faults.append(_Fault(call, code, self.calls[call] + nth))

    def slow(self, call: str, seconds: float) -> None:
        """Make every such call take `seconds` longer."""
        self._delays[call] = seconds

    def live(self) -> list[str]:
        """Everything that has not been freed, in words."""
        names = [f"{type(item).__name__.lower()} {handle:#x}" for handle, item in self._handles.items()]
        return names + self._memory.live() + [f"device {device} (no reset_device)" for device in sorted(self._devices)]

    @property
    def device_bytes(self) -> int:
        """Device memory in use: allocations and loaded models."""
        models = [item for item in self._handles.values() if isinstance(item, Model)]
        return self._memory.device_bytes + sum(m.model.device_bytes for m in models)

    def module(self) -> types.ModuleType:
        """The simulator as a module that `import acl` can find."""
        modules = {name: types.ModuleType(f"acl.{name}") for name in ("rt", "mdl")}
        acl = types.ModuleType("acl", __doc__)
        for attribute in dir(type(self)):
            name = getattr(getattr(type(self), attribute), "acl_name", None)
            if name:
                *place, last = name.split(".")
                setattr(modules[place[0]] if place else acl, last, getattr(self, attribute))
        vars(acl).update(modules, SIMULATED=True, simulator=self)
        return acl

    # -- bookkeeping

    def _enter(self, name: str, args: tuple[Any, ...], context: bool, initialized: bool) -> None:
        self.calls[name] += 1
        for fault in self._faults:
            if fault.call == name and fault.nth == self.calls[name]:
                if args and name.rpartition(".")[2].startswith(("destroy_", "unload")):
                    self._stuck.add(args[0])
                if name == "rt.synchronize_stream":
                    self._item(args[0], Stream).queue.clear()  # a stream that fails drops what it still had to do
                raise Failure(fault.code, f"injected failure of acl.{name}, call {fault.nth}")
        if initialized and self._state != "ready":
            raise Failure(100001, f"acl.{name} {'before acl.init' if self._state == 'new' else 'after acl.finalize'}")
        if context and self._current is None:
            raise Failure(107002, f"acl.{name}: no context in this thread; call acl.rt.set_context")

    @property
    def _current(self) -> Context | None:
        context: Context | None = getattr(self._local, "context", None)
        return context if context is not None and context.alive else None

    @property
    def _context(self) -> Context:
        assert self._current is not None  # _enter saw to it
        return self._current

    def _in_use(self) -> list[object]:
        """Live things that must be freed before what they stand on."""
        return [item for handle, item in self._handles.items() if handle not in self._stuck]

    def _new(self, item: object) -> int:
        handle = next(self._numbers)
        self._handles[handle] = item
        return handle

    def _item(self, handle: int, kind: type[T]) -> T:
        item = self._handles.get(handle)
        if not isinstance(item, kind):
            what = self._destroyed.get(handle)
            raise AclMisuse(
                f"{handle!r} is {f'a destroyed {what}' if what else f'no {kind.__name__.lower()}'}, used as "
                f"{kind.__name__.lower()}"
            )
        return item

    def _remove(self, handle: int, kind: type[T]) -> T:
        item = self._item(handle, kind)
        del self._handles[handle]
        self._destroyed[handle] = kind.__name__.lower()
        return item

    def _refuse_if_queued(self, what: str, wanted: Callable[[Task], bool]) -> None:
        for item in self._handles.values():
            if isinstance(item, Stream) and any(wanted(task) for task in item.queue):
                raise AclMisuse(f"{what} while queued work still needs it; synchronize the stream first")

    def _stream(self, handle: int) -> Stream:
        stream = self._item(handle, Stream)
        if stream.context is not self._current:
            raise Failure(107003, "the stream is not in the current context")
        return stream
