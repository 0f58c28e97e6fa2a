"""Which operator and block size for convert/cpu_weights.py; the figures in docs/cpu-weights.md come from here.

    python tests/e2e/measure_cpu_weights.py

One thread; the time of a product is the shortest of all runs, summed over three matrices of the published transformer.
There are several copies of each, so that the first caches do not hold them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

from convert.cpu_weights import DOMAIN, FLOAT_COMPUTE, INT8_COMPUTE, BlockFormat, quantise

SHAPES = ((768, 2304), (768, 3072), (3072, 768))
ROWS = {1: 30, 150: 6}  # rows of the product -> repeats
COPIES = 8


def session(node: Any, weights: dict[str, Any], k: int, n: int) -> ort.InferenceSession:
    values = [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["M", size]) for x, size in (("x", k), ("y", n))]
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:], constants), opset_imports=opsets)
    model.ir_version = 8
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def float32(w: Any) -> ort.InferenceSession:
    return session(helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": w}, *w.shape)


def dynamic(w: Any) -> ort.InferenceSession:
    scale = (np.abs(w).max(0) / 127).astype(np.float32)
    node = helper.make_node("DynamicQuantizeMatMul", ["x", "w", "s"], ["y"], domain=DOMAIN)
    return session(node, {"w": np.round(w / scale).astype(np.int8), "s": scale}, *w.shape)


def blocks(w: Any, bits: int, block: int, accuracy: int) -> ort.InferenceSession:
    k, n = w.shape
    codes, scales, _ = quantise(torch.from_numpy(w).T, BlockFormat(n, k, bits, block))
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain=DOMAIN, K=k, N=n, bits=bits,
                            block_size=block, accuracy_level=accuracy)  # fmt: skip
    return session(node, {"w": codes.reshape(n, k // block, -1), "s": scales}, k, n)


def main() -> None:
    rng = np.random.default_rng(0)
    kinds: dict[str, Any] = {"float32": float32, "DynamicQuantizeMatMul": dynamic}
    for bits in (8, 4):
        for block in (32, 64, 128, 256):
            kinds[f"MatMulNBits {bits}, block {block}"] = lambda w, b=bits, s=block: blocks(w, b, s, INT8_COMPUTE)
    kinds["MatMulNBits 8, block 32, float32 compute"] = lambda w: blocks(w, 8, 32, FLOAT_COMPUTE)
    matrices = [(0.02 * rng.standard_normal(shape)).astype(np.float32) for shape in SHAPES]
    for name, make in kinds.items():
        total, errors = dict.fromkeys(ROWS, 0.0), []
        for w in matrices:
            copies = [make(w) for _ in range(COPIES)]
            for rows, repeats in ROWS.items():
                x = rng.standard_normal((rows, len(w))).astype(np.float32)
                exact = x @ w
                got = copies[0].run(None, {"x": x})[0]
                errors.append(float(np.linalg.norm(got - exact) / np.linalg.norm(exact)))
                seconds = []
                for s in copies * repeats:
                    start = time.perf_counter()
                    s.run(None, {"x": x})
                    seconds.append(time.perf_counter() - start)
                total[rows] += 1e3 * min(seconds)
        times = ", ".join(f"{rows} rows {ms:.2f} ms" for rows, ms in total.items())
        print(f"{name:<42} {times}, error {np.mean(errors):.2%}", flush=True)


if __name__ == "__main__":
    main()
