"""Graphs with the roundings of a precision mode: what ONNX Runtime computes must equal the roundings done in NumPy."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from op_patches.precision import (
    NOTHING,
    Keep,
    Mode,
    read_probes,
    reduce_precision,
    round_constant,
    round_weights,
    with_probes,
)
from op_patches.targets import Target
from runtime.errors import PatchError

TARGET = Target()


def parse(body: str, inputs: str = "float[2,4] x", outputs: str = "float[2,4] y") -> onnx.ModelProto:
    """One node a line: `name: out = Op (in)`; the parser of this onnx release has no node names."""
    lines, names = [], []
    for line in body.strip().splitlines():
        name, _, node = line.strip().partition(": ")
        names.append(name)
        lines.append(node)
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {" ".join(lines)} }}'
    model = onnx.parser.parse_model(text)
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    return model


def with_weight(model: onnx.ModelProto, name: str, values: np.ndarray) -> onnx.ModelProto:
    model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    return model


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def half(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)


def test_every_result_is_rounded_and_sums_are_not():
    model = with_weight(parse("mm: p = MatMul (x, w)\nadd: y = Add (p, x)"), "w", W)
    before = model.SerializeToString()
    reduced = reduce_precision(model, Mode.FP16, TARGET)
    product = half(half(X) @ half(W))
    np.testing.assert_array_equal(run(reduced.model, x=X)[0], half(product + half(X)))
    assert not np.array_equal(run(reduced.model, x=X)[0], run(model, x=X)[0])  # the roundings are really there
    assert model.SerializeToString() == before and reduced.nodes == ["mm", "add"]
    assert [i.name for i in reduced.model.graph.input] == ["x"] and reduced.model.graph.output == model.graph.output


def test_bfloat16_rounds_to_eight_bits():
    model = with_weight(parse("mm: y = MatMul (x, w)"), "w", W)
    bfloat = lambda v: v.astype(ml_dtypes.bfloat16).astype(np.float32)  # noqa: E731
    got = run(reduce_precision(model, Mode.BF16, TARGET).model, x=X)[0]
    np.testing.assert_array_equal(got, bfloat(bfloat(X) @ bfloat(W)))
    with pytest.raises(PatchError, match="no bfloat16"):
        reduce_precision(model, Mode.BF16, Target(soc="Ascend310P3"))


def test_mixed_keeps_black_types_and_lets_grey_types_follow():
    model = parse(
        "t0: a = Tanh (x)\nmm: p = MatMul (a, w)\nt1: q = Tanh (p)\nsum: s = ReduceSum (q)\nt2: y = Tanh (s)",
        outputs="float[1,1] y",
    )
    reduced = reduce_precision(with_weight(model, "w", W), Mode.MIXED, TARGET)
    assert reduced.nodes == ["mm", "t1"]  # t0 has no reduced neighbour before it, t2 reads a black node
    q = half(np.tanh(half(half(np.tanh(X)) @ half(W))))
    np.testing.assert_allclose(run(reduced.model, x=X)[0], np.tanh(q.sum()), rtol=1e-6)


def test_hf32_rounds_the_inputs_of_products_alone():
    model = with_weight(parse("mm: p = MatMul (x, w)\nmul: y = Mul (p, x)"), "w", W)
    reduced = reduce_precision(model, Mode.HF32, TARGET)
    assert reduced.nodes == ["mm"]
    rounded = round_constant(X, Mode.HF32), round_constant(W, Mode.HF32)
    np.testing.assert_allclose(run(reduced.model, x=X)[0], (rounded[0] @ rounded[1]) * X, rtol=1e-6)
    assert np.abs(run(reduced.model, x=X)[0] - run(model, x=X)[0]).max() > 1e-6


def test_the_splitting_in_the_graph_equals_the_rounding_of_constants():
    x = (np.random.default_rng(2).standard_normal((2, 4)) * 1e3).astype(np.float32)
    identity = with_weight(parse("mm: y = MatMul (x, w)"), "w", np.eye(4))
    got = run(reduce_precision(identity, Mode.HF32, TARGET).model, x=x)[0]
    np.testing.assert_array_equal(got, round_constant(x, Mode.HF32))
    assert (got.view(np.uint32) & 0xFFF == 0).all()  # 11 bits of mantissa are left


def test_what_is_kept_stays_float32():
    model = with_weight(parse("mm: p = MatMul (x, w)\nadd: y = Add (p, x)"), "w", W)
    by_name = reduce_precision(model, Mode.FP16, TARGET, Keep(frozenset({"mm"})))
    by_type = reduce_precision(model, Mode.FP16, TARGET, Keep(op_types=frozenset({"MatMul"})))
    for reduced in (by_name, by_type):
        assert reduced.nodes == ["add"]
        np.testing.assert_array_equal(run(reduced.model, x=X)[0], half(half(X @ W) + half(X)))
    everything = reduce_precision(model, Mode.FP16, TARGET, Keep(op_types=frozenset({"MatMul", "Add"})))
    np.testing.assert_array_equal(run(everything.model, x=X)[0], run(model, x=X)[0])


def test_a_move_of_rounded_values_gets_no_rounding_of_its_own():
    model = with_weight(
        parse("mm: p = MatMul (x, w)\nt: q = Transpose (p)\nn: y = Neg (q)", outputs="float[4,2] y"), "w", W
    )
    reduced = reduce_precision(model, Mode.FP16, TARGET)
    casts = [n for n in reduced.model.graph.node if n.op_type == "Cast"]
    assert len(casts) == 4  # one pair for x, one for the product
    np.testing.assert_array_equal(run(reduced.model, x=X)[0], -half(half(X) @ half(W)).T)


def test_integers_are_left_alone():
    model = parse("c: i = Cast <to = 7> (x)\nadd: y = Add (i, i)", outputs="int64[2,4] y")
    reduced = reduce_precision(model, Mode.FP16, TARGET)
    assert reduced.nodes == ["c"]  # its input is a float
    np.testing.assert_array_equal(run(reduced.model, x=X)[0], 2 * half(X).astype(np.int64))


@pytest.mark.parametrize("mode", [Mode.FP16, Mode.BF16])
def test_constants_round_like_the_type_itself_and_float16_clips(mode):
    x = np.random.default_rng(3).standard_normal(2000).astype(np.float32) * 10 ** np.linspace(-6, 4, 2000)
    ties = (1 + np.arange(64) * 2.0**-8).astype(np.float32)  # every second one lies between two bfloat16
    x = np.concatenate([x, ties, -ties, 1 + ties * 2.0**-5]).astype(np.float32)
    dtype = np.float16 if mode is Mode.FP16 else ml_dtypes.bfloat16
    np.testing.assert_array_equal(round_constant(x, mode), x.astype(dtype).astype(np.float32))
    big = round_constant(np.array([1e6, -1e6], np.float32), mode)
    assert (np.abs(big) == 65504).all() if mode is Mode.FP16 else (np.abs(big) > 9e5).all()


def test_the_first_node_that_overflows_is_found_by_name():
    model = parse("a: p = Mul (x, k)\nb: q = Mul (p, k)\nc: y = Sub (q, q)")
    reduced = reduce_precision(with_weight(model, "k", np.array(1000.0)), Mode.FP16, TARGET)
    probed, names = with_probes(reduced)
    values = run(probed, x=np.ones((2, 4), np.float32))
    ranges = read_probes(names, values[1:])
    assert [(r.node, r.op_type, r.overflows) for r in ranges] == [
        ("a", "Mul", False), ("b", "Mul", True), ("c", "Sub", True)
    ]  # fmt: skip
    assert (ranges[0].largest, ranges[1].largest) == (1000, 1e6)
    assert ranges[2].not_finite and not ranges[1].not_finite  # infinity minus infinity
    assert np.isnan(values[0]).all()


def test_external_weights_are_rounded_into_a_file_of_their_own(tmp_path: Path):
    model = with_weight(parse("mm: p = MatMul (x, w)\nm2: y = MatMul (p, v)"), "w", W)
    model = with_weight(model, "v", W.T[::-1])
    onnx.save(model, str(tmp_path / "g.onnx"), save_as_external_data=True, location="w.bin", size_threshold=0)
    light = onnx.load(str(tmp_path / "g.onnx"), load_external_data=False)
    with pytest.raises(PatchError, match="no file with rounded weights"):
        reduce_precision(light, Mode.FP16, TARGET)
    round_weights([light], tmp_path, tmp_path / "r.bin", Mode.FP16)
    reduced = reduce_precision(light, Mode.FP16, TARGET, NOTHING, "r.bin")
    (tmp_path / "r.onnx").write_bytes(reduced.model.SerializeToString())
    session = onnxruntime.InferenceSession(str(tmp_path / "r.onnx"), providers=["CPUExecutionProvider"])
    expected = half(half(half(X) @ half(W)) @ half(W.T[::-1]))
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)


def test_a_keep_list_is_what_the_atc_step_reads():
    from convert.atc_keep import KeepList

    keep = Keep(frozenset({"global/layer_00/norm/div", "local/x"}), frozenset({"Softmax"}))
    assert Keep.parse("# why\n" + keep.lines()) == keep
    read = KeepList.parse(keep.lines(), "keep.txt")
    assert (set(read.names), set(read.op_types)) == (keep.names, keep.op_types)
