"""What every backend must do, one suite for all: ONNX Runtime, PyTorch, OM on the simulator; OM and PyTorch on an NPU
where there is one. On a device box set MOSS_OM_ARTIFACTS to a directory that was exported and compiled there.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from runtime.assembly import open_frame_model
from runtime.backends import om_device
from runtime.backends.base import Backend, Session
from runtime.backends.om import OmBackend
from runtime.backends.select import BackendOptions, open_backend
from runtime.backends.simulator import Simulator, installed
from runtime.errors import BackendError, SpecMismatchError
from runtime.generate import generate
from runtime.manifest import Manifest
from runtime.sampling import SamplingParams, draw_uniforms
from runtime.spec import Array
from tests.runtime.om_builds import compile_llm

pytestmark = pytest.mark.parametrize("golden_llm", ["a"], indirect=True)
CAPACITY = 256


@dataclass(frozen=True)
class Rig:
    """One backend, ready: sessions of the graph `step`, and the golden prompt."""

    name: str
    manifest: Manifest
    backend: Backend
    simulator: Simulator | None

    def session(self) -> Session:
        if isinstance(self.backend, OmBackend):
            return self.backend.open(*self.backend.compiled("step")[0])
        step = self.manifest.graph("step")
        return self.backend.open(step.spec, self.manifest.path(step.file))

    def device_bytes(self) -> int:
        """Device memory in use; 0 for a backend that has none of its own."""
        if self.simulator is not None:
            return self.simulator.device_bytes
        if self.name == "om":
            free, total = self.backend.device.acl.memory_info()  # type: ignore[attr-defined]
            return int(total - free)
        return 0


@pytest.fixture(params=["ort", "torch", "om-simulated", "om", "torch-npu"])
def rig(request, golden_llm) -> Iterator[Rig]:
    name, manifest = request.param, golden_llm.manifest
    options = BackendOptions(threads=1)
    with ExitStack() as stack:
        simulator = None
        if name == "torch-npu":
            if importlib.util.find_spec("torch_npu") is None:
                pytest.skip("torch-npu is not installed")
            name, options = "torch", BackendOptions(device="npu:0")
        elif name == "om":
            if importlib.util.find_spec("acl") is None:
                pytest.skip("pyACL is not installed")
            if "MOSS_OM_ARTIFACTS" not in os.environ:
                pytest.skip("MOSS_OM_ARTIFACTS does not name artifacts compiled for this device")
            manifest = Manifest.load(Path(os.environ["MOSS_OM_ARTIFACTS"]))
        elif name == "om-simulated":
            simulator = stack.enter_context(installed())
            stack.callback(om_device.shutdown)  # finalizes: a leak fails the test
            manifest = compile_llm(manifest, CAPACITY, (128,))
            name = "om"
        backend = open_backend(name, manifest, options=options)
        if name == "om":
            stack.callback(backend.close)  # type: ignore[attr-defined]
        yield Rig(name, manifest, backend, simulator)


def feeds_of(session: Session, seed: int = 0) -> dict[str, Array]:
    """Plausible feeds of `step` in the shapes of the session; open axes take B = 1, C = 32."""
    rng = np.random.default_rng(seed)
    spec = session.spec.bind(**{a: {"B": 1, "C": 32}[a] for a in session.spec.dynamic_axes()})
    feeds: dict[str, Array] = {}
    for tensor in spec.inputs:
        values = rng.integers(0, 8, tensor.bound_shape) if tensor.dtype == "int32" else rng.random(tensor.bound_shape)
        feeds[tensor.name] = values.astype(tensor.dtype)
    return feeds


def test_outputs_follow_the_spec(rig: Rig) -> None:
    with rig.session() as session:  # type: ignore[attr-defined]
        outputs = session.run(feeds_of(session))
        assert list(outputs) == [t.name for t in session.spec.outputs]
        for tensor in session.spec.outputs:
            assert outputs[tensor.name].dtype == np.dtype(tensor.dtype)
            assert len(outputs[tensor.name].shape) == len(tensor.shape)
            assert np.isfinite(outputs[tensor.name]).all()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda feeds: {**feeds, "rows": feeds["row"]}, "unknown input rows"),
        (lambda feeds: {k: v for k, v in feeds.items() if k != "position"}, "position is missing"),
        (lambda feeds: {**feeds, "row": feeds["row"].astype(np.int64)}, r"row: expected int32.*got int64"),
        (
            lambda feeds: {**feeds, "row": feeds["row"][:, :, :-1]},
            r"row: expected int32\[.*, 1, 17\], got int32\[1, 1, 16\]",
        ),
    ],
)
def test_wrong_feeds_are_refused(rig: Rig, spoil: Callable[[dict[str, Array]], dict[str, Array]], words: str) -> None:
    with rig.session() as session:  # type: ignore[attr-defined]
        with pytest.raises(SpecMismatchError, match=words):
            session.run(spoil(feeds_of(session)))
        session.run(feeds_of(session))  # and the session is none the worse for it


def test_a_closed_session_says_so(rig: Rig) -> None:
    session = rig.session()
    feeds = feeds_of(session)
    session.close()
    session.close()
    with pytest.raises(BackendError, match="closed"):
        session.run(feeds)


def test_repeated_runs_are_identical_and_do_not_touch_earlier_results(rig: Rig) -> None:
    with rig.session() as session:  # type: ignore[attr-defined]
        feeds = feeds_of(session)
        kept = {name: value.copy() for name, value in feeds.items()}
        first = session.run(feeds)
        copies = {name: value.copy() for name, value in first.items()}
        session.run(feeds_of(session, seed=1))
        for name, value in session.run(feeds).items():
            np.testing.assert_array_equal(value, copies[name])
            np.testing.assert_array_equal(first[name], copies[name])
        for name, value in feeds.items():
            np.testing.assert_array_equal(value, kept[name])


def test_two_sessions_do_not_mix(rig: Rig) -> None:
    with rig.session() as one, rig.session() as two:  # type: ignore[attr-defined]
        a, b = feeds_of(one), feeds_of(two, seed=1)
        alone = one.run(a)["hidden"], two.run(b)["hidden"]
        assert not np.array_equal(*alone)
        for _ in range(3):
            np.testing.assert_array_equal(one.run(a)["hidden"], alone[0])
            np.testing.assert_array_equal(two.run(b)["hidden"], alone[1])


def test_two_sessions_run_at_once_in_two_threads(rig: Rig) -> None:
    with rig.session() as one, rig.session() as two:  # type: ignore[attr-defined]
        work = [(one, feeds_of(one)), (two, feeds_of(two, seed=1))]
        expected = [session.run(feeds)["hidden"] for session, feeds in work]
        found: list[list[Array]] = [[], []]

        def run(index: int) -> None:
            session, feeds = work[index]
            found[index] = [session.run(feeds)["hidden"] for _ in range(10)]

        threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for values, value in zip(found, expected, strict=True):
            assert len(values) == 10
            for other in values:
                np.testing.assert_array_equal(other, value)


def test_a_session_works_from_any_thread(rig: Rig) -> None:
    with rig.session() as session:  # type: ignore[attr-defined]
        feeds = feeds_of(session)
        expected = session.run(feeds)["hidden"]
        found: list[Array] = []
        threads = [threading.Thread(target=lambda: found.append(session.run(feeds)["hidden"])) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        for value in found:
            np.testing.assert_array_equal(value, expected)


def test_golden_codes_are_identical(rig: Rig, golden_llm) -> None:
    if rig.manifest.name != golden_llm.manifest.name:
        pytest.skip("these artifacts have no golden codes; run-om selftest compares them with ONNX Runtime")
    rows = golden_llm.golden["prompt_input_ids"].astype(np.int32)
    model = open_frame_model(rig.manifest, rig.backend)
    try:
        for name, sampling in (
            ("greedy", SamplingParams.greedy()),
            ("greedy_pen1.2", SamplingParams.greedy(1.2)),
        ):
            result = generate(model, rows, 0, sampling, max_frames=40)
            np.testing.assert_array_equal(result.codes, golden_llm.golden[f"{name}_frames"])
            assert result.finish_reason == "stop"
    finally:
        model.close()


def test_a_thousand_frames_take_no_more_memory_than_a_hundred(rig: Rig, golden_llm) -> None:
    rows = golden_llm.golden["prompt_input_ids"][:6].astype(np.int32)
    rng = np.random.default_rng(0)
    model = open_frame_model(rig.manifest, rig.backend)

    def utterance(num_frames: int) -> None:
        model.prefill(rows)
        for _ in range(num_frames):
            model.next_frame(draw_uniforms(rng, rows.shape[1] - 1), SamplingParams())

    try:
        utterance(240)  # grow once to the longest cache
        (bytes_before, objects_before), device_before = in_use(), rig.device_bytes()
        for _ in range(5):
            utterance(200)
        num_bytes, objects = in_use()
        assert rig.device_bytes() == device_before
        assert num_bytes - bytes_before < 256 << 10  # a quarter of a KiB per frame would show
        assert objects - objects_before < 1000  # as would one Python object per frame
    finally:
        model.close()


MALLOC_FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "top"]


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc: what was allocated and not freed, whatever pages the kernel keeps for it."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLOC_FIELDS]


def in_use() -> tuple[int, int]:
    """Bytes that malloc has given out, arrays and native code alike, and the number of small Python objects."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()
