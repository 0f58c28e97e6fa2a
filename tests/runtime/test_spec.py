"""TensorSpec and GraphSpec: what they accept, what they refuse and in which words."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.errors import SpecMismatchError
from runtime.spec import GraphSpec, TensorSpec

SPEC = GraphSpec(
    "toy",
    (TensorSpec("rows", "int32", ("B", "T", 17)), TensorSpec("last", "int32", ("B",))),
    (TensorSpec("hidden", "float32", ("B", 8)),),
)


def test_binding_names_every_axis_once():
    bound = SPEC.bind(B=1, T=128)
    assert bound.dynamic_axes() == ()
    assert bound.atc_input_shape() == "rows:1,128,17;last:1"
    assert bound.inputs[0].num_bytes == 128 * 17 * 4


def test_an_unknown_axis_is_refused_by_name():
    with pytest.raises(SpecMismatchError, match="no axis named C; it has B, T"):
        SPEC.bind(C=3)


def test_an_unbound_spec_refuses_to_become_an_atc_shape():
    with pytest.raises(SpecMismatchError, match=r"rows: int32.*unbound"):
        SPEC.bind(B=1).atc_input_shape()


def test_feeds_bind_the_axes_they_show():
    feeds = {"rows": np.zeros((2, 5, 17), np.int32), "last": np.zeros(2, np.int32)}
    assert SPEC.check_feeds(feeds) == {"B": 2, "T": 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((1, 5, 17), np.int64)}, r"rows: expected int32\[B, T, 17\], got int64\[1, 5, 17\]"),
        ({"rows": np.zeros((1, 5, 16), np.int32)}, r"rows: expected int32\[B, T, 17\], got int32\[1, 5, 16\]"),
        ({"rows": np.zeros((1, 17), np.int32)}, r"got int32\[1, 17\]"),
        ({"rows": np.zeros((1, 0, 17), np.int32)}, r"got int32\[1, 0, 17\]"),
        ({"last": np.zeros(2, np.int32)}, r"last: expected int32\[1\], got int32\[2\]"),
        ({"extra": np.zeros(1, np.int32)}, "unknown input extra; inputs: rows, last"),
    ],
)
def test_wrong_feeds_are_refused_with_expected_and_got(change, message):
    feeds = {"rows": np.zeros((1, 5, 17), np.int32), "last": np.zeros(1, np.int32)}
    with pytest.raises(SpecMismatchError, match=message):
        SPEC.check_feeds({**feeds, **change})


def test_a_missing_feed_is_named():
    with pytest.raises(SpecMismatchError, match="input last is missing"):
        SPEC.check_feeds({"rows": np.zeros((1, 5, 17), np.int32)})


@pytest.mark.parametrize(
    "arguments",
    [("a:b", "int32", (1,)), ("a;b", "int32", (1,)), ("a", "int8", (1,)), ("a", "int32", (0,)), ("", "int32", ())],
)
def test_impossible_tensors_cannot_be_made(arguments):
    with pytest.raises(SpecMismatchError):
        TensorSpec(*arguments)


def test_a_tensor_name_is_used_once():
    with pytest.raises(SpecMismatchError, match="used twice: x"):
        GraphSpec("g", (TensorSpec("x", "int32", (1,)),), (TensorSpec("x", "int32", (1,)),))


def test_json_and_back():
    assert GraphSpec.from_dict(SPEC.to_dict()) == SPEC
