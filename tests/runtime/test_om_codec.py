"""The device codec on the simulator: the numbers of host rings to the bit, with exactly the traffic of the design."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from convert.export import export_artifacts
from runtime.assembly import open_codec
from runtime.backends import om_device
from runtime.backends.om import OmBackend
from runtime.backends.om_device import Traffic
from runtime.backends.om_layout import owned_bytes, round_up, spare_heads
from runtime.backends.om_rows import RowCopy
from runtime.backends.simulator import Simulator, SimulatorConfig, installed
from runtime.codec import Codec
from runtime.config import CodecStage
from runtime.errors import BackendError, GenerationError, MossError, SpecMismatchError
from runtime.graphs import derived_axes
from runtime.manifest import Manifest
from runtime.om_codec import OmCodec, open_om_codec
from tests.runtime.om_builds import compile_manifest

NANO = Path(__file__).parents[1] / "data" / "nano"
SIZES = {"codec_encode": (2, 8), "codec_stream": (1, 3, 8)}  # the rings hold 2 to 7 frames


def axes(manifest: Manifest, name: str, num_frames: int, batch: int = 1) -> dict[str, int]:
    found = {"B": batch} | derived_axes(manifest.codec, num_frames)
    return {axis: found[axis] for axis in manifest.graph(name).spec.dynamic_axes()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    directory = tmp_path_factory.mktemp("om_codec")
    manifest = export_artifacts(str(NANO / "tiny_llm_b"), str(NANO / "tiny_codec"), directory, only=list(SIZES))
    for soc in ("Ascend910B4", "Ascend310P3"):
        bindings = {name: [axes(manifest, name, n) for n in sizes] for name, sizes in SIZES.items()}
        manifest = compile_manifest(manifest, bindings, soc)
    return manifest


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with installed() as simulator:
        yield simulator
        om_device.shutdown()  # finalizes, and so fails on any leak


def host_codec(manifest: Manifest, backend: OmBackend) -> Codec:
    """The same files with rings in host memory: everything goes up and down with every launch."""
    sessions = [[backend.open(spec, path) for spec, path in backend.compiled(name)] for name in SIZES]
    return Codec(manifest.codec, *sessions)


def codes(num_frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (num_frames, 16)).astype(np.int32)


def clip(manifest: Manifest, num_frames: int) -> np.ndarray:
    shape = (manifest.codec.num_channels, num_frames * manifest.codec.samples_per_frame)
    return np.random.default_rng(1).normal(0, 0.1, shape).astype(np.float32)


@pytest.mark.parametrize("soc", ["Ascend910B4", "Ascend310P3"])
def test_the_device_gives_the_bits_of_host_rings(compiled: Manifest, soc: str) -> None:
    """Chunks of every size, padded ones, ones that wrap a ring and ones that are longer than it."""
    with installed(SimulatorConfig(soc=soc)), OmBackend(0, compiled) as backend:
        with host_codec(compiled, backend) as host, open_codec(compiled, backend) as device:
            assert isinstance(device, OmCodec)
            for num_frames in (1, 2, 5, 9, 31):
                waveform = clip(compiled, num_frames)
                np.testing.assert_array_equal(device.encode(waveform), host.encode(waveform))
            for chunks in ([1] * 11, [2, 3, 1, 8, 4], [5, 5, 5], [23]):
                spoken = codes(sum(chunks))
                with device.stream() as on_device, host.stream() as on_host:
                    for n in chunks:
                        part, spoken = spoken[:n], spoken[n:]
                        np.testing.assert_array_equal(on_device.push(part), on_host.push(part))
        backend.close()
        om_device.shutdown()


def test_streams_that_are_open_at_once_do_not_mix(compiled: Manifest, simulator: Simulator) -> None:
    with OmBackend(0, compiled) as backend, open_codec(compiled, backend) as codec:
        spoken = [codes(12, seed) for seed in range(3)]
        alone = [codec.decode(c) for c in spoken]
        one_ring = codec.stats.ring_bytes  # type: ignore[attr-defined]
        streams = [codec.stream() for _ in spoken]
        pieces: list[list[np.ndarray]] = [[] for _ in spoken]
        for start, end in ((0, 3), (3, 4), (4, 12)):
            for stream, c, found in zip(streams, spoken, pieces, strict=True):
                found.append(stream.push(c[start:end]))
        for expected, found in zip(alone, pieces, strict=True):
            np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=2e-6)  # other sizes, same numbers
        assert codec.stats.ring_bytes == 3 * one_ring  # type: ignore[attr-defined]
        for stream in reversed(streams):
            stream.close()
        np.testing.assert_array_equal(codec.decode(spoken[1]), alone[1])  # used rings know nothing of their past
        assert codec.stats.ring_bytes == 3 * one_ring  # type: ignore[attr-defined]


def packed(*lengths: int) -> int:
    """Bytes of tensors in one copy: each at a multiple of 64 that leaves the one before what it must own."""
    at = 0
    for length in lengths[:-1]:
        at += round_up(owned_bytes(length), 64)
    return at + lengths[-1]


def row_bytes(stages: tuple[CodecStage, ...], num_frames: int) -> int:
    """What the copies on the device move: all rows of so many frames, spare heads included, of frames that fit."""
    total = 0
    for s in stages:
        runs = 2 * s.num_layers * (s.num_heads + spare_heads(s.num_heads, 4 * s.head_size))
        total += runs * min(num_frames, s.ring_frames) * s.tokens_per_frame * 4 * s.head_size
    return total


def test_the_traffic_is_exactly_what_the_design_says(compiled: Manifest, simulator: Simulator) -> None:
    config = compiled.codec
    samples = 4 * config.num_channels * config.samples_per_frame
    with OmBackend(0, compiled) as backend, open_om_codec(compiled, backend) as codec:
        assert codec.stats.stream == Traffic()
        with codec.stream() as stream:
            for num_frames, wrapping in ((1, 0), (1, 0), (3, 2), (8, 4)):  # rings of 7, 5, 4 and 2 frames
                stream.push(codes(num_frames))
                past = [4 * s.ring_frames for s in config.decoder]
                assert codec.stats.stream == Traffic(
                    launches=1,
                    host_to_device_copies=1,
                    host_to_device_bytes=packed(4 * 16 * num_frames, 4 * num_frames, *past),
                    device_to_host_copies=1,
                    device_to_host_bytes=samples * num_frames,
                    device_copies=len(config.decoder) + wrapping,
                    device_bytes=row_bytes(config.decoder, num_frames),
                    synchronizations=1,
                )
        codec.encode(clip(compiled, 2))
        past = [4 * s.ring_frames for s in config.encoder]
        assert codec.stats.encode == Traffic(
            1, 1, packed(2 * samples, 4 * 2, *past), 1, 4 * 16 * 2, 4, row_bytes(config.encoder, 2), 1
        )


def test_without_2d_copies_each_run_of_rows_is_a_copy_of_its_own(compiled: Manifest) -> None:
    with installed(SimulatorConfig(soc="Ascend310P3")), OmBackend(0, compiled) as backend:
        with open_om_codec(compiled, backend) as codec:
            codec.decode(codes(1))
            assert "one copy per row (acl.rt.memcpy2d_async answered 100000)" in codec.stats.lines()[0]
            runs = sum(2 * s.num_layers * s.num_heads for s in compiled.codec.decoder)
            assert codec.stats.stream.device_copies == runs
        backend.close()
        om_device.shutdown()


@pytest.mark.parametrize(
    "call", ["rt.memcpy_async", "mdl.execute_async", "rt.memcpy2d_async", "rt.synchronize_stream"]
)
def test_a_failed_launch_ends_its_stream_and_nothing_else(compiled: Manifest, simulator: Simulator, call: str) -> None:
    with OmBackend(0, compiled) as backend, open_codec(compiled, backend) as codec:
        expected, heard = codec.decode(codes(9)), codec.encode(clip(compiled, 9))
        other, stream = codec.stream(), codec.stream()
        first = other.push(codes(9)[:3])
        stream.push(codes(5))
        simulator.fail(call, 507011)
        with pytest.raises(BackendError, match=call):
            stream.push(codes(3))
        with pytest.raises(GenerationError, match="left its rings incomplete; open another"):
            stream.push(codes(3))
        rest = other.push(codes(9)[3:])
        np.testing.assert_allclose(np.concatenate([first, rest], axis=1), expected, atol=2e-6)
        stream.close()
        np.testing.assert_array_equal(codec.decode(codes(9)), expected)  # on the rings of the stream that failed
        simulator.fail(call, 507011)
        with pytest.raises(BackendError, match=call):
            codec.encode(clip(compiled, 9))
        np.testing.assert_array_equal(codec.encode(clip(compiled, 9)), heard)


def test_rings_of_a_failed_launch_are_zeroed_before_they_serve_again(compiled: Manifest, simulator: Simulator) -> None:
    """What a failed kernel left may be NaN, and 0 x NaN is NaN: no mask hides it."""
    with OmBackend(0, compiled) as backend, open_om_codec(compiled, backend) as codec:
        expected = codec.decode(codes(4))
        with codec.stream() as stream:
            rings = stream._open_rings()
            stream.push(codes(2))
            simulator.fail("rt.synchronize_stream", 507011)
            with pytest.raises(BackendError):
                stream.push(codes(2))
            address, size = rings.address, rings._graph.ring_rows.num_bytes  # type: ignore[attr-defined]
            simulator._memory.span(address, size).view()[:] = 0xFF  # bytes of NaN
        np.testing.assert_array_equal(codec.decode(codes(4)), expected)
        assert codec.stream()._open_rings() is rings


def test_parts_may_be_closed_in_any_order(compiled: Manifest, simulator: Simulator) -> None:
    backend = OmBackend(0, compiled)
    codec = open_codec(compiled, backend)
    stream, idle = codec.stream(), codec.stream()
    stream.push(codes(2))
    idle.close()
    backend.close()  # its device lives on while the codec uses it
    stream.push(codes(2))
    codec.close()
    codec.close()
    assert simulator.live() == []
    for use in (lambda: stream.push(codes(1)), codec.stream, lambda: codec.encode(clip(compiled, 2))):
        with pytest.raises(BackendError, match="the codec is closed"):
            use()
    stream.close()


def test_whatever_fails_while_opening_everything_is_freed(
    compiled: Manifest, simulator: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    names = ("rt.malloc", "rt.malloc_host", "mdl.load_from_file", "create_data_buffer", "mdl.create_dataset")

    def open_stream(backend: OmBackend) -> None:
        with open_om_codec(compiled, backend, RowCopy.SINGLE_ROWS) as codec:  # without the self-test of the 2-D copy
            codec.stream()

    with OmBackend(0, compiled) as backend:
        before, counts = simulator.live(), simulator.calls.copy()
        open_stream(backend)
        for name in names:
            count = simulator.calls[name] - counts[name]
            for nth in (1, count // 2, count):
                counts = simulator.calls.copy()
                simulator.fail(name, 500003, nth)
                with pytest.raises(MossError):
                    open_stream(backend)
                assert simulator.live() == before, (name, nth)
                counts = simulator.calls.copy()
                open_stream(backend)


def test_streams_work_from_other_threads_at_once(compiled: Manifest, simulator: Simulator) -> None:
    with OmBackend(0, compiled) as backend, open_codec(compiled, backend) as codec:
        expected = [codec.decode(codes(11, seed)) for seed in range(4)]
        found: dict[int, np.ndarray] = {}
        threads = [
            threading.Thread(target=lambda seed=seed: found.update({seed: codec.decode(codes(11, seed))}))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed, waveform in enumerate(expected):
            np.testing.assert_array_equal(found[seed], waveform)


def test_a_batched_build_is_refused(compiled: Manifest, simulator: Simulator) -> None:
    manifest = dataclasses.replace(compiled, builds=())
    manifest = compile_manifest(manifest, {"codec_encode": [axes(manifest, "codec_encode", 2)]})
    manifest = compile_manifest(manifest, {"codec_stream": [axes(manifest, "codec_stream", 1, batch=2)]})
    with OmBackend(0, manifest) as backend, pytest.raises(SpecMismatchError, match=r"batch of 2.*--batch 1"):
        open_codec(manifest, backend)
    assert simulator.live() == []
