"""The plan as one bash script, for a machine that has CANN but no Python package of the project.

The script is convert/data/build_om.sh with the plan filled in; read it there.
"""

from __future__ import annotations

import json
import os
import shlex
from importlib import resources
from pathlib import Path

from convert.atc import build_directory
from convert.atc_plan import AtcJob, AtcPlan
from runtime.errors import AtcError
from runtime.manifest import write_atomically


def write_script(plan: AtcPlan, path: Path) -> int:
    """Write the script that compiles what the plan compiles; return the number of graphs in it."""
    if not plan.to_compile:
        raise AtcError("there is nothing to compile: " + "; ".join(f"{j.name}: {j.state}, {j.why}" for j in plan.jobs))
    path = path.resolve()
    write_atomically(path, build_script(plan, os.path.relpath(plan.directory, path.parent)))
    path.chmod(0o755)
    return len(plan.to_compile)


def build_script(plan: AtcPlan, relative: str) -> str:
    """The text of the script; `relative` leads from the script's directory to the artifacts."""
    jobs = plan.to_compile
    inputs = {file: sha256 for job in jobs for file, sha256 in job.inputs.items() if not file.startswith("--")}
    files = {file.path: file.content for job in jobs for file in job.files}
    values = {
        "NAME": plan.directory.name,
        "TARGET": str(plan.target),
        "RELATIVE": relative,
        "OUT": build_directory(plan.target),
        "OPS": f"ascend{plan.target.family}",
        "SOC": plan.target.soc,
        "CANN": plan.target.cann,
        "PRECISION": plan.target.precision,
        "INPUTS": "\n".join(f"check_input {sha256} {shlex.quote(file)}" for file, sha256 in inputs.items()),
        "FILES": "\n".join(_here_document(path, content, plan.directory) for path, content in files.items()),
        "TOTAL": str(len(jobs)),
        "BUILDS": "".join(_build_call(job, plan.directory) for job in jobs),
    }
    text = resources.files("convert.data").joinpath("build_om.sh").read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def _here_document(path: Path, content: str, directory: Path) -> str:
    return f"cat >{_quoted(str(path), directory)} <<'END_OF_FILE'\n{content}END_OF_FILE"


def _build_call(job: AtcJob, directory: Path) -> str:
    axes, inputs = json.dumps(job.axes), json.dumps(job.inputs)
    head = f"build {job.name} {job.graph} {shlex.quote(axes)} \\\n    {shlex.quote(inputs)} \\\n    {job.recipe}"
    return " \\\n".join([head, *(f"    {_quoted(argument, directory)}" for argument in job.argv[1:])]) + "\n\n"


def _quoted(argument: str, directory: Path) -> str:
    """Quote for bash; the artifacts directory becomes the script's own `$artifacts`."""
    if str(directory) not in argument:
        return shlex.quote(argument)
    before, after = argument.split(str(directory), 1)
    assert not set(before + after) & set('"$`\\!'), argument  # check_path has refused these
    return f'"{before}$artifacts{after}"'
