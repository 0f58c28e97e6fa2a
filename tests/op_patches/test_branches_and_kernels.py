"""If with a known condition, and convolutions whose kernel size is only in the weight."""

from __future__ import annotations

import numpy as np
import pytest

from op_patches.readiness import check_model
from op_patches.targets import Target

A2 = Target.parse("910B4")


@pytest.mark.parametrize(("value", "op"), [(1, "Neg"), (0, "Abs")])
def test_the_branch_that_runs_takes_the_place_of_a_constant_if(lower, value, op):
    done = lower(f"""g (float[2,3] x) => (float[2,3] y) <bool c = {{{value}}}> {{
        y = If (c) <then_branch = a () => (float[2,3] t) {{ t = Neg (x) }},
                    else_branch = b () => (float[2,3] t) {{ t = Abs (x) }}>
    }}""")
    assert done.ops == [op, "Identity"]
    assert done.count("constant_if") == 1
    assert not check_model(done.model, A2).blocking


def test_branches_keep_their_constants_their_captures_and_names_apart(lower):
    done = lower("""g (float[2] x) => (float[2] y, float[2] z) <bool yes = {1}, bool no = {0}> {
        y = If (yes) <then_branch = a () => (float[2] t) <float w = {2}> {
                          s = Mul (x, w)
                          t = If (no) <then_branch = d () => (float[2] u) { u = Neg (s) },
                                       else_branch = e () => (float[2] u) { u = Exp (s) }> },
                      else_branch = b () => (float[2] t) { t = Abs (x) }>
        z = If (no) <then_branch = c () => (float[2] t) { t = Abs (x) },
                     else_branch = f () => (float[2] t) <float w = {3}> { s = Add (x, w) t = Neg (s) }>
    }""")
    assert done.count("constant_if") == 3
    assert "If" not in done.ops
    assert {"Mul", "Exp", "Add", "Neg"} <= set(done.ops)


def test_an_open_condition_stays(lower):
    done = lower(
        """g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = a () => (float[2] t) { t = Neg (x) },
                    else_branch = b () => (float[2] t) { t = Abs (x) }>
    }""",
        feeds={"c": np.bool_(True), "x": np.ones(2, np.float32)},
    )
    assert done.ops == ["If"]


@pytest.mark.parametrize(
    ("graph", "kernel"),
    [
        ("g (float[1,2,5,6] x, float[3,2,2,3] w) => (float[1,3,4,4] y) { y = Conv (x, w) }", [2, 3]),
        ("g (float[1,2,5] x, float[2,3,4] w) => (float[1,3,n] y) { y = ConvTranspose <strides=[2]> (x, w) }", [4]),
    ],
)
def test_the_kernel_size_comes_from_the_weight(lower, graph, kernel):
    done = lower(graph)
    assert done.count("conv_kernel") == 1
    (node,) = done.model.graph.node
    assert {a.name: list(a.ints) for a in node.attribute}["kernel_shape"] == kernel
    assert not check_model(done.model, A2).blocking


def test_a_conv_with_one_attribute_is_what_the_plugin_asks_for(lower):
    done = lower("g (float[1,2,5] x, float[3,2,2] w) => (float[1,3,2] y) { y = Conv <strides=[3]> (x, w) }")
    assert done.count("conv_kernel") == 0


def test_a_weight_of_unknown_size_is_refused(lower):
    done = lower("g (float[1,2,9] x, float[3,2,k] w) => (float[1,3,m] y) { y = Conv (x, w) }")
    assert "the shape of the weight w is unknown" in done.refusal("conv_kernel")
