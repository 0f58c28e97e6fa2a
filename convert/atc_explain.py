"""What an ATC failure means: from exit status and log to graph, phase, first real error, node, cause and next command.

Two message layouts are read. CANN 8.x: `E20001: [PID: 1] <time> text`, older `E19010: text`. CANN 9.x:
`[PID: 1] <time> Title(EL0003): text`. Both go on with `Possible Cause:`, `Solution:`, `TraceBack …`. Inner errors
(`EZ9999`, `E19999`, `??8888`) often only follow the real one, so the first other code wins.
The tables are convert/data/atc_errors.json; where each fact was read is in docs/atc.md.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

SUCCESS_LINE = "ATC run success"
FAILURE_LINE = "ATC run failed"

_LINE = re.compile(
    r"^\s*(?:\[ACL ERROR\]\s+)?"
    r"(?:(?P<c1>[EW][A-Z0-9]\d{4}):?\s*)?"
    r"(?:\[PID: (?P<pid>\d+)\]\s+(?P<ts>\d{4}-\d\d-\d\d-[\d:.]+)\s+)?"
    r"(?:(?P<title>[A-Za-z_/ ]+)\((?P<c2>[EW][A-Z0-9]\d{4})\):\s*)?(?P<msg>.*)$"
)
_FIELD = re.compile(r"^\s*(?P<name>Possible Cause|Solution|TraceBack|Reason)\b[^:]*:\s*(?P<text>.*)$", re.IGNORECASE)
_REASON = re.compile(r"\bReason:?\s+(?P<text>.+)", re.IGNORECASE)
_NODE = (
    re.compile(r"\bOp(?:name| name)?:? \[(?P<node>[^\s,\]\[]+)", re.IGNORECASE),
    re.compile(r"\bfor \[(?P<node>[^\s,\]\[]+)\]"),
    re.compile(r"\bOp(?:name| name)?:? (?!\[)(?P<node>[\w./-]+),? ?\(?optype", re.IGNORECASE),
    re.compile(r"\b(?:node|operator) (?:name )?\[(?P<node>[^\s,\]\[]+)\]", re.IGNORECASE),
)
_OP_TYPE = re.compile(r"\boptype:? \[?(?:[\w.]+::\d+::)?(?P<type>\w+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AtcRun:
    """How one run of ATC ended."""

    exit_code: int | None  # negative: killed by that signal; None: stopped by us
    seconds: float
    output: str  # stdout and stderr
    num_files: int  # non-empty .om files found under the output name, whatever their suffix
    timed_out: bool = False
    plog: str = ""  # ATC's own log files; the op compiler's Python errors are only there

    @property
    def succeeded(self) -> bool:
        """Status 0, the success line, and one non-empty file: any one of them alone has been seen to lie."""
        return self.exit_code == 0 and SUCCESS_LINE in self.output and self.num_files == 1


@dataclass(frozen=True, slots=True)
class Message:
    """One error or warning of ATC."""

    code: str
    text: str
    fields: tuple[tuple[str, str], ...]  # "possible cause", "solution", "traceback", "reason"

    @property
    def is_inner(self) -> bool:
        return self.code[2:] in ("9999", "8888")

    @property
    def is_warning(self) -> bool:
        return self.code.startswith("W")

    def field(self, name: str) -> str | None:
        return next((text for key, text in self.fields if key == name and text), None)


@dataclass(frozen=True, slots=True)
class Context:
    """What the texts of the tables may name, and the nodes of the graph that was compiled."""

    artifacts: str
    target: str
    graph: str
    onnx: str
    log: str
    nodes: Mapping[str, str]  # ONNX node name -> type


@dataclass(frozen=True, slots=True)
class Explanation:
    """One failure, explained."""

    graph: str
    phase: str
    code: str | None
    message: str
    reason: str | None
    meaning: str
    node: str | None  # the ONNX node
    op_type: str | None
    module: str | None  # where the node comes from: our node names follow the module tree
    cause: str
    next_command: str
    log: str
    other_codes: tuple[str, ...]
    stops_all: bool  # the environment is at fault: the next graph would fail in the same way

    def __str__(self) -> str:
        head = f"{self.graph}: ATC failed ({self.phase})"
        node = self.node and f"{self.node}{f' ({self.op_type})' if self.op_type else ''}"
        rows = (
            ("error", f"{self.code}: {self.message}" if self.code else self.message),
            ("reason", self.reason),
            ("means", self.meaning),
            ("node", node or (self.op_type and f"of type {self.op_type}")),
            ("module", self.module),
            ("likely", self.cause),
            ("next", self.next_command),
            ("also", ", ".join(self.other_codes)),
            ("log", self.log),
        )
        return "\n".join([head, *(f"  {name:<7} {text}" for name, text in rows if text)])


def parse_messages(output: str) -> list[Message]:
    """The coded messages of a log, in order, each with its `Possible Cause`, `Solution` and `Reason` text."""
    found: list[Message] = []
    code, text, fields = "", "", dict[str, str]()
    current = ""

    def close() -> None:
        if code:
            found.append(Message(code, text.strip(), tuple((k, v.strip()) for k, v in fields.items())))

    for line in output.splitlines():
        match = _LINE.match(line)
        assert match is not None  # every part of the pattern is optional
        line_code = match["c2"] or match["c1"]
        title = match["msg"].strip().rstrip("!").lower()
        if line_code == code and text.lower().rstrip("!") in ("inner error", "internal error", ""):
            text = match["msg"]  # the header of an inner error; this line holds the text
        elif line_code:
            close()
            code, text, fields, current = line_code, match["msg"] or title, {}, ""
        elif code:
            field = _FIELD.match(line)
            if field:
                current = field["name"].lower()
                fields[current] = field["text"]
            elif current and line.strip() and not line.startswith((SUCCESS_LINE, FAILURE_LINE)):
                fields[current] += " " + line.strip()
            elif not current and line.strip() and text.lower().rstrip("!") in ("inner error", "internal error"):
                text = line.strip()
    close()
    return found


def first_error(messages: Sequence[Message]) -> Message | None:
    """The error to show: the first that is neither a warning nor an inner error, else the first inner one."""
    errors = [m for m in messages if not m.is_warning]
    return next((m for m in errors if not m.is_inner), errors[0] if errors else None)


def explain(run: AtcRun, context: Context) -> Explanation:
    """Explain a run that did not succeed."""
    messages = parse_messages(run.output)
    error = first_error(messages)
    ending = _ending(run, error)
    row = _code_row(error.code) if error else None
    symptom, groups = _symptom(run.output + run.plog)
    base: Mapping[str, Any] = ending or row or _unknown(error)
    best: Mapping[str, Any] = base if ending or symptom is None else symptom
    # What is known only from the code is not lost when a symptom says more about the cause.
    meaning = best["meaning"] if row is None or best is row or ending else f"{row['meaning']}; {best['meaning']}"
    if run.exit_code and run.num_files and best is not ending:
        meaning += "; the file that ATC left is not used"
    searched = [error.text, *(text for _, text in error.fields)] if error else []
    node, op_type = _node(searched, context.nodes)
    values = {"artifacts": context.artifacts, "target": context.target, "graph": context.graph,
              "onnx": context.onnx, "log": context.log, "seconds": f"{run.seconds:.0f}",
              "exit_code": str(run.exit_code), "num_files": str(run.num_files), **groups}  # fmt: skip
    return Explanation(
        graph=context.graph,
        phase=best["phase"],
        code=error.code if error else None,
        message=error.text if error else _last_line(run.output),
        reason=_reason(error),
        meaning=_fill(meaning, values),
        node=node,
        op_type=op_type,
        module=_module(node, context.nodes),
        cause=_fill(best["cause"], values),
        next_command=_fill(best["next"], values),
        log=context.log,
        other_codes=tuple(dict.fromkeys(m.code for m in messages if error and m.code != error.code)),
        stops_all=bool(best.get("stops_all")) or best["phase"] == "environment",
    )


def known_codes() -> frozenset[str]:
    """Every code that the table explains."""
    return frozenset(_tables().codes)


def _ending(run: AtcRun, error: Message | None) -> Mapping[str, Any] | None:
    """How the run ended, where that says more than any message: no verdict, or a verdict that the files belie."""
    code, verdict = run.exit_code, SUCCESS_LINE in run.output
    endings = (
        ("timeout", run.timed_out),
        ("killed", code in (-9, 137)),
        ("signal", code is not None and code < 0),
        ("not_started", code in (126, 127)),
        ("no_verdict", code == 0 and not verdict and error is None),
        ("no_file", code == 0 and verdict and run.num_files == 0),
        ("many_files", code == 0 and verdict and run.num_files > 1),
        ("failed_with_file", bool(code) and run.num_files > 0 and error is None),
    )
    kind = next((kind for kind, applies in endings if applies), None)
    return _tables().endings[kind] if kind else None


def _unknown(error: Message | None) -> Mapping[str, Any]:
    what = f"{error.code} is not in our table; the text above is ATC's own" if error else "ATC gave no coded message"
    cause = error and (error.field("possible cause") or error.field("reason"))
    return {
        "phase": "inside ATC",
        "meaning": what,
        "cause": cause or "not known; the log is all there is",
        "next": (error and error.field("solution")) or "less {log}",
    }


def _reason(error: Message | None) -> str | None:
    if error is None:
        return None
    inline = _REASON.search(error.text)
    return error.field("reason") or (inline["text"] if inline else None) or error.field("possible cause")


def _node(texts: Sequence[str], nodes: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The ONNX node and type that a message speaks of; a node that ATC made itself is shown under ATC's name."""
    op_type = next((m["type"] for text in texts if (m := _OP_TYPE.search(text))), None)
    named = next((m["node"] for text in texts for pattern in _NODE if (m := pattern.search(text))), None)
    if named is None:
        return None, op_type
    name = named
    if name not in nodes:
        # Fused nodes carry the names of their parts, copies for a gear a suffix: take the longest ONNX name inside.
        name = max((n for n in nodes if n and n in named), key=len, default=named)
    return name, op_type or nodes.get(name)


def _module(node: str | None, nodes: Mapping[str, str]) -> str | None:
    return node.rpartition("/")[0] or None if node in nodes and node is not None else None


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip() and line.strip() != "..."]
    return lines[-1] if lines else "ATC printed nothing"


def _fill(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), text)


def _code_row(code: str) -> Mapping[str, Any] | None:
    rows = _tables().codes
    return rows.get(code) or (rows["EZ9999"] if code[2:] in ("9999", "8888") else None)


def _symptom(output: str) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
    """The first known symptom in the log, and the names that it caught."""
    for pattern, row in _tables().symptoms:
        if match := pattern.search(output):
            return row, {key: value for key, value in match.groupdict().items() if value}
    return None, {}


@dataclass(frozen=True, slots=True)
class _Tables:
    codes: Mapping[str, Mapping[str, Any]]
    symptoms: Sequence[tuple[re.Pattern[str], Mapping[str, Any]]]
    endings: Mapping[str, Mapping[str, Any]]


@functools.cache
def _tables() -> _Tables:
    data = json.loads(resources.files("convert.data").joinpath("atc_errors.json").read_text(encoding="utf-8"))
    codes = {code: row for row in data["codes"] for code in row["codes"]}
    return _Tables(codes, [(re.compile(row["pattern"]), row) for row in data["symptoms"]], data["endings"])
