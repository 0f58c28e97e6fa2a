"""One copy of the weights for every graph of the language model, where a session packs weights for itself.

ONNX Runtime lays the weights of each session out anew, as its matrix kernels want them: fast, and one more copy of
340 MB for each of prefill, step and step_frame. `extend` reads any number of rows against the cache, so one session of
it can stand for all three, with `frame` beside it:

    prefill     =  extend on T rows, with nothing visible in the cache
    step        =  extend on one row
    step_frame  =  extend on one row, then frame

`SharedBackend` opens these two and gives out sessions with the interfaces of the graphs above; whoever runs the model
need not know. docs/performance.md has what it saves. ATC compiles the graphs themselves: parity runs those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from runtime.backends.base import Backend, Session
from runtime.errors import BackendError
from runtime.manifest import Manifest
from runtime.sampling import MASKED
from runtime.spec import Array, GraphSpec


class SharedBackend:
    """A backend over another one that packs weights per session; the artifacts must hold `extend` and `frame`."""

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self.name = backend.name
        self._backend, self._manifest = backend, manifest
        self._open: dict[str, _Counted] = {}

    def open(self, spec: GraphSpec, path: Path) -> Session:
        if spec.name == "prefill":
            return _Prefill(spec, self._lease("extend"))
        if spec.name == "step":
            return _Step(spec, self._lease("extend"))
        if spec.name == "step_frame":
            return _Step(spec, self._lease("extend"), self._lease("frame"))
        if spec.name == "frame":
            return self._lease("frame")
        return self._backend.open(spec, path)

    def _lease(self, name: str) -> _Lease:
        """One more use of a session; it is freed with its last use."""
        if name not in self._open or not self._open[name].uses:
            graph = self._manifest.graph(name)
            self._open[name] = _Counted(self._backend.open(graph.spec, self._manifest.path(graph.file)))
        return _Lease(self._open[name])


class _Counted:
    """A session, and how many leases of it are out."""

    def __init__(self, session: Session) -> None:
        self.session, self.uses = session, 0


class _Lease:
    """A session that others use too."""

    def __init__(self, counted: _Counted) -> None:
        self.spec = counted.session.spec
        self._counted, self._closed = counted, False
        counted.uses += 1

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self._closed:
            raise BackendError(f"{self.spec.name}: the session is closed; open it again")
        return self._counted.session.run(feeds)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._counted.uses -= 1
            if not self._counted.uses:
                self._counted.session.close()

    def __enter__(self) -> _Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Adapter(ABC):
    """A session made of leases."""

    def __init__(self, spec: GraphSpec, *parts: _Lease) -> None:
        self.spec, self._parts = spec, parts

    @abstractmethod
    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Prefill(_Adapter):
    """`prefill` on `extend`: the cache is one row that nobody sees."""

    def __init__(self, spec: GraphSpec, extend: _Lease) -> None:
        super().__init__(spec, extend)
        self._extend = extend
        self._nothing: dict[str, Array] = {}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.spec.check_feeds(feeds)
        outputs = self._extend.run({**feeds, **self._empty_cache(len(feeds["rows"]))})
        return {name.removeprefix("new_"): value for name, value in outputs.items()}

    def _empty_cache(self, batch: int) -> dict[str, Array]:
        if not self._nothing or len(self._nothing["cache_mask"]) != batch:
            cache = [t for t in self._extend.spec.bind(B=batch, C=1).inputs if t.name.startswith("past_")]
            self._nothing = {t.name: np.zeros(t.bound_shape, np.float32) for t in cache}
            self._nothing["cache_mask"] = np.full((batch, 1, 1, 1), MASKED, np.float32)
        return self._nothing


class _Step(_Adapter):
    """`step` on `extend`; `step_frame` when `frame` is there too."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.spec.check_feeds(feeds)
        cache = {name: value for name, value in feeds.items() if name.startswith(("past_", "cache_"))}
        row, position = feeds["row"], feeds["position"]
        extend, *frame = self._parts
        outputs = extend.run({"rows": row, "positions": position[:, None], "last": position, **cache})
        for part in frame:
            settings = {t.name: feeds[t.name] for t in part.spec.inputs if t.name != "hidden"}
            outputs |= part.run({"hidden": outputs["hidden"], **settings})
        return outputs
