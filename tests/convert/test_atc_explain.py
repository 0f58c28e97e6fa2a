"""Explaining ATC failures from log text alone: layouts, codes, nodes, symptoms."""

from __future__ import annotations

import json
import re
from importlib import resources

import click
import pytest

from convert.atc_explain import AtcRun, Context, Explanation, explain, first_error, known_codes, parse_messages
from convert.cli import cli

SCORES = "global/layer_03/attention/scores"
NORM = "global/layer_03/norm_1/norm"
NODES = {
    "global/layer_03/attention/scores": "MatMul",
    "global/layer_03/attention/scores_scaled": "Mul",
    "global/layer_03/norm_1/norm": "LayerNormalization",
}
CONTEXT = Context("/art", "cann=8.5,soc=Ascend910B4,precision=origin", "step", "/art/step.onnx", "/art/step.log", NODES)
START = "ATC start working now, please wait for a moment.\n...\n"
FAILED = START + "ATC run failed, Please check the detail log, Try 'atc --help' for more information\n"
FIELDS = """        Possible Cause: the attribute is wrong
        Solution: set it right
        TraceBack (most recent call last):
        AssertShape failed[FUNC:Check][FILE:a.cc][LINE:1]
"""

# Every code that the reference names (docs/atc.md): ATC's, the parser's, the op compiler's, and those of the runtime
# that a build can print.
REFERENCE_CODES = """
E10001 E10002 E10003 E10004 E10007 E10009 E10010 E10011 E10014 E10016 E10017 E10018 E10019 E10021 E10022 E10031 E10035
E10036 E10037 E10038 E10039 E10040 E10041 E10045 E10046 E10047 E10049 E10054 E10056 E10057 E10058 E10501 EZ0501 E11010
E11017 E13009 E13010 E13023 E13024 E13025 E13031 E14001 E16001 E16002 E16004 E16005 E19010 E19999 E20001 E20002 E20101
E20103 E21001 E21002 E22001 E40001 E40002 E40020 E40021 E40024 EE1001 EE1010 EH0001 EL0003 EL0004 EZ0001 EZ0002 EZ0003
EZ0004 EZ0005 EZ0006 EZ0007 EZ3002 EZ3003 EZ9010 EZ9999 W11001
""".split()  # noqa: SIM905


def explained(output: str, exit_code: int | None = 255, plog: str = "", **run: bool) -> Explanation:
    return explain(AtcRun(exit_code, 12.0, output, 0, plog=plog, **run), CONTEXT)  # type: ignore[arg-type]


def layout_8(code: str, text: str) -> str:
    return f"{FAILED}{code}: [PID: 200452] 2025-06-16-13:02:36.801.136 {text}\n{FIELDS}"


def layout_9(code: str, text: str) -> str:
    return f"{FAILED}[PID: 758] 2026-05-08-03:20:31.532.507 Invalid_Argument({code}): {text}\n{FIELDS}"


def test_the_table_has_every_code_of_the_reference() -> None:
    assert set(REFERENCE_CODES) <= known_codes()


@pytest.mark.parametrize("code", REFERENCE_CODES)
@pytest.mark.parametrize("layout", [layout_8, layout_9])
def test_each_code_is_read_in_both_layouts_and_gets_a_phase_a_cause_and_a_command(code: str, layout: object) -> None:
    text = layout(code, "Something about Op [x].")  # type: ignore[operator]
    (message,) = parse_messages(text)
    assert (message.code, message.text) == (code, "Something about Op [x].")
    assert message.field("possible cause") == "the attribute is wrong"
    assert message.field("solution") == "set it right"
    if code.startswith("W"):
        return
    explanation = explained(text)
    assert explanation.code == code
    assert explanation.reason == "the attribute is wrong"
    assert "not in our table" not in explanation.meaning
    for part in (explanation.phase, explanation.meaning, explanation.cause, explanation.next_command):
        assert part and "{" not in part


def test_a_message_without_pid_and_time_is_read() -> None:
    explanation = explained(
        FAILED + "E19010: No parser is registered for Op [fa, optype [ai.onnx::11::FlashAttention]].\n"
    )
    assert (explanation.code, explanation.op_type) == ("E19010", "FlashAttention")
    assert explanation.phase == "reading the ONNX file"


def test_inner_errors_give_way_to_the_first_real_one() -> None:
    text = (
        FAILED
        + "EZ9999: Inner Error!\nEZ9999[PID: 7] 2026-05-08-03:20:31.532.507 Inner_Error(EZ9999):  build graph failed\n"
        + layout_8("EZ3003", "No supported Ops kernel and engine are found for [a], optype [Pow].")
    )
    messages = parse_messages(text)
    assert [m.code for m in messages] == ["EZ9999", "EZ3003"]
    assert messages[0].text == "build graph failed"
    explanation = explained(text)
    assert (explanation.code, explanation.op_type) == ("EZ3003", "Pow")
    assert explanation.other_codes == ("EZ9999",)


def test_an_inner_error_alone_is_shown_with_its_text() -> None:
    text = FAILED + "EZ9999: Inner Error!\nEZ9999: [PID: 7] 2025-06-16-13:02:36.801.136 must input the attr of perm\n"
    explanation = explained(text)
    assert (explanation.code, explanation.message) == ("EZ9999", "must input the attr of perm")
    assert explained(
        FAILED + "E19999: Internal Error!\nAn unknown error occurred. Please check the log.\n"
    ).message == ("An unknown error occurred. Please check the log.")


def test_inner_codes_of_other_parts_are_inner_errors_too() -> None:
    assert "inner error" in explained(layout_8("EI9999", "collective failed")).meaning


def test_a_warning_before_the_error_is_not_the_error() -> None:
    text = (
        START
        + "W11001: Op [a] does not hit the high-priority operator information library.\n"
        + layout_8("E40001", "x")
    )
    assert first_error(parse_messages(text)).code == "E40001"  # type: ignore[union-attr]


def test_a_reason_on_the_line_wins_over_the_possible_cause() -> None:
    text = layout_8(
        "EZ3002", "Optype [Pow] of Ops kernel [AIcoreEngine] is unsupported. Reason: dtype int64 is not supported"
    )
    explanation = explained(text)
    assert explanation.reason == "dtype int64 is not supported"
    assert "does not take this dtype" in explanation.meaning


@pytest.mark.parametrize(
    ("text", "node"),
    [
        (f"Failed to compile Op [{SCORES}]. (optype: [MatMul])", SCORES),
        (f"No operator plugin is registered for Op: {NORM}, optype: ai.onnx::17::LayerNormalization", NORM),
        (f"No supported Ops kernel and engine are found for [{SCORES}], optype [MatMulV2]", SCORES),
        (f"Failed to compile Op [{SCORES}_ascend_mbatch_batch_5] (StridedSliceD)", SCORES),
        (f"Failed to compile Op [{SCORES}{SCORES}_scaled]", f"{SCORES}_scaled"),
    ],
)
def test_the_onnx_node_and_its_module_are_found_in_the_message(text: str, node: str) -> None:
    explanation = explained(layout_8("E20001", text))
    assert explanation.node == node
    assert explanation.module == node.rpartition("/")[0]


def test_a_node_that_atc_made_is_shown_under_its_own_name() -> None:
    explanation = explained(layout_9("E20001", "Failed to compile Op [trans_TransData_12]. (optype: [TransData])"))
    assert (explanation.node, explanation.module, explanation.op_type) == ("trans_TransData_12", None, "TransData")


def test_an_unknown_code_is_shown_as_it_is_with_atcs_own_advice() -> None:
    explanation = explained(layout_9("E55555", "a new error"))
    assert (explanation.code, explanation.message) == ("E55555", "a new error")
    assert "not in our table" in explanation.meaning
    assert (explanation.cause, explanation.next_command) == ("the attribute is wrong", "set it right")


def test_output_without_any_code_shows_the_last_line() -> None:
    explanation = explained("bash: line 1: something odd\n", exit_code=1)
    assert (explanation.code, explanation.message) == (None, "bash: line 1: something odd")
    assert explained("", exit_code=3).message == "ATC printed nothing"


@pytest.mark.parametrize(
    ("plog", "word", "stops_all"),
    [
        ("ModuleNotFoundError: No module named 'sympy'", "package sympy", True),
        ("`np.float_` was removed in the NumPy 2.0 release", "NumPy 2", True),
        ("cannot pickle 'FrameLocalsProxy' object", "this Python", True),
        ("ImportError: libascend_hal.so: cannot open shared object file", "driver library", True),
        ("write failed: No space left on device", "disk is full", True),
        ("op type Gelu is not found in this op store", "does not have the operator", False),
    ],
)
def test_symptoms_in_the_plog_say_more_than_the_code(plog: str, word: str, stops_all: bool) -> None:
    explanation = explained(layout_8("E20001", "Failed to compile Op [x]."), plog=plog)
    assert explanation.code == "E20001"
    assert "failed to compile" in explanation.meaning and word in explanation.meaning
    assert explanation.stops_all is stops_all


def test_a_killed_process_and_a_timeout_have_no_verdict_to_read() -> None:
    assert "ran out of memory" in explained(START, exit_code=-9).cause
    assert "ran out of memory" in explained(START + "Killed\n", exit_code=137).cause
    assert "TE_PARALLEL_COMPILER=1" in explained(START, exit_code=-9).next_command
    assert "12 s" in explained(START, exit_code=None, timed_out=True).meaning


def test_success_needs_status_line_and_file() -> None:
    done = START + "ATC run success, welcome to the next use.\n"
    assert AtcRun(0, 1.0, done, 1).succeeded
    assert not AtcRun(1, 1.0, done, 1).succeeded
    assert not AtcRun(0, 1.0, START, 1).succeeded
    assert not AtcRun(0, 1.0, done, 0).succeeded
    assert not AtcRun(0, 1.0, done, 2).succeeded


def test_the_printed_explanation_has_every_part() -> None:
    text = str(
        explained(layout_8("E20001", "Failed to compile Op [global/layer_03/attention/scores]. (optype: [MatMul])"))
    )
    assert text.splitlines()[0] == "step: ATC failed (compiling operators)"
    parts = ("error   E20001", f"node    {SCORES} (MatMul)", "module  global/layer_03/attention",
             "next    convert-moss doctor --cann", "log     /art/step.log")  # fmt: skip
    for part in parts:
        assert part in text


def test_every_suggested_command_of_ours_exists_with_its_options() -> None:
    data = json.loads(resources.files("convert.data").joinpath("atc_errors.json").read_text(encoding="utf-8"))
    rows = [*data["codes"], *data["symptoms"], *data["endings"].values()]
    ours = {match[0] for row in rows if (match := re.search(r"convert-moss .*", row["next"]))}
    assert len(ours) > 4
    for text in ours:
        name = text.split()[1]
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, text
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", text.replace("add --external_weight=1", ""))) <= known, text
