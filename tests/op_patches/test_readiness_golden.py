"""The parser layer against the verdicts of CANN's own ONNX parser (tests/data/readiness, see the README there).

The node cases are made again from the installed onnx package, so that 1,253 models need no place in this repository.
"""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto

from op_patches.readiness import ReadinessReport, check_model, first_refusal
from op_patches.targets import Target

DATA = Path(__file__).parents[1] / "data" / "readiness"
VERDICTS: dict[str, Any] = json.loads(gzip.decompress((DATA / "verdicts.json.gz").read_bytes()))
CANN_8_5 = Target.parse("cann=8.5,soc=Ascend910B4,precision=origin")
# What an empty constant is called here, by the input that the plugin could not fill.
EMPTY_RULES = {"silent.empty-constant", "silent.empty-axes", "silent.reduce-axes-input"}


@dataclass(slots=True)
class Score:
    compared: int = 0
    refusals: int = 0
    right_codes: int = 0
    wrong: list[str] = field(default_factory=list)
    missed_losses: list[str] = field(default_factory=list)


def _verdict(report: ReadinessReport) -> tuple[str, str | None]:
    first = report.first_refusal
    if first is None:
        return "accepted", None
    return ("crashed", None) if first.code.startswith("SIG") else ("refused", first.code)


def _missed_losses(report: ReadinessReport, golden: dict[str, Any]) -> Iterator[str]:
    """Losses that the parser logged and the report does not have."""
    for warning in golden.get("warnings", []):  # "empty Const NAME (no data)"
        name = warning.split()[2]
        named = any(f.node == name and f.rule == "silent.empty-constant" for f in report.findings)
        if not named and not (name.startswith("PartitionedCall") and EMPTY_RULES & {f.rule for f in report.findings}):
            yield warning
    # An edge that leads nowhere; the parser goes on.
    if golden.get("code") == "E18888" and all(f.code != "E18888" for f in report.findings):
        yield golden["message"]


def _compare(score: Score, name: str, report: ReadinessReport, golden: dict[str, Any]) -> None:
    score.compared += 1
    verdict, code = _verdict(report)
    if verdict != golden["verdict"]:
        score.wrong.append(f"{name}: predicted {verdict} {code}, the parser said {golden['verdict']}")
    if golden["verdict"] == "refused":
        score.refusals += 1
        score.right_codes += code == golden["code"]
    score.missed_losses += [f"{name}: {loss}" for loss in _missed_losses(report, golden)]


def _node_models() -> Iterator[tuple[str, ModelProto]]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the cases compute with infinities on purpose
        cases = collect_testcases()
    for case in cases:
        if case.name not in VERDICTS["node"] or case.model is None:
            continue
        model = ModelProto()
        model.CopyFrom(case.model)
        del model.opset_import[:]
        model.opset_import.add(domain="", version=17)
        for index, node in enumerate(model.graph.node):
            node.name = node.name or f"n{index}"
        yield case.name, model


@cache
def _node_score() -> Score:
    score = Score()
    for name, model in _node_models():
        _compare(score, name, check_model(model, CANN_8_5), VERDICTS["node"][name])
    return score


@cache
def _hand_score() -> Score:
    score = Score()
    for name, golden in VERDICTS["hand"].items():
        _compare(score, name, check_model(DATA / "cases" / f"{name}.onnx", CANN_8_5), golden)
    return score


def test_every_hand_made_case_gets_the_verdict_of_the_parser() -> None:
    score = _hand_score()
    assert score.compared == 81
    assert score.wrong == []


def test_every_hand_made_refusal_gets_the_code_of_the_parser() -> None:
    score = _hand_score()
    assert score.refusals == 22
    assert score.right_codes == score.refusals


def test_at_least_99_percent_of_the_node_cases_get_the_verdict_of_the_parser() -> None:
    score = _node_score()
    assert score.compared >= 1200, "the installed onnx has too few of the cases; take the version of the verdicts"
    assert len(score.wrong) <= 0.01 * score.compared, score.wrong


def test_at_least_95_percent_of_the_node_refusals_get_the_code_of_the_parser() -> None:
    score = _node_score()
    assert score.refusals >= 250
    assert score.right_codes >= 0.95 * score.refusals


def test_every_silent_loss_that_the_parser_logged_is_flagged() -> None:
    assert _hand_score().missed_losses == []
    assert _node_score().missed_losses == []


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("const_chain_to_output", "silent.vanished-output"),
        ("unknown_input_tensor", "silent.unconnected-input"),
        ("if_nested_only_inner_capture", "silent.nested-capture"),
        ("ReduceMean_18_input", "silent.reduce-axes-input"),
        ("shape_startend", "silent.ignored-attribute"),
        ("scatterelements_add", "silent.ignored-attribute"),
        ("external_missing_file", "external.missing"),
        ("zero_dim_input", "shape.zero-dim"),
        ("const_value_ints", "silent.empty-constant"),
        ("empty_out_plus_optional_in", "silent.empty-output-name"),
    ],
)
def test_a_loss_that_changes_the_result_blocks(case: str, rule: str) -> None:
    report = check_model(DATA / "cases" / f"{case}.onnx", CANN_8_5)
    assert rule in {finding.rule for finding in report.blocking}


@pytest.mark.parametrize(
    "case",
    [
        "if_nested_capture",
        "if_nested_inner_captures_branch_node",
        "init_in_subgraph",
        "passthrough_output",
        "unused_input",
    ],
)
def test_a_graph_that_loses_nothing_has_no_blocking_finding(case: str) -> None:
    assert check_model(DATA / "cases" / f"{case}.onnx", CANN_8_5).blocking == ()


def test_messages_are_those_of_the_parser() -> None:
    """Word for word, but for one: the parser reads memory beside the shape and prints what it finds there."""
    for name, golden in VERDICTS["hand"].items():
        if golden["verdict"] == "refused" and name != "split18_input_axm1":
            refusal = first_refusal(DATA / "cases" / f"{name}.onnx", CANN_8_5)
            assert refusal == (golden["code"], golden["message"])
