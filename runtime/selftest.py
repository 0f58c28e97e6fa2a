"""The checklist of the first device as code: steps that pass, fail, or say why they were not measured, and one report.

Each step answers one question of ATC_AND_ACL.md section J, "not verified, check these first on a real 910B box", or a
thing that the OM backend relies on. A failing step never keeps the next ones from running; docs/on-device.md explains
them. On the simulator the report says so in its title, and nothing in it is a device result.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import MossError
from runtime.manifest import write_atomically


class Verdict(Enum):
    """Not measured is never passed."""

    OK = "pass"
    FAIL = "fail"
    NOT_MEASURED = "not measured"


class NotMeasured(Exception):  # noqa: N818  a verdict, raised by a step
    """A step cannot be made here; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step: its verdict, what was seen, and the figures behind it."""

    name: str
    question: str
    verdict: Verdict
    detail: str
    figures: dict[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """A question and how to answer it. `run` returns a sentence and figures, or raises NotMeasured or MossError."""

    name: str
    question: str
    run: Callable[[], tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What to send back from a device box."""

    title: str
    simulated: bool
    environment: dict[str, str]
    outcomes: tuple[Outcome, ...]

    @property
    def verdict(self) -> Verdict:
        """Fail when a step failed; pass only when every step passed or was not measured, and at least one passed."""
        verdicts = {outcome.verdict for outcome in self.outcomes}
        if Verdict.FAIL in verdicts:
            return Verdict.FAIL
        return Verdict.OK if Verdict.OK in verdicts else Verdict.NOT_MEASURED

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        outcomes = [{**dataclasses.asdict(o), "verdict": o.verdict.value} for o in self.outcomes]
        return {
            "title": self.title,
            "simulated": self.simulated,
            "verdict": self.verdict.value,
            "environment": self.environment,
            "steps": outcomes,
        }

    def markdown(self) -> str:
        """One page for a person."""
        counts = [f"{sum(o.verdict is v for o in self.outcomes)} {v.value}" for v in Verdict]
        lines = [f"# {self.title}", "", f"**{self.verdict.value}**: {', '.join(counts)}", ""]
        if self.simulated:
            lines += ["Simulated on the CPU: nothing here is a device result.", ""]
        lines += [f"- {key}: {value}" for key, value in self.environment.items()]
        lines += ["", "| step | verdict | what was seen | question |", "|---|---|---|---|"]
        for o in self.outcomes:
            cells = (o.name, o.verdict.value, o.detail, o.question)
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        lines += ["", "Figures of each step: the JSON file beside this one."]
        return "\n".join(lines) + "\n"


def run_steps(steps: list[Step], report: Callable[[Outcome], None]) -> tuple[Outcome, ...]:
    """Run every step; `report` sees each outcome as it comes."""
    outcomes = []
    for step in steps:
        start = time.perf_counter()
        figures: dict[str, Any] = {}
        try:
            detail, figures = step.run()
            verdict = Verdict.OK
        except NotMeasured as reason:
            verdict, detail = Verdict.NOT_MEASURED, str(reason)
        except MossError as error:
            verdict, detail = Verdict.FAIL, str(error)
        seconds = round(time.perf_counter() - start, 3)
        outcomes.append(Outcome(step.name, step.question, verdict, detail, figures, seconds))
        report(outcomes[-1])
    return tuple(outcomes)


def describe_environment() -> dict[str, str]:
    """The machine and the Python that ran the test."""
    driver = Path("/usr/local/Ascend/driver/version.info")
    return {
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "driver": driver.read_text(encoding="utf-8").split("\n")[0] if driver.is_file() else "no driver version file",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_report(report: SelfTestReport, directory: Path) -> tuple[Path, Path]:
    """selftest.json and selftest.md in `directory`."""
    data, page = directory / "selftest.json", directory / "selftest.md"
    write_atomically(data, json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n")
    write_atomically(page, report.markdown())
    return data, page
