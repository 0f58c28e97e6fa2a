"""Measure the codec of an artifacts directory on ONNX Runtime; the figures in docs/codec.md come from here.

    python tests/e2e/measure_codec.py ARTIFACTS [--threads 2] [--repeat 7] [--only decode_150 stream_8 …]

Times are medians after one warm-up: on the wall, and of the CPU (all threads), which a busy machine distorts less. Peak
RSS is that of the process so far, so give --only for the memory of one item.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from runtime.assembly import open_codec
from runtime.backends.ort import OrtBackend
from runtime.codec import Codec, DecodeStream
from runtime.manifest import Manifest

WARM_FRAMES = 130  # a stream is measured when every window is full: the longest is 125 frames


def items(codec: Codec) -> dict[str, tuple[float, Callable[[], object]]]:
    """Name -> (frames that one call handles, the call)."""
    config, rng = codec.config, np.random.default_rng(0)

    def codes(num_frames: int) -> np.ndarray:
        return rng.integers(0, config.codebook_size, (num_frames, config.n_vq), dtype=np.int32)

    def clip(seconds: float) -> np.ndarray:
        shape = (config.num_channels, int(seconds * config.sample_rate_hz))
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)

    def full_stream() -> DecodeStream:
        stream = codec.stream()
        stream.push(codes(WARM_FRAMES))
        return stream

    found: dict[str, tuple[float, Callable[[], object]]] = {}
    for n in (12, 25, 50, 100, 150, 3750):
        found[f"decode_{n}"] = (n, partial(lambda n: codec.decode(codes(n)), n))
    for seconds in (3.0, 7.9, 60.0, 300.0):
        frames = seconds * config.frame_rate_hz
        found[f"encode_{seconds}s"] = (frames, partial(lambda s: codec.encode(clip(s)), seconds))
    streams: list[DecodeStream] = []

    def push(num_frames: int) -> object:
        if not streams:
            streams.append(full_stream())
        return streams[0].push(codes(num_frames))

    for n in (1, 2, 4, 8, 16):
        found[f"stream_{n}"] = (n, partial(push, n))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    with open_codec(Manifest.load(options.artifacts), OrtBackend(options.threads)) as codec:
        for name, (frames, call) in items(codec).items():
            if options.only and name not in options.only:
                continue
            call()
            times, work = [], []
            for _ in range(1 if frames > 1000 else options.repeat):
                start, start_work = time.perf_counter(), time.process_time()
                call()
                times.append(time.perf_counter() - start)
                work.append(time.process_time() - start_work)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            wall, cpu = statistics.median(times) * 1e3, statistics.median(work) * 1e3
            per_frame = f"{wall / frames:7.2f} ms/frame, CPU {cpu / frames:7.2f}"
            print(f"{name:12} {wall:9.1f} ms {per_frame}, peak RSS {peak} MiB", flush=True)


if __name__ == "__main__":
    main()
