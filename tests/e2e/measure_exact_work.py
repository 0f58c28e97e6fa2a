"""What each exact saving brings: every variant against our graph, interleaved in one process, medians.

    python tests/e2e/measure_exact_work.py ARTIFACTS [--threads 1] [--calls 15]

Needs a full-size export. CPU time is what a shared machine can say; wall clock is printed beside it. Writes nothing but
a scratch directory beside ARTIFACTS (hard links), which it removes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from convert.bench_variants import VARIANTS, export_variant
from convert.verify import example_feeds
from runtime.backends.ort import OrtBackend
from runtime.manifest import Manifest

CASES = {"step": [{"B": 1, "C": 256}, {"B": 1, "C": 1024}], "frame": [{"B": 1}], "prefill": [{"B": 1, "T": 150}]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=15)
    args = parser.parse_args()
    manifest = Manifest.load(args.artifacts)
    print(f"load average {os.getloadavg()[0]:.1f}, {args.threads} thread(s), medians of {args.calls} interleaved calls")
    with tempfile.TemporaryDirectory(dir=args.artifacts.parent) as scratch:
        for name, variant in VARIANTS.items():
            other = export_variant(manifest, name, Path(scratch) / name)
            compare(name, variant, manifest, other, args.threads, args.calls)


def compare(name, variant, manifest, other, threads, calls) -> None:
    """Both graphs on the same feeds, in turn."""
    backend = OrtBackend(threads)
    sessions = [
        backend.open(m.graph(variant.graph).spec, m.path(m.graph(variant.graph).file)) for m in (manifest, other)
    ]
    nodes = [m.graph(variant.graph).num_nodes for m in (manifest, other)]
    for axes in CASES[variant.graph]:
        spec = sessions[0].spec.bind_known(axes)
        feeds = example_feeds(spec, manifest.model, manifest.codec, np.random.default_rng(0))
        cpu, wall = ([[], []] for _ in range(2))
        for _ in range(1 + calls):
            for i, session in enumerate(sessions):
                c, w = time.process_time(), time.perf_counter()
                session.run(feeds)
                cpu[i].append(1e3 * (time.process_time() - c))
                wall[i].append(1e3 * (time.perf_counter() - w))
        (a, b), (c, d) = (tuple(float(np.median(x[1:])) for x in pair) for pair in (cpu, wall))
        print(
            f"{name:<16} {variant.graph} {axes}: nodes {nodes[0]} / {nodes[1]}, CPU ms {a:.2f} / {b:.2f}: saves "
            f"{b - a:.2f} ({b / a:.2f}x), wall ms {c:.2f} / {d:.2f} ({d / c:.2f}x)"
        )
    for session in sessions:
        session.close()


if __name__ == "__main__":
    main()
