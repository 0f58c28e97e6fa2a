from __future__ import annotations

import onnx

from op_patches.pipeline import apply_lowerings
from op_patches.targets import Target


def test_nodes_without_a_name_get_one(lower):
    result = lower("g (float[4] x) => (float[4] y) { z = Neg (x) y = Abs (z) }")
    assert result.count("names") == 2
    assert [n.name for n in result.model.graph.node] == ["Neg_0_z", "Abs_1_y"]


def test_equal_names_are_told_apart(lower):
    result = lower('g (float[4] x) => (float[4] y) { ["n"] z = Neg (x) ["n"] y = Abs (z) }')
    assert [n.name for n in result.model.graph.node] == ["n", "n_2"]


def test_a_node_named_like_an_input_or_initializer_is_renamed(lower):
    graph = 'g (float[4] x) => (float[4] y) <float[4] w = {1,2,3,4}> { ["x"] z = Neg (x) ["w"] y = Add (z, w) }'
    assert [n.name for n in lower(graph).model.graph.node] == ["x_2", "w_2"]


def test_separators_leave_names_of_nodes_and_values(lower):
    result = lower('g (float[4] x) => (float[4] y) { ["a:0;b"] "z:1" = Neg (x) ["ok/n.1"] y = Abs ("z:1") }')
    assert [n.name for n in result.model.graph.node] == ["a_0_b", "ok/n.1"]
    assert result.model.graph.node[0].output[0] == "z_1"


def test_an_odd_interface_name_is_refused_and_kept(lower):
    result = lower('g (float[4] "x:0") => (float[4] y) { ["n"] y = Neg ("x:0") }')
    assert "--input_shape cannot hold" in result.refusal("names")
    assert result.model.graph.input[0].name == "x:0"


def test_empty_outputs_are_dropped_or_named(lower):
    graph = """g (float[8] x, int64[1] k) => (int64[B] i, float[8] y)
    { ["t"] "", i = TopK (x, k) ["d"] y, "" = Dropout (x) }"""
    result = lower(
        graph, feeds={"x": __import__("numpy").arange(8, dtype="float32"), "k": __import__("numpy").int64([3])}
    )
    assert all(o for n in result.model.graph.node for o in n.output)


def test_names_are_unique_across_branches(lower):
    graph = """g (bool c, float[4] x) => (float[4] y)
    { ["n"] y = If (c) <then_branch = t () => (float[4] a) { ["n"] a = Neg (x) },
                        else_branch = e () => (float[4] b) { ["n"] b = Abs (x) }> }"""
    result = lower(graph)
    names = [n.name for n in result.model.graph.node]
    names += [n.name for a in result.model.graph.node[0].attribute for n in a.g.node]
    assert sorted(names) == ["n", "n_2", "n_3"]


def test_local_functions_are_inlined(lower):
    text = """<ir_version: 9, opset_import: ["": 17, "local": 1]>
    g (float[4] x) => (float[4] y) { y = local.twice (x) }
    <domain: "local", opset_import: ["": 17]> twice (a) => (b) { b = Add (a, a) }"""
    result = lower(onnx.parser.parse_model(text))
    assert result.count("local_functions") == 1
    assert result.ops == ["Add"]
    assert not result.model.functions
    assert [o.domain for o in result.model.opset_import] == [""]


def test_unsorted_nodes_are_sorted(lower):
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[4] x) => (float[4] y) { z = Neg (x) y = Abs (z) }'
    )
    first, second = model.graph.node
    nodes = [second, first]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    result = lower(model, compare=False)
    assert result.ops == ["Neg", "Abs"]
    assert result.count("node_order") == 1


def test_dead_nodes_go(lower):
    result = lower("g (float[4] x) => (float[4] y) { z = Neg (x) w = Neg (z) y = Abs (x) }")
    assert result.ops == ["Abs"]
    assert result.count("dead_nodes") == 2


def test_ai_onnx_is_the_empty_domain_and_unused_domains_go(lower):
    result = lower("g (float[4] x) => (float[4] y) { y = Neg (x) }", domains='"ai.onnx.ml": 3')
    assert [o.domain for o in result.model.opset_import] == [""]
    assert result.count("opset_imports") == 1


def test_a_foreign_operator_without_a_lowering_is_named():
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17, "odd": 1]> g (float[4] x) => (float[4] y) { y = odd.Thing (x) }'
    )
    patched, report = apply_lowerings(model, Target.parse("910B4"))
    assert patched.graph.node[0].op_type == "Thing"
    assert any("domain odd has no lowering" in r.reason for r in report.refusals)
    assert report.remaining
