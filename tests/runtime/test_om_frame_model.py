"""The device frame model on the simulator: the codes of the host loop, with exactly the traffic of the design."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from runtime.assembly import describe_run, open_frame_model
from runtime.backends import om_device
from runtime.backends.om import OmBackend
from runtime.backends.om_device import Traffic
from runtime.backends.om_layout import spare_heads
from runtime.backends.om_rows import RowCopy
from runtime.backends.ort import OrtBackend
from runtime.backends.simulator import Simulator, SimulatorConfig, installed
from runtime.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityError,
    GenerationError,
    MossError,
    SpecMismatchError,
)
from runtime.frame_model import FrameModel, HostFrameModel
from runtime.generate import generate
from runtime.manifest import Manifest
from runtime.om_frame_model import OmFrameModel, open_om_frame_model
from runtime.sampling import SamplingParams, draw_uniforms
from tests.runtime.om_builds import compile_llm, compile_manifest

CAPACITY, BUCKETS = 144, (16, 128)
WILD = SamplingParams(temperature=1.5, top_k=50, top_p=0.9, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def compiled(golden_llm) -> Manifest:
    manifest = golden_llm.manifest
    for soc in ("Ascend910B4", "Ascend310P3"):
        manifest = compile_llm(manifest, CAPACITY, BUCKETS, soc)
    return manifest


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with installed() as simulator:
        yield simulator
        om_device.shutdown()  # finalizes, and so fails on any leak


def prompt(golden_llm, num_rows: int = 12) -> np.ndarray:
    return golden_llm.golden["prompt_input_ids"][:num_rows].astype(np.int32)


def run(model: FrameModel, rows: np.ndarray, num_frames: int, sampling: SamplingParams, forced: bool = False) -> list:
    rng = np.random.default_rng(7)
    model.prefill(rows)
    frames = []
    for _ in range(num_frames):
        frames.append(model.next_frame(draw_uniforms(rng, rows.shape[1] - 1), sampling, keep_logits=True))
        if forced:
            codes = rng.integers(0, 64, rows.shape[1] - 1).astype(np.int32)
            codes[-3:] = 64 if rng.random() < 0.5 else 2  # 64 is the pad id of tiny_llm_b and a code of tiny_llm_a
            model.force_frame(codes)
    return frames


def assert_same(found: list, expected: list) -> None:
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.go_on, a.codes.tolist()) == (b.go_on, b.codes.tolist()), f"frame {index}"
        np.testing.assert_allclose(a.hidden, b.hidden, atol=2e-5)
        np.testing.assert_allclose(a.slot_logits, b.slot_logits, atol=5e-5)
        np.testing.assert_allclose(a.code_logits, b.code_logits, atol=5e-5)


@pytest.mark.parametrize("soc", ["Ascend910B4", "Ascend310P3"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sampling", [SamplingParams.greedy(1.2), WILD])
def test_frames_equal_the_host_loop(golden_llm, compiled, soc: str, fused: bool, sampling: SamplingParams) -> None:
    host = HostFrameModel(golden_llm.manifest, OrtBackend(1))
    with installed(SimulatorConfig(soc=soc)), OmBackend(0, compiled) as backend:
        with open_om_frame_model(compiled, backend, fused) as model:
            for rows in (prompt(golden_llm), prompt(golden_llm, 16), prompt(golden_llm, 60)):  # two buckets, one full
                assert_same(run(model, rows, 12, sampling), run(host, rows, 12, sampling))
            forced = run(model, prompt(golden_llm), 8, sampling, forced=True)
            assert_same(forced, run(host, prompt(golden_llm), 8, sampling, forced=True))
        backend.close()
        om_device.shutdown()


def test_golden_codes_of_upstream_are_identical(golden_llm, compiled, simulator: Simulator) -> None:
    with OmBackend(0, compiled) as backend, open_frame_model(compiled, backend) as model:  # type: ignore[attr-defined]
        golden = golden_llm.golden["greedy_frames"]
        rows = golden_llm.golden["prompt_input_ids"].astype(np.int32)
        result = generate(model, rows, 0, SamplingParams.greedy(), max_frames=CAPACITY - len(rows))
        np.testing.assert_array_equal(result.codes, golden)
        assert result.finish_reason == "stop"


def test_fewer_codebooks_are_padded_like_on_the_host(golden_llm, compiled, simulator: Simulator) -> None:
    host = HostFrameModel(golden_llm.manifest, OrtBackend(1), num_codebooks=8)
    with OmBackend(0, compiled) as backend, open_om_frame_model(compiled, backend, num_codebooks=8) as model:
        found = run(model, prompt(golden_llm), 6, WILD)
        assert_same(found, run(host, prompt(golden_llm), 6, WILD))
        assert (found[0].codes[8:] == compiled.model.audio_pad_id).all()


def test_a_second_utterance_knows_nothing_of_the_first(golden_llm, compiled, simulator: Simulator) -> None:
    with OmBackend(0, compiled) as backend, open_om_frame_model(compiled, backend) as model:
        first = run(model, prompt(golden_llm, 9), 10, WILD)
        run(model, prompt(golden_llm, 90), 20, SamplingParams.greedy())
        assert_same(run(model, prompt(golden_llm, 9), 10, WILD), first)


def traffic(
    model: OmFrameModel, rows: np.ndarray, sampling: SamplingParams
) -> tuple[Traffic, Traffic, Traffic, Traffic]:
    """What prefill, the first, the second and the third frame move."""
    uniforms = np.full((1, rows.shape[1]), 0.5, np.float32)
    model.prefill(rows)
    model.next_frame(uniforms, sampling)
    first = model.stats.first_frame
    model.next_frame(uniforms, sampling)
    second = model.stats.frame
    model.next_frame(uniforms, sampling)
    return model.stats.prefill, first, second, model.stats.frame


@pytest.mark.parametrize("fused", [True, False])
def test_the_traffic_is_exactly_what_the_design_says(golden_llm, compiled, simulator: Simulator, fused: bool) -> None:
    config, rows = compiled.model, prompt(golden_llm)
    n_vq, row_bytes = config.n_vq, 4 * config.head_size
    runs = 2 * config.num_layers * (config.num_heads + spare_heads(config.num_heads, row_bytes))
    with OmBackend(0, compiled) as backend, open_om_frame_model(compiled, backend, fused) as model:
        prefill, first, second, third = traffic(model, rows, WILD)
        # Up: rows and positions of bucket 16 at offsets 0 and 1,152, the last row's index at 1,280; the whole mask.
        prompt_block = 1280 + 4
        assert prefill == Traffic(
            launches=1,
            host_to_device_copies=2,
            host_to_device_bytes=prompt_block + 4 * CAPACITY,
            device_copies=1,
            device_bytes=runs * len(rows) * row_bytes,
            synchronizations=1,
        )
        # Up: position and, 64 bytes on, 1 + n_vq uniforms; the settings once; the mask element of the new row.
        control, settings = 64 + 4 * (1 + n_vq), 192 + 4
        # Down: go_on and, 64 bytes on, the codes.
        down = 64 + 4 * n_vq
        assert first == Traffic(1, 2, control + settings, 1, down, 1, 4 * n_vq, 1)
        assert second == Traffic(1 if fused else 2, 2, control + 4, 1, down, 2, runs * row_bytes + 4 * n_vq, 1)
        assert third == second
        assert third.host_to_device_bytes <= 1024
        assert third.device_to_host_bytes <= 128
        changed = SamplingParams(temperature=0.7)
        model.next_frame(np.full((1, 1 + n_vq), 0.5, np.float32), changed)
        assert model.stats.frame.host_to_device_bytes == third.host_to_device_bytes + settings


def test_without_2d_copies_every_row_is_a_copy_of_its_own(golden_llm, compiled) -> None:
    config = compiled.model
    heads, row_bytes = 2 * config.num_layers * config.num_heads, 4 * config.head_size
    with installed(SimulatorConfig(soc="Ascend310P3")), OmBackend(0, compiled) as backend:
        with open_om_frame_model(compiled, backend) as model:
            assert "one copy per row (acl.rt.memcpy2d_async answered 100000)" in "\n".join(model.stats.lines())
            prefill, _, _, frame = traffic(model, prompt(golden_llm), WILD)
            assert (prefill.device_copies, prefill.device_bytes) == (heads, heads * 12 * row_bytes)
            assert (frame.device_copies, frame.device_bytes) == (heads + 1, heads * row_bytes + 4 * config.n_vq)
        with pytest.raises(BackendError, match="2-D device copies were asked for"):
            open_om_frame_model(compiled, backend, row_copy=RowCopy.ONE_2D_COPY)
        backend.close()
        om_device.shutdown()


def test_a_full_cache_is_an_error_before_the_write(golden_llm, compiled, simulator: Simulator) -> None:
    rows, uniforms = prompt(golden_llm), np.full((1, 1 + compiled.model.n_vq), 0.5, np.float32)
    with OmBackend(0, compiled) as backend, open_om_frame_model(compiled, backend, capacity=15) as model:
        assert model.capacity == 15
        model.prefill(rows)
        for _ in range(1 + 15 - len(rows)):
            model.next_frame(uniforms, WILD)
        launches = simulator.calls["mdl.execute_async"]
        with pytest.raises(CapacityError, match="holds 15 rows and is full"):
            model.next_frame(uniforms, WILD)
        assert simulator.calls["mdl.execute_async"] == launches
        model.prefill(rows[:5])  # the next utterance is not affected
        assert model.next_frame(uniforms, WILD).codes.shape == (compiled.model.n_vq,)


def test_prompts_that_do_not_fit_are_refused_before_anything_runs(golden_llm, compiled, simulator: Simulator) -> None:
    rows = np.tile(prompt(golden_llm, 80), (2, 1))
    with OmBackend(0, compiled) as backend, open_om_frame_model(compiled, backend) as model:
        with pytest.raises(CapacityError, match=r"144 rows.*cache holds 144"):
            model.prefill(rows[:144])
        with pytest.raises(CapacityError, match="129 rows, the largest compiled prefill bucket 128"):
            model.prefill(rows[:129])
        assert simulator.calls["mdl.execute_async"] == 0


def test_calls_out_of_order_and_after_close_are_refused(golden_llm, compiled, simulator: Simulator) -> None:
    n_vq = compiled.model.n_vq
    uniforms = np.full((1, 1 + n_vq), 0.5, np.float32)
    with OmBackend(0, compiled) as backend:
        model = open_om_frame_model(compiled, backend)
        with pytest.raises(GenerationError, match="prefill a prompt first"):
            model.next_frame(uniforms, WILD)
        model.prefill(prompt(golden_llm))
        with pytest.raises(GenerationError, match="call next_frame first"):
            model.force_frame(np.zeros(n_vq, np.int32))
        with pytest.raises(SpecMismatchError, match="uniforms: expected"):
            model.next_frame(uniforms[:, 1:], WILD)
        model.close()
        model.close()
        with pytest.raises(BackendError, match="closed"):
            model.prefill(prompt(golden_llm))


def test_a_failed_frame_asks_for_a_new_prefill_and_then_all_is_well(golden_llm, compiled, simulator: Simulator) -> None:
    rows, uniforms = prompt(golden_llm), np.full((1, 1 + compiled.model.n_vq), 0.5, np.float32)
    with OmBackend(0, compiled) as backend, open_om_frame_model(compiled, backend) as model:
        expected = run(model, rows, 6, SamplingParams())
        for call in ("rt.memcpy_async", "mdl.execute_async", "rt.memcpy2d_async", "rt.synchronize_stream"):
            model.prefill(rows)
            model.next_frame(uniforms, WILD)
            simulator.fail(call, 507011)
            with pytest.raises(BackendError, match=call):
                model.next_frame(uniforms, SamplingParams())  # new settings, whose arrival is then unknown
            with pytest.raises(GenerationError, match="prefill"):
                model.next_frame(uniforms, WILD)
            assert_same(run(model, rows, 6, SamplingParams()), expected)


def test_whatever_fails_while_opening_everything_is_freed(
    golden_llm, compiled, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    names = ("rt.malloc", "rt.malloc_host", "mdl.load_from_file", "mdl.get_desc", "create_data_buffer", "rt.memset",
             "mdl.create_dataset", "mdl.add_dataset_buffer", "rt.memcpy_async", "rt.synchronize_stream")  # fmt: skip
    with installed() as simulator, OmBackend(0, compiled) as backend:
        # Without the self-test of the 2-D copy, which answers failures by falling back.
        open_om_frame_model(compiled, backend, row_copy=RowCopy.SINGLE_ROWS).close()
        counts = {name: simulator.calls[name] for name in names}
        before = simulator.live()
        for name, count in counts.items():
            assert count >= 1
            for nth in {1, count}:
                simulator.fail(name, 500003, nth)
                with pytest.raises(MossError):
                    open_om_frame_model(compiled, backend, row_copy=RowCopy.SINGLE_ROWS)
                assert simulator.live() == before, (name, nth)
        backend.close()
        om_device.shutdown()


def test_the_frame_model_works_from_another_thread(golden_llm, compiled, simulator: Simulator) -> None:
    with OmBackend(0, compiled) as backend, open_om_frame_model(compiled, backend) as model:
        expected, found = run(model, prompt(golden_llm), 5, WILD), []
        thread = threading.Thread(target=lambda: found.extend(run(model, prompt(golden_llm), 5, WILD)))
        thread.start()
        thread.join()
        assert_same(found, expected)


def test_the_smallest_capacity_that_does_is_opened(golden_llm, compiled, simulator: Simulator) -> None:
    step = {"step_frame": [{"B": 1, "C": 64}]}
    manifest = compile_manifest(compiled, step)
    with OmBackend(0, manifest) as backend:
        for asked, opened, capacity in ((None, 144, 144), (40, 64, 40), (64, 64, 64), (65, 144, 65), (999, 144, 144)):
            with open_om_frame_model(manifest, backend, capacity=asked) as model:
                assert model.capacity == capacity
                assert backend.opened[-1].endswith(f"step_frame_1_{opened}_Ascend910B4.om")


def test_a_batched_or_missing_build_is_refused(golden_llm, compiled, simulator: Simulator) -> None:
    only = compile_llm(golden_llm.manifest, CAPACITY, BUCKETS)
    batched = compile_manifest(only, {"frame": [{"B": 2}]}).builds[-1]
    without = tuple(b for b in only.builds if b.graph != "frame")
    for builds, error, words in (
        (without, BackendUnavailableError, r"frame is not compiled for Ascend910B4.*--graphs frame"),
        ((*without, batched), SpecMismatchError, r"batch of 2.*--batch 1"),
    ):
        with OmBackend(0, replace(only, builds=builds)) as backend, pytest.raises(error, match=words):
            open_om_frame_model(only, backend)
    assert simulator.live() == []


def test_the_stats_say_what_ran_each_graph(golden_llm, compiled, simulator: Simulator) -> None:
    with OmBackend(0, compiled) as backend, open_om_frame_model(compiled, backend) as model:
        run(model, prompt(golden_llm), 3, WILD)
        text = "\n".join(describe_run(model, backend))
        assert "backend: om (simulated) Ascend910B4, step_frame per frame, new rows by one 2-D copy" in text
        assert "each frame: 1 launches, 2 copies up" in text
        for graph in ("prefill", "frame", "step_frame"):
            assert f"opened: {graph}: om (simulated) Ascend910B4, {graph}_1" in text
        assert model.backend_name == "om (simulated)"
