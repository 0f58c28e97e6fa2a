"""Sessions of .om graphs on the simulator: interface checks, errors that say what to do, nothing left behind."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from runtime.backends import om_device
from runtime.backends.acl_api import Acl, AclError, ModelTensor, import_acl, meaning, release_number
from runtime.backends.fake_om import read_fake_om, write_fake_om
from runtime.backends.om import OmBackend, check_build, match_interface
from runtime.backends.om_device import Releases, Traffic, open_device
from runtime.backends.om_rows import RowCopier, RowCopy, prove_2d_copy
from runtime.backends.simulator import Simulator, SimulatorConfig, install, installed
from runtime.errors import BackendError, BackendUnavailableError, MossError, SpecMismatchError
from runtime.manifest import OmBuild
from runtime.spec import GraphSpec, TensorSpec
from tests.runtime.om_builds import write_om

GRAPH = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]>'
    "g (float[2,3] x, int32[2] n) => (float[2,3] y, int32[2] m) { y = Mul(x, x) m = Neg(n) }"
)
SPEC = GraphSpec(
    "g",
    (TensorSpec("x", "float32", ("B", 3)), TensorSpec("n", "int32", ("B",))),
    (TensorSpec("y", "float32", ("B", 3)), TensorSpec("m", "int32", ("B",))),
)
FEEDS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([3, -4], np.int32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_om(tmp_path / "g.om", GRAPH.SerializeToString(), SPEC.bind(B=2))
    return tmp_path / "g.om"


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with installed() as simulator:
        yield simulator
        om_device.shutdown()


def build(**changes: object) -> OmBuild:
    values = OmBuild(
        graph="g",
        axes={"B": 2},
        soc_version="Ascend910B4",
        cann="8.5",
        precision="origin",
        file="g.om",
        sha256="",
        num_bytes=1,
        argv=("atc",),
        recipe="",
        inputs={},
        versions={"cann": "8.5.0"},
        log="",
        seconds=0.0,
        fake=True,
    )
    return replace(values, **changes)


def test_a_session_resolves_names_and_counts_what_it_does(simulator: Simulator, path: Path) -> None:
    with OmBackend() as backend, backend.open(SPEC, path) as session:
        assert backend.name == "om (simulated)"
        assert session.spec == SPEC.bind(B=2)
        outputs = session.run(FEEDS)
        np.testing.assert_array_equal(outputs["y"], FEEDS["x"] ** 2)
        np.testing.assert_array_equal(outputs["m"], -FEEDS["n"])
        # x: 24 bytes own 64, n starts at 64: one copy up and one down carry both tensors.
        assert session.traffic == Traffic(1, 1, 128, 1, 128, 0, 0, 1)
    assert simulator.live() == []


def test_outputs_are_copies_that_the_next_run_leaves_alone(simulator: Simulator, path: Path) -> None:
    with OmBackend() as backend, backend.open(SPEC, path) as session:
        first = session.run(FEEDS)["y"]
        session.run({**FEEDS, "x": FEEDS["x"] + 1})
        np.testing.assert_array_equal(first, FEEDS["x"] ** 2)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SPEC.bind(B=3), r"x: expected float32\[3, 3\], the file was compiled for float32\[2, 3\]"),
        (GraphSpec("g", (replace(SPEC.inputs[0], dtype="int32"), SPEC.inputs[1]), SPEC.outputs), r"got|int32\[B, 3\]"),
        (GraphSpec("g", SPEC.inputs[:1], SPEC.outputs), r"unexpected \['n'\]"),
        (GraphSpec("g", (*SPEC.inputs, TensorSpec("z", "int32", (1,))), SPEC.outputs), r"missing \['z'\].*prunes"),
        (GraphSpec("g", SPEC.inputs, (*SPEC.outputs, TensorSpec("z", "int32", (1,)))), r"outputs differ.*\['z'\]"),
    ],
)
def test_a_file_that_differs_from_the_spec_is_refused_before_it_runs(
    simulator: Simulator, path: Path, spec: GraphSpec, words: str
) -> None:
    with OmBackend() as backend, pytest.raises(SpecMismatchError, match=words):
        backend.open(spec, path)
    assert simulator.live() == []
    assert simulator.calls["mdl.execute_async"] == 0


def test_gear_models_and_dynamic_shapes_are_refused() -> None:
    tensors = [ModelTensor("x", "float32", (2, 3), 24), ModelTensor("n", "int32", (2,), 8)]
    outputs = [ModelTensor("y", "float32", (2, 3), 24), ModelTensor("m", "int32", (2,), 8)]
    assert match_interface(SPEC, tensors, outputs, Path("g.om")) == SPEC.bind(B=2)
    gears = [*tensors, ModelTensor("ascend_mbatch_shape_data", "int32", (4,), 16)]
    with pytest.raises(SpecMismatchError, match="dynamic_dims"):
        match_interface(SPEC, gears, outputs, Path("g.om"))
    with pytest.raises(SpecMismatchError, match="compiled for"):
        match_interface(SPEC, [ModelTensor("x", "float32", (-1, 3), 0), tensors[1]], outputs, Path("g.om"))
    with pytest.raises(SpecMismatchError, match=r"takes 24 bytes, the file asks for 89"):
        match_interface(SPEC, [ModelTensor("x", "float32", (2, 3), 89), tensors[1]], outputs, Path("g.om"))


@pytest.mark.parametrize(
    ("made_for", "words"),
    [
        ({"soc": "Ascend910B"}, "507008.*compile again with --soc_version.*ModelCheckCompatibility"),
        ({"cann": "9.0.0"}, "100013.*built by CANN 9.0.0"),
        ({"device_bytes": 1 << 40}, "needs 2,199,023,255,552 bytes on device 0, 34,"),
    ],
)
def test_a_file_made_for_something_else_says_so(
    simulator: Simulator, tmp_path: Path, made_for: dict[str, object], words: str
) -> None:
    write_om(tmp_path / "g.om", GRAPH.SerializeToString(), SPEC.bind(B=2), **made_for)  # type: ignore[arg-type]
    with OmBackend() as backend, pytest.raises(BackendError, match=words):
        backend.open(SPEC, tmp_path / "g.om")
    assert simulator.live() == []


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        ({"soc_version": "Ascend910B3"}, SpecMismatchError, "compiled for Ascend910B3, device 0 is Ascend910B4"),
        ({"versions": {"cann": "9.0.0"}}, SpecMismatchError, "compiled by CANN 9.0.0, this machine runs CANN 8.5.0"),
        ({"fake": False}, BackendUnavailableError, "a real .om; the simulator runs only"),
    ],
)
def test_the_manifest_shows_a_wrong_build_before_anything_is_loaded(
    simulator: Simulator, made: dict[str, object], error: type[MossError], words: str
) -> None:
    device = open_device(0)
    check_build(build(), device)
    check_build(build(versions={"cann": "8.1.RC1"}), device)
    with pytest.raises(error, match=words):
        check_build(build(**made), device)
    device.close()
    assert simulator.calls["mdl.load_from_file"] == 0


def test_a_device_refuses_what_the_fake_atc_made() -> None:
    real = types.SimpleNamespace(acl=Acl(types.SimpleNamespace()), soc="Ascend910B4", cann="8.5.0", id=0)
    with pytest.raises(BackendUnavailableError, match="made by the fake atc"):
        check_build(build(), real)  # type: ignore[arg-type]
    check_build(build(fake=False), real)  # type: ignore[arg-type]


def test_an_error_carries_call_code_meaning_and_what_acl_says(simulator: Simulator, path: Path) -> None:
    with OmBackend() as backend, backend.open(SPEC, path) as session:
        simulator.fail("mdl.execute_async", 507015)
        with pytest.raises(AclError) as error:
            session.run(FEEDS)
        assert (error.value.call, error.value.code) == ("mdl.execute_async", 507015)
        assert "acl.mdl.execute_async failed with code 507015: an AICore kernel failed" in str(error.value)
        assert "ACL says: injected failure" in str(error.value)


def test_a_failed_run_leaves_the_session_usable(simulator: Simulator, path: Path) -> None:
    with OmBackend() as backend, backend.open(SPEC, path) as session:
        for call in ("rt.memcpy_async", "mdl.execute_async", "rt.synchronize_stream"):
            simulator.fail(call, 507011)
            with pytest.raises(AclError, match=call):
                session.run(FEEDS)
            other = {**FEEDS, "x": FEEDS["x"] + 1}  # writes the pinned memory that queued copies may still read
            np.testing.assert_array_equal(session.run(other)["y"], other["x"] ** 2)
    assert simulator.live() == []


def calls_of_a_run(path: Path) -> list[tuple[str, int]]:
    """Every call of open, two runs and close, as (name, nth)."""
    with installed() as simulator:
        use(path)
        om_device.shutdown()
        return [(name, nth) for name, count in simulator.calls.items() for nth in range(1, count + 1)]


def use(path: Path) -> None:
    with OmBackend() as backend, backend.open(SPEC, path) as session:
        for _ in range(2):
            np.testing.assert_array_equal(session.run(FEEDS)["y"], FEEDS["x"] ** 2)


RELEASES = {
    "rt.free": "memory",
    "rt.free_host": "memory",
    "destroy_data_buffer": "buffer",
    "mdl.destroy_dataset": "dataset",
    "mdl.destroy_desc": "description",
    "mdl.unload": "model",
    "rt.destroy_stream": "stream",
    "rt.destroy_context": "context",
    "rt.reset_device": "device",
}
# Calls that return a plain value; 0 there is a failure that shows in what follows. A data type of 0 is float32.
WITHOUT_CODE = {
    *(
        f"mdl.get_{side}_{what}"
        for side in ("input", "output")
        for what in ("name_by_index", "size_by_index", "data_type")
    ),
    *("mdl.get_num_inputs", "mdl.get_num_outputs", "mdl.create_desc", "mdl.create_dataset", "create_data_buffer"),
}
HARMLESS = {
    "get_recent_err_msg",
    "get_cann_version",
    "get_soc_name",
    "mdl.get_input_data_type",
    "mdl.get_output_data_type",
}


def test_after_a_failure_of_any_call_everything_is_freed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    tried = calls_of_a_run(path)
    assert len(tried) > 60
    for name, nth in tried:
        if name == "finalize":
            continue
        with installed() as simulator:
            simulator.fail(name, 500003, nth)
            refused: MossError | None = None
            try:
                use(path)
            except MossError as error:
                refused = error
            if name not in HARMLESS:
                assert refused is not None, f"{name} #{nth} failed and nobody said so"
                assert "500003" in str(refused) or name in WITHOUT_CODE, (name, str(refused))
            leaks = simulator.live()
            if name in RELEASES:  # what refused to be freed stays, and what it stands on; nothing else
                assert any(RELEASES[name] in leak for leak in leaks), (name, nth, leaks)
                leaks = [leak for leak in leaks if RELEASES[name] not in leak]
            assert leaks == [], (name, nth)
            om_device._process = None  # what is left belongs to a simulator that is gone


def test_sessions_share_the_device_and_the_last_one_frees_it(simulator: Simulator, path: Path) -> None:
    backend = OmBackend()
    first, second = backend.open(SPEC, path), backend.open(SPEC, path)
    backend.close()
    first.close()
    np.testing.assert_array_equal(second.run(FEEDS)["m"], -FEEDS["n"])
    assert simulator.calls["rt.create_context"] == 1
    second.close()
    second.close()
    assert simulator.live() == []
    with pytest.raises(BackendError, match="closed"):
        second.run(FEEDS)


def test_a_session_closes_from_another_thread(simulator: Simulator, path: Path) -> None:
    backend = OmBackend()
    session = backend.open(SPEC, path)
    backend.close()
    thread = threading.Thread(target=session.close)
    thread.start()
    thread.join()
    assert simulator.live() == []


def test_threads_take_turns_on_one_session(simulator: Simulator, path: Path) -> None:
    simulator.slow("rt.synchronize_stream", 0.002)
    wrong: list[int] = []
    with OmBackend() as backend, backend.open(SPEC, path) as session:

        def work(offset: int) -> None:
            feeds = {**FEEDS, "n": FEEDS["n"] + np.int32(offset)}
            for _ in range(5):
                if not np.array_equal(session.run(feeds)["m"], -feeds["n"]):
                    wrong.append(offset)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_failing_release_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def fail() -> None:
        raise BackendError("no")

    releases = Releases()
    for release in (lambda: done.append("first in"), fail, lambda: done.append("last in")):
        releases.add(release)
    with pytest.raises(BackendError, match="no"):
        releases.close()
    assert done == ["last in", "first in"]
    releases.close()
    releases.add(fail)
    releases.abandon()
    assert "cleaning up" in caplog.text


@pytest.mark.parametrize(("soc", "works"), [("Ascend910B4", True), ("Ascend910_9391", True), ("Ascend310P3", False)])
def test_the_2d_copy_is_proven_before_it_is_used(soc: str, works: bool) -> None:
    with installed(SimulatorConfig(soc=soc)) as simulator:
        device = open_device(0)
        assert (prove_2d_copy(device) == "") == works
        device.close()
        assert simulator.live() == []
        om_device.shutdown()


def test_a_2d_copy_that_puts_bytes_in_wrong_places_is_not_used(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sys.modules["acl"].rt.memcpy2d_async

    def off_by_one_row(target: int, target_pitch: int, *rest: int) -> int:
        return int(real(target + 64, target_pitch, *rest[: -2 - 2], 64, 3, *rest[-2:]))

    device = open_device(0)
    monkeypatch.setattr(sys.modules["acl"].rt, "memcpy2d_async", off_by_one_row)
    assert prove_2d_copy(device) == "the 2-D copy put bytes in wrong places"
    monkeypatch.delattr(sys.modules["acl"].rt, "memcpy2d_async")
    assert "no acl.rt.memcpy2d_async; update CANN" in prove_2d_copy(device)
    releases = Releases()
    stream = om_device.OmStream(device, releases)
    with pytest.raises(BackendError, match="2-D device copies were asked for, but this pyACL has no"):
        RowCopier(device, stream, RowCopy.ONE_2D_COPY)
    assert RowCopier(device, stream, RowCopy.AUTO).in_one_copy is False
    releases.close()
    device.close()


def test_without_cann_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "acl", None)
    with pytest.raises(BackendUnavailableError, match=r"set_env.sh.*libascend_hal.so.*--simulate"):
        import_acl()
    monkeypatch.setitem(sys.modules, "acl", types.ModuleType("acl"))  # some other package of that name
    with pytest.raises(BackendUnavailableError, match="is not pyACL"):
        import_acl()


def test_the_simulator_does_not_replace_a_real_pyacl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "acl", types.ModuleType("acl"))
    with pytest.raises(BackendUnavailableError, match="real pyACL"):
        install()


def test_acl_that_torch_npu_initialised_is_neither_reset_nor_finalized(simulator: Simulator, path: Path) -> None:
    import acl

    acl.init()
    use(path)
    om_device.shutdown()
    assert simulator.calls["rt.reset_device"] == 0
    assert simulator.calls["finalize"] == 0
    assert simulator.live() == ["device 0 (no reset_device)"]


def test_weights_that_changed_after_compiling_are_refused(simulator: Simulator, path: Path, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"1234")
    from runtime.backends.fake_om import WeightsFile

    write_fake_om(path, replace(read_fake_om(path), weights=(WeightsFile("w.bin", 4, "0" * 64),)))
    with OmBackend() as backend, pytest.raises(AclError, match=r"100012.*changed after"):
        backend.open(SPEC, path)


@pytest.mark.parametrize(
    ("code", "words"),
    [(107002, "no context"), (507043, "unaligned"), (545003, "truncated"), (12345, "reference does not list")],
)
def test_codes_have_a_meaning(code: int, words: str) -> None:
    assert words in meaning(code)


def test_releases_compare_in_the_order_they_came_out() -> None:
    in_order = ["7.0.1.beta1", "7.0.1", "8.0.RC2", "8.0.RC3", "8.0.0", "8.1.RC1", "8.2.RC1", "8.5.0", "8.5.1", "9.0.0"]
    assert [a for a, b in pairwise(in_order) if release_number(a) >= release_number(b)] == []
    assert release_number("8.5") == release_number("8.5.0")
