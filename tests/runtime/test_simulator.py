"""The pyACL simulator is as strict as a device: each rule is provoked through the raw calls, as careless code would."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from runtime.backends.simulator import AclMisuse, Simulator, SimulatorConfig, installed
from runtime.spec import GraphSpec, TensorSpec
from tests.runtime.om_builds import write_om

H2D, D2H, D2D = 1, 2, 3
GRAPH = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]>'
    "g (float[24] x, int32[1] i) => (float[1] y, float[24] z) { y = Gather(x, i) z = Neg(x) }"
)
SPEC = GraphSpec(
    "g",
    (TensorSpec("x", "float32", (24,)), TensorSpec("i", "int32", (1,))),
    (TensorSpec("y", "float32", (1,)), TensorSpec("z", "float32", (24,))),
)


class Box:
    """A process that did everything right so far: context, stream, a loaded model, its memory and datasets."""

    def __init__(self, simulator: Simulator, path: Path) -> None:
        import acl

        self.acl: Any = acl
        self.simulator = simulator
        assert acl.init() == 0
        assert acl.rt.set_device(0) == 0
        self.context, _ = acl.rt.create_context(0)
        self.stream, _ = acl.rt.create_stream()
        self.model, code = acl.mdl.load_from_file(str(path))
        assert code == 0
        # The compiled order is i, x and z, y: not the order of the ONNX file.
        self.sizes = {"i": 4, "x": 96, "z": 96, "y": 4}
        self.at = {name: self.malloc(128) for name in self.sizes}
        self.inputs, self.outputs = self.dataset("i", "x"), self.dataset("z", "y")
        self.host, _ = acl.rt.malloc_host(256)

    def malloc(self, size: int) -> int:
        pointer, code = self.acl.rt.malloc(size, 0)
        assert code == 0
        return int(pointer)

    def dataset(self, *names: str) -> int:
        return self.dataset_of(*((self.at[name], self.sizes[name]) for name in names))

    def dataset_of(self, *buffers: tuple[int, int]) -> int:
        dataset = self.acl.mdl.create_dataset()
        for pointer, size in buffers:
            assert self.acl.mdl.add_dataset_buffer(dataset, self.acl.create_data_buffer(pointer, size))[1] == 0
        return int(dataset)

    def host_array(self) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * 256).from_address(self.host))

    def upload(self, name: str, value: np.ndarray) -> None:
        self.host_array()[: value.nbytes] = value.view(np.uint8)
        args = (self.at[name], value.nbytes, self.host, value.nbytes, H2D, self.stream)
        assert self.acl.rt.memcpy_async(*args) == 0
        assert self.acl.rt.synchronize_stream(self.stream) == 0

    def feed(self, index: int = 5) -> None:
        self.upload("x", np.arange(24, dtype=np.float32))
        self.upload("i", np.array([index], np.int32))

    def execute(self, inputs: int | None = None, outputs: int | None = None) -> int:
        return int(self.acl.mdl.execute_async(self.model, inputs or self.inputs, outputs or self.outputs, self.stream))

    def synchronize(self) -> int:
        return int(self.acl.rt.synchronize_stream(self.stream))

    def message(self) -> str:
        return str(self.acl.get_recent_err_msg())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_om(tmp_path / "g.om", GRAPH.SerializeToString(), SPEC)
    return tmp_path / "g.om"


@pytest.fixture
def box(path: Path) -> Iterator[Box]:
    with installed() as simulator:
        yield Box(simulator, path)


def test_a_careful_program_gets_its_result(box: Box) -> None:
    box.feed(index=5)
    assert box.execute() == 0
    assert box.acl.rt.memcpy_async(box.host, 4, box.at["y"], 4, D2H, box.stream) == 0
    assert box.synchronize() == 0
    assert box.host_array()[:4].view(np.float32)[0] == 5


def test_nothing_works_before_init(path: Path) -> None:
    with installed():
        import acl

        assert acl.rt.set_device(0) == 100001
        assert acl.mdl.load_from_file(str(path))[1] == 100001
        assert acl.init() == 0
        assert acl.init() == 100002


def test_a_device_that_does_not_exist_is_refused(path: Path) -> None:
    with installed():
        import acl

        acl.init()
        assert acl.rt.set_device(1) == 107001
        assert "this machine has 1" in acl.get_recent_err_msg()


def test_the_error_message_is_cleared_by_reading_and_belongs_to_its_thread(box: Box) -> None:
    assert box.acl.rt.malloc(0, 0)[1] == 100000
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(box.acl.get_recent_err_msg()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert "malloc of 0 bytes" in box.message()
    assert box.acl.get_recent_err_msg() is None


def test_a_thread_without_context_gets_107002(box: Box) -> None:
    codes: list[int] = []

    def work() -> None:
        codes.append(box.execute())
        box.acl.rt.set_context(box.context)
        codes.append(box.execute())

    box.feed()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [107002, 0]


def test_stream_and_model_work_in_their_own_context_only(box: Box) -> None:
    box.feed()
    box.acl.rt.create_context(0)  # becomes the current one
    assert box.acl.rt.synchronize_stream(box.stream) == 107003
    stream, _ = box.acl.rt.create_stream()
    assert box.acl.mdl.execute_async(box.model, box.inputs, box.outputs, stream) == 107004


@pytest.mark.parametrize(
    "free",
    [
        lambda box: box.acl.rt.free(box.malloc(64)),
        lambda box: box.acl.rt.free_host(box.host),
        lambda box: box.acl.mdl.destroy_dataset(box.acl.mdl.create_dataset()),
        lambda box: box.acl.destroy_data_buffer(box.acl.create_data_buffer(box.at["x"], 96)),
        lambda box: box.acl.mdl.destroy_desc(box.acl.mdl.create_desc()),
    ],
)
def test_what_is_alive_is_freed_once(box: Box, free: Any) -> None:
    assert free(box) == 0


def test_freeing_twice_is_misuse(box: Box) -> None:
    pointer = box.malloc(64)
    assert box.acl.rt.free(pointer) == 0
    with pytest.raises(AclMisuse, match="freed twice"):
        box.acl.rt.free(pointer)
    dataset = box.acl.mdl.create_dataset()
    box.acl.mdl.destroy_dataset(dataset)
    with pytest.raises(AclMisuse, match="destroyed dataset"):
        box.acl.mdl.destroy_dataset(dataset)


def test_a_pointer_into_the_middle_cannot_be_freed(box: Box) -> None:
    with pytest.raises(AclMisuse, match="no start of"):
        box.acl.rt.free(box.malloc(128) + 64)


def test_a_handle_of_another_kind_is_misuse(box: Box) -> None:
    with pytest.raises(AclMisuse, match="no dataset"):
        box.execute(inputs=box.stream)


def test_an_unloaded_model_is_a_bad_model_id(box: Box) -> None:
    assert box.acl.mdl.unload(box.model) == 0
    assert box.execute() == 100011


def test_datasets_in_the_order_of_the_onnx_file_are_refused(box: Box) -> None:
    assert box.execute(inputs=box.dataset("x", "i")) == 145006
    assert "E13025" in box.message()
    assert "user add align" in (box.execute(inputs=box.dataset("x", "i")), box.message())[1]


def test_datasets_of_the_wrong_length_are_refused(box: Box) -> None:
    assert box.execute(inputs=box.dataset("i")) == 100017
    assert box.execute(outputs=box.dataset("z", "y", "i")) == 100018


@pytest.mark.parametrize(("size", "code"), [(96, 0), (32, 0), (31, 145006)])
def test_a_buffer_may_be_64_bytes_short_and_no_more(box: Box, size: int, code: int) -> None:
    box.feed()
    assert box.execute(inputs=box.dataset_of((box.at["i"], 4), (box.at["x"], size))) == code


def test_an_unaligned_buffer_is_refused(box: Box) -> None:
    assert box.execute(inputs=box.dataset_of((box.at["i"] + 4, 4), (box.at["x"], 96))) == 107008


def test_an_output_over_an_input_is_misuse(box: Box) -> None:
    box.feed()
    with pytest.raises(AclMisuse, match="overlap"):
        box.execute(outputs=box.dataset("x", "y"))


def test_two_outputs_in_one_place_are_misuse(box: Box) -> None:
    box.feed()
    with pytest.raises(AclMisuse, match="overlap"):
        box.execute(outputs=box.dataset_of((box.at["z"], 96), (box.at["z"], 64)))


def test_memory_is_not_zeroed(box: Box) -> None:
    box.acl.rt.memcpy_async(box.host, 96, box.at["x"], 96, D2H, box.stream)
    box.synchronize()
    assert np.isnan(box.host_array()[:96].view(np.float32)).all()


def test_an_input_that_nobody_wrote_is_misuse(box: Box) -> None:
    box.upload("x", np.zeros(23, np.float32))  # one element short
    box.upload("i", np.zeros(1, np.int32))
    box.execute()
    with pytest.raises(AclMisuse, match="input x holds 4 bytes that were never written"):
        box.synchronize()


def test_memory_of_a_running_model_cannot_be_freed(box: Box) -> None:
    box.feed()
    for dataset in (box.inputs, box.outputs):
        for handle in box.simulator._item(dataset, object).buffers:  # type: ignore[attr-defined]
            box.acl.destroy_data_buffer(handle)
    with pytest.raises(AclMisuse, match="destroyed buffer"):
        box.execute()
    inputs, outputs = box.dataset("i", "x"), box.dataset("z", "y")
    box.execute(inputs, outputs)
    with pytest.raises(AclMisuse, match="before the data buffers"):
        box.acl.rt.free(box.at["x"])
    with pytest.raises(AclMisuse, match="queued work"):
        box.acl.mdl.unload(box.model)


def test_copies_check_direction_size_and_bounds(box: Box) -> None:
    copy = box.acl.rt.memcpy_async
    assert copy(box.at["x"], 96, box.host, 96, D2H, box.stream) == 100000
    assert copy(box.at["x"], 95, box.host, 96, H2D, box.stream) == 100000
    with pytest.raises(AclMisuse, match="past its 128 bytes"):
        copy(box.at["x"], 256, box.host, 256, H2D, box.stream)
    with pytest.raises(AclMisuse, match="overlap"):
        copy(box.at["x"], 64, box.at["x"] + 32, 64, D2D, box.stream)


def test_pageable_host_memory_is_refused_in_queued_copies(box: Box) -> None:
    pageable = np.zeros(96, np.uint8)
    with pytest.raises(AclMisuse, match="pageable"):
        box.acl.rt.memcpy_async(box.at["x"], 96, pageable.ctypes.data, 96, H2D, box.stream)


def test_queued_work_is_done_at_synchronize_and_not_before(box: Box) -> None:
    box.feed()
    host = box.host_array()
    host[:] = 7
    box.execute()
    box.acl.rt.memcpy_async(box.host, 4, box.at["y"], 4, D2H, box.stream)
    assert np.isnan(host[:4].view(np.float32)[0])  # who reads early reads poison
    box.synchronize()
    assert host[:4].view(np.float32)[0] == 5


def test_a_host_buffer_that_changes_under_a_queued_copy_is_misuse(box: Box) -> None:
    host = box.host_array()
    host[:] = 1
    box.acl.rt.memcpy_async(box.at["x"], 96, box.host, 96, H2D, box.stream)
    host[3] = 2
    with pytest.raises(AclMisuse, match="changed while a queued copy"):
        box.synchronize()


def test_writing_past_the_end_of_pinned_memory_is_found(box: Box) -> None:
    ctypes.memset(box.host + 256, 0, 1)
    with pytest.raises(AclMisuse, match="wrote past the end"):
        box.acl.rt.free_host(box.host)


def test_host_code_that_dereferences_a_device_pointer_dies() -> None:
    code = (
        "import ctypes\n"
        "from runtime.backends.simulator import install\n"
        "install(); import acl\n"
        "acl.init(); acl.rt.set_device(0); acl.rt.create_context(0)\n"
        "pointer, _ = acl.rt.malloc(64, 0)\n"
        "ctypes.string_at(pointer, 4)\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=False, capture_output=True, cwd=Path(__file__).parents[2])
    assert result.returncode == -11  # SIGSEGV


def test_an_index_out_of_bounds_fails_the_run_and_drops_the_queue(box: Box) -> None:
    box.feed(index=99)
    box.execute()
    box.acl.rt.memcpy_async(box.host, 4, box.at["y"], 4, D2H, box.stream)
    assert box.synchronize() == 507011
    assert "model execute failed" in box.message()
    assert box.synchronize() == 0
    assert np.isnan(box.host_array()[:4].view(np.float32)[0])


def test_one_model_on_two_streams_at_once_is_misuse(box: Box) -> None:
    box.feed()
    box.execute()
    stream, _ = box.acl.rt.create_stream()
    with pytest.raises(AclMisuse, match="two streams"):
        box.acl.mdl.execute_async(box.model, box.inputs, box.outputs, stream)


@pytest.mark.parametrize(("soc", "code"), [("Ascend910B4", 0), ("Ascend910_9391", 0), ("Ascend310P3", 100000)])
def test_2d_copies_on_the_device_exist_where_the_documents_say(tmp_path: Path, soc: str, code: int) -> None:
    write_om(tmp_path / "g.om", GRAPH.SerializeToString(), SPEC, soc=soc)
    with installed(SimulatorConfig(soc=soc)) as simulator:
        box = Box(simulator, tmp_path / "g.om")
        to, origin = box.at["z"], box.at["x"]
        box.feed()
        assert box.acl.rt.memcpy2d_async(to, 32, origin, 16, 8, 3, D2D, box.stream) == code
        assert box.acl.rt.memcpy2d_async(origin, 16, box.host, 16, 8, 3, H2D, box.stream) == 0  # fine on every chip
        assert box.acl.rt.memcpy2d_async(to, 32, origin, 16, 17, 3, D2D, box.stream) == 100000  # wider than a pitch
        assert box.acl.rt.memcpy2d_async(to, 6_000_000, origin, 6_000_000, 5_000_001, 1, D2D, box.stream) == 100000


@pytest.mark.parametrize(
    ("made_for", "code", "words"),
    [
        ({"soc": "Ascend910B"}, 507008, "supported socVersion=Ascend910B4, but the model socVersion=Ascend910B"),
        ({"cann": "8.5.1"}, 100013, "built by CANN 8.5.1, this runtime is CANN 8.5.0"),
        ({"cann": "8.1.RC1"}, 0, ""),
        ({"device_bytes": 20 << 30}, 207018, "bytes of device memory"),
    ],
)
def test_a_model_made_for_something_else_does_not_load(
    tmp_path: Path, made_for: dict[str, Any], code: int, words: str
) -> None:
    write_om(tmp_path / "g.om", GRAPH.SerializeToString(), SPEC, **made_for)
    with installed():
        import acl

        acl.init(), acl.rt.set_device(0), acl.rt.create_context(0)
        assert acl.mdl.load_from_file(str(tmp_path / "g.om"))[1] == code
        assert words in str(acl.get_recent_err_msg())


def test_missing_and_damaged_files_do_not_load(box: Box, tmp_path: Path) -> None:
    (tmp_path / "real.om").write_bytes(b"IMOD" + bytes(300))
    assert box.acl.mdl.load_from_file(str(tmp_path / "none.om"))[1] == 100003
    assert box.acl.mdl.load_from_file(str(tmp_path / "real.om"))[1] == 100012
    assert box.acl.mdl.query_size(str(tmp_path / "real.om"))[2] == 100012


def test_device_memory_runs_out(path: Path) -> None:
    with installed(SimulatorConfig(memory_bytes=20_000)) as simulator:
        box = Box(simulator, path)
        free, total, _ = box.acl.rt.get_mem_info(1)
        assert total == 20_000
        assert free == 20_000 - 2 * 4096 - 4 * 128
        assert box.acl.rt.malloc(free + 1, 0)[1] == 207001
        assert box.acl.rt.malloc(free, 0)[1] == 0


def test_finalize_names_every_leak(box: Box) -> None:
    with pytest.raises(AclMisuse) as error:
        box.acl.finalize()
    for what in ("context", "stream", "model", "buffer", "dataset", "device memory of 128 bytes", "host memory"):
        assert what in str(error.value)


def test_things_are_freed_from_the_inside_out(box: Box) -> None:
    with pytest.raises(AclMisuse, match="before its data buffers"):
        box.acl.mdl.destroy_dataset(box.inputs)
    with pytest.raises(AclMisuse, match=r"before its (stream|model)"):
        box.acl.rt.destroy_context(box.context)
    with pytest.raises(AclMisuse, match="before its contexts"):
        box.acl.rt.reset_device(0)
    description = box.acl.mdl.create_desc()
    box.acl.mdl.get_desc(description, box.model)
    with pytest.raises(AclMisuse, match="before its description"):
        box.acl.mdl.unload(box.model)


def test_a_stream_with_queued_work_cannot_be_destroyed(box: Box) -> None:
    box.feed()
    box.execute()
    with pytest.raises(AclMisuse, match="queued work"):
        box.acl.rt.destroy_stream(box.stream)


def test_injected_failures_hit_the_call_that_was_named(box: Box) -> None:
    box.feed()
    box.simulator.fail("mdl.execute_async", 507015, nth=2)
    assert box.execute() == 0
    assert box.synchronize() == 0
    assert box.execute() == 507015  # the second run fails
    assert "injected" in box.message()
    assert box.execute() == 0


def test_a_slow_run_gives_the_same_result_later(box: Box) -> None:
    import time

    box.feed()
    box.simulator.slow("rt.synchronize_stream", 0.05)
    start = time.perf_counter()
    box.execute()
    assert box.synchronize() == 0
    assert time.perf_counter() - start >= 0.05


def test_init_after_finalize_is_refused() -> None:
    with installed():
        import acl

        assert (acl.init(), acl.finalize(), acl.init()) == (0, 0, 500001)
