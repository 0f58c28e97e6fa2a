"""One session of `extend` and one of `frame` for all graphs of the language model (values: test_llm_golden.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convert.verify import example_feeds
from runtime.backends.base import Session
from runtime.backends.ort import OrtBackend
from runtime.backends.select import BackendOptions, open_backend
from runtime.backends.shared import SharedBackend
from runtime.errors import BackendError, SpecMismatchError
from runtime.frame_model import HostFrameModel
from runtime.spec import GraphSpec

pytestmark = pytest.mark.parametrize("golden_llm", ["a"], indirect=True)


class Recorder:
    """A backend that notes which graphs are open."""

    def __init__(self) -> None:
        self.name, self.opened, self.closed = "ort", [], []
        self._ort = OrtBackend(threads=1)

    def open(self, spec: GraphSpec, path: Path) -> Session:
        session = self._ort.open(spec, path)
        free = session.close

        def close() -> None:
            self.closed.append(spec.name)
            free()

        session.close = close  # type: ignore[method-assign]
        self.opened.append(spec.name)
        return session


def test_a_model_holds_two_sessions_and_frees_each_once_after_its_last_use(golden_llm) -> None:
    recorder = Recorder()
    shared = SharedBackend(recorder, golden_llm.manifest)
    first = HostFrameModel(golden_llm.manifest, shared)
    second = HostFrameModel(golden_llm.manifest, shared, fused=False)
    assert sorted(recorder.opened) == ["extend", "frame"]
    first.close()
    first.close()
    assert recorder.closed == []
    rows = golden_llm.golden["prompt_input_ids"]
    second.prefill(rows)
    with pytest.raises(BackendError, match="extend: the session is closed"):
        first.prefill(rows)
    second.close()
    assert sorted(recorder.closed) == ["extend", "frame"]
    HostFrameModel(golden_llm.manifest, shared).close()
    assert sorted(recorder.opened) == ["extend", "extend", "frame", "frame"]


@pytest.mark.parametrize("name", ["prefill", "step", "step_frame"])
def test_feeds_are_checked_against_the_graph_that_was_asked_for(golden_llm, name: str) -> None:
    manifest = golden_llm.manifest
    graph = manifest.graph(name)
    spec = graph.spec.bind(**dict.fromkeys(graph.spec.dynamic_axes(), 2))
    feeds = example_feeds(spec, manifest.model, manifest.codec, np.random.default_rng(0))
    with SharedBackend(OrtBackend(1), manifest).open(graph.spec, manifest.path(graph.file)) as session:
        assert [*session.run(feeds)] == [t.name for t in graph.spec.outputs]
        with pytest.raises(SpecMismatchError, match=f"{name}: unknown input extra"):
            session.run({**feeds, "extra": feeds[spec.inputs[0].name]})


def test_ort_shares_unless_the_graphs_of_the_device_are_asked_for(golden_llm) -> None:
    manifest = golden_llm.manifest
    chosen = {
        options: type(open_backend("ort", manifest, options=options)).__name__
        for options in (BackendOptions(), BackendOptions(device_graphs=True), BackendOptions(split=True))
    }
    assert [*chosen.values()] == ["SharedBackend", "OrtBackend", "OrtBackend"]
