"""The plan and the results as text for people."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from convert.atc_memory import ASSUMPTIONS
from convert.atc_plan import AtcJob, AtcPlan, input_bytes
from convert.atc_run import JobResult
from runtime.errors import AtcError
from runtime.spec import TensorSpec

_HEAD = ("build", "inputs", "weights", "cache", "in+out", "workspace", "device *", "state")


def plan_lines(plan: AtcPlan) -> list[str]:
    """The table, then shapes, command and output of each build."""
    lines = table_lines(plan)
    for job in plan.jobs:
        lines += ["", *_block(job)]
    return lines


def table_lines(plan: AtcPlan) -> list[str]:
    """A table of all builds, the assumptions of its memory column, and the notes."""
    counts = {state: sum(job.state == state for job in plan.jobs) for state in ("compile", "unchanged", "refused")}
    rows = [_HEAD, *(_row(job) for job in plan.jobs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
    lines = [
        f"{plan.directory} for {plan.target}: {', '.join(f'{n} {state}' for state, n in counts.items() if n)}",
        *(
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:], strict=True)), row[-1]]
            )
            for row in rows
        ),
        "* device memory while the graph runs, ESTIMATED (not measured):",
        *(f"  - {text}" for text in ASSUMPTIONS),
        f"  - all of these loaded together: weights {_size(sum(j.memory.weight_bytes for j in plan.jobs))}",
    ]
    unknown = sum(job.memory.num_unknown for job in plan.jobs)
    if unknown:
        lines.append(f"  - {unknown} tensors have no inferred shape and are not in the workspace")
    return lines + [f"note: {note}" for note in plan.notes]


def result_lines(plan: AtcPlan, results: Sequence[JobResult]) -> list[str]:
    """One line per .om: made now, or present and unchanged."""
    made = [
        f"{r.build.file}  {_size(r.build.num_bytes)}  {r.seconds:.0f} s  sha256 {r.build.sha256[:16]}…"
        + ("  FAKE: made by the fake atc of the tests, for the simulator only" if r.build.fake else "")
        for r in results
        if r.build is not None
    ]
    return made + [
        f"{job.output.relative_to(plan.directory)}  unchanged" for job in plan.jobs if job.state == "unchanged"
    ]


def raise_if_incomplete(plan: AtcPlan, results: Sequence[JobResult]) -> None:
    """AtcError that names every build without an .om: refused, failed, or not reached."""
    made = {result.job.name for result in results if result.build is not None}
    missing = [job for job in plan.jobs if job.state != "unchanged" and job.name not in made]
    if missing:
        refused = [
            f"{job.name} was refused by the readiness check ({job.why})" for job in missing if job.state == "refused"
        ]
        raise AtcError(
            f"{len(missing)} of {len(plan.jobs)} not compiled: {', '.join(job.name for job in missing)}. "
            f"{'; '.join(refused) + '. ' if refused else ''}"
            "What is compiled is recorded; run the same command again to go on"
        )


def _row(job: AtcJob) -> tuple[str, ...]:
    m = job.memory
    sizes = (input_bytes(job), m.weight_bytes, m.cache_bytes, m.io_bytes, m.workspace_bytes, m.total_bytes)
    return (job.name, *(_size(n) for n in sizes), job.state)


def _block(job: AtcJob) -> list[str]:
    def shapes(tensors: Sequence[TensorSpec]) -> str:
        return "  ".join(f"{t.name} {t}" for t in tensors)

    return [
        f"{job.name}: {job.state}: {job.why}",
        f"  reads    {job.source}{' (patched)' if job.patched else ''}",
        f"  inputs   {shapes(job.spec.inputs)}",
        f"  outputs  {shapes(job.spec.outputs)}",
        f"  makes    {job.output}",
        f"  command  {shlex.join(job.argv)}",
    ]


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
