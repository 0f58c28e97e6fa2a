from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from op_patches.graph_view import attributes

FORMS = [
    ("value_float = 2.5", "float", np.float32(2.5)),
    ("value_floats = [2.5, 1.0]", "float[2]", np.float32([2.5, 1.0])),
    ("value_int = 7", "int64", np.int64(7)),
    ("value_ints = [7, -1]", "int64[2]", np.int64([7, -1])),
]


@pytest.mark.parametrize(("form", "kind", "want"), FORMS)
def test_every_form_becomes_value(lower, form, kind, want):
    result = lower(f"g ({kind} x) => ({kind} y, {kind} k) {{ k = Constant <{form}> () y = Add (x, k) }}")
    assert result.count("constant") == 1
    (constant,) = [n for n in result.model.graph.node if n.op_type == "Constant"]
    np.testing.assert_array_equal(numpy_helper.to_array(attributes(constant)["value"]), want)


def model_of(node, kind, out_type, extra=()):
    return helper.make_model(
        helper.make_graph(
            [node, helper.make_node("Identity", ["k"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", kind, [1])],
            [helper.make_tensor_value_info("y", out_type, None)],
            sparse_initializer=extra,
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )


def test_strings_become_value(lower):
    for form in ({"value_string": "ab"}, {"value_strings": ["a", "b"]}):
        node = helper.make_node("Constant", [], ["k"], **form)
        result = lower(model_of(node, 1, TensorProto.STRING), compare=False)
        assert "value" in attributes(result.model.graph.node[0])


def sparse(indices):
    values = numpy_helper.from_array(np.float32([1.5, -2]), "k")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.int64(indices), "i"), [2, 3])


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]])
def test_a_sparse_value_gets_its_zeros(lower, indices):
    node = helper.make_node("Constant", [], ["k"], sparse_value=sparse(indices))
    result = lower(model_of(node, 1, TensorProto.FLOAT), compare=False)
    value = numpy_helper.to_array(attributes(result.model.graph.node[0])["value"])
    np.testing.assert_array_equal(value, np.float32([[0, 1.5, 0], [0, 0, -2]]))


def test_a_sparse_initializer_becomes_an_ordinary_one(lower):
    model = onnx.ModelProto()
    model.CopyFrom(model_of(helper.make_node("Neg", ["x"], ["n"]), 1, TensorProto.FLOAT, [sparse([1, 5])]))
    result = lower(model, compare=False)
    assert result.count("sparse_initializer") == 1
    (tensor,) = result.model.graph.initializer
    assert tensor.name == "k"
    assert not result.model.graph.sparse_initializer
