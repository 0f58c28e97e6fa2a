"""The tracer: what it emits equals torch, what it cannot express it refuses by name."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.trace import trace
from runtime.errors import ExportError
from runtime.modules.scope import label, scope
from runtime.spec import GraphSpec, TensorSpec

X = TensorSpec("x", "float32", ("B", "T", 8))
IDS = TensorSpec("ids", "int32", ("B", "T"))


class Function(nn.Module):
    """A module around one function, with one weight."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8) / 64, requires_grad=False)

    def forward(self, *args):
        return self.function(self, *args)


def run(function, inputs, outputs, feeds):
    """Trace, fill in the weight, run on ONNX Runtime; return the model and (expected, got)."""
    module = Function(function)
    spec = GraphSpec("toy", inputs, outputs)
    model, refs = trace(module, spec, {"B": 2, "T": 3})
    for tensor in model.graph.initializer:
        if tensor.name in refs:
            start = refs[tensor.name].byte_offset // 4
            data = module.weight.flatten()[start : start + refs[tensor.name].num_bytes // 4]
            tensor.CopyFrom(onnx.numpy_helper.from_array(data.reshape(tuple(tensor.dims)).numpy(), tensor.name))
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(None, feeds)
    expected = module(*(torch.from_numpy(v) for v in feeds.values()))
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    return model, [e.numpy() for e in expected], got


CASES = {
    "matmul and scalars": lambda m, x: 1.0 - torch.matmul(x, m.weight) * 0.5 / 3.0,
    "gelu erf": lambda m, x: functional.gelu(x),
    "gelu tanh": lambda m, x: functional.gelu(x, approximate="tanh"),
    "layer norm": lambda m, x: functional.layer_norm(x, (8,), m.weight[0], m.weight[1], 1e-5),
    "softmax": lambda m, x: torch.softmax(x, dim=-1),
    "heads": lambda m, x: torch.unflatten(x, 2, (2, 4)).transpose(1, 2).transpose(1, 2).flatten(2),
    "split and cat": lambda m, x: torch.cat(torch.split(x, [3, 5], dim=-1)[::-1], dim=-1),
    "slices": lambda m, x: torch.cat([x[..., 2:], x[:, :, :2]], dim=-1),
    "pad": lambda m, x: functional.pad(x, (0, 0, 1, 0), value=2.0)[:, :-1],
    "where": lambda m, x: torch.where(x < 0.0, x * 2.0, x),
    "clamp and minimum": lambda m, x: torch.minimum(x.clamp(-0.5, 0.5), m.weight[0]),
    "sums": lambda m, x: x + x.sum(-1, keepdim=True) + x.amax(-1, keepdim=True) + x.mean(-1, keepdim=True),
    "cumsum": lambda m, x: torch.cumsum(x, dim=-1),
    "top-k": lambda m, x: torch.cat([torch.topk(x, 5, dim=-1)[0], x[..., :3]], dim=-1),
    "squeeze": lambda m, x: (x.unsqueeze(1) + m.weight[0]).squeeze(1),
    "rows of a weight": lambda m, x: x + m.weight[2:3],
}


@pytest.mark.parametrize("name", list(CASES))
def test_every_function_of_the_table_equals_torch(name):
    x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    _, expected, got = run(CASES[name], (X,), (TensorSpec("y", "float32", ("B", "T", 8)),), {"x": x})
    np.testing.assert_allclose(got[0], expected[0], atol=2e-6)


def test_integers_stay_int32():
    def codes(m, ids):
        shifted = torch.remainder(torch.minimum(ids, torch.tensor(6, dtype=torch.int32)) + 1, 7)
        return functional.embedding(shifted, m.weight), (shifted >= 3).to(torch.int32)

    outputs = (TensorSpec("y", "float32", ("B", "T", 8)), TensorSpec("flag", "int32", ("B", "T")))
    ids = np.random.default_rng(0).integers(0, 9, (2, 4)).astype(np.int32)
    model, expected, got = run(codes, (IDS,), outputs, {"ids": ids})
    for want, have in zip(expected, got, strict=True):
        assert np.array_equal(want, have)
    assert not [n for n in model.graph.node if n.op_type == "Cast" and n.attribute[0].i == onnx.TensorProto.INT64]


def test_names_follow_the_modules_and_labels_and_are_unique():
    class Layer(nn.Module):
        def forward(self, x):
            with scope("attention"):
                return label(x + 1.0, "scores") * 2.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x):
            return self.layers[1](self.layers[0](self.layers[0](x)))

    model, _ = trace(Net(), GraphSpec("g", (X,), (TensorSpec("y", "float32", X.shape),)), {"B": 1, "T": 1})
    names = [n.name for n in model.graph.node]
    assert names[:4] == ["layer_00/attention/scores", "layer_00/attention/mul", "layer_00/attention/scores_1",
                         "layer_00/attention/mul_1"]  # fmt: skip
    assert len(set(names)) == len(names) and model.graph.node[-1].output[0] == "y"


def test_an_output_that_is_an_input_or_used_twice_gets_its_own_node():
    outputs = (
        TensorSpec("y", "float32", X.shape),
        TensorSpec("z", "float32", X.shape),
        TensorSpec("w", "float32", X.shape),
    )

    def twice(m, x):
        y = x + 1.0
        return y, y, x

    x = np.zeros((1, 1, 8), np.float32)
    _, expected, got = run(twice, (X,), outputs, {"x": x})
    for want, have in zip(expected, got, strict=True):
        assert np.array_equal(want, have)


Y = TensorSpec("y", "float32", ("B", "T", 8))


@pytest.mark.parametrize(
    ("function", "outputs", "message"),
    [
        (lambda m, x: torch.fft.rfft(x), (Y,), "fft_rfft has no ONNX rule"),
        (lambda m, x: x + x.shape[0], (Y,), "symbolic"),
        (lambda m, x: x[..., ::2], (Y,), "strided"),
        (lambda m, x: x + torch.ones(8, dtype=torch.int32), (Y,), "ONNX does not promote"),
        (lambda m, x: torch.matmul(x, m.weight.T), (Y,), "strided view of a weight"),
        (lambda m, x: m.weight + 0.0, (Y,), "does not depend on any input"),
        (lambda m, x: torch.matmul(x, torch.zeros(8, 8_000))[..., :8], (Y,), "not in the module's state"),
        (lambda m, x: (x, x), (Y,), "returns 2 values, the spec names 1"),
        (lambda m, x: x > 0.0, (Y,), "expected float32, the module computes torch.bool"),
    ],
)
def test_what_cannot_be_a_graph_is_refused_with_the_reason(function, outputs, message):
    spec = GraphSpec("toy", (X,), outputs)
    with pytest.raises(ExportError, match=message):
        trace(Function(function), spec, {"B": 1, "T": 1})
