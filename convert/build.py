"""export -> patch -> check -> atc in one command. Each stage is skipped only when its recorded inputs are unchanged.

The manifest is saved after every graph that a stage finishes, so an interrupted run loses only what was being made.
The check has no record: it is cheap, and the plan of the ATC stage makes it anew for every graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from convert.atc import Buckets, build_name
from convert.atc_keep import KeepList
from convert.atc_plan import AtcPlan, Compiler, chosen_graphs, plan_atc
from convert.atc_run import AtcEnvironment, JobResult, run_plan
from convert.atc_script import write_script
from convert.hub_cache import resolve_source
from convert.recorded_inputs import export_versions
from op_patches.targets import Target
from runtime.errors import ExportError, ManifestError
from runtime.graphs import DEVICE_GRAPHS
from runtime.manifest import MANIFEST_NAME, Manifest, sha256_of

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to build, from what, for which target."""

    model: str  # directory or hub id
    codec: str
    directory: Path
    target: Target
    buckets: Buckets
    max_positions: int
    graphs: tuple[str, ...] = ()  # none: all
    keep: KeepList | None = None
    force: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.graphs or DEVICE_GRAPHS


@dataclass(frozen=True, slots=True)
class Step:
    """One unit of work, and why it runs or does not."""

    stage: Literal["export", "patch", "check", "atc"]
    what: str
    action: Literal["run", "skip", "refused"]
    why: str

    def __str__(self) -> str:
        return f"{self.stage:<7} {self.what:<24} {self.action:<8} {self.why}"


def plan_build(request: BuildRequest, compiler: Compiler) -> list[Step]:
    """Every step that a build would run or skip, without running any."""
    export = export_steps(request)
    steps = list(export)
    again = {step.what for step in export if step.action == "run"}
    manifest = _manifest(request.directory)
    for name in request.names:
        steps.append(_patch_step(manifest, name, request, name in again))
    again |= {step.what for step in steps if step.stage == "patch" and step.action == "run"}
    for name in request.names:
        steps.append(Step("check", name, "run", "the readiness check has no record, it runs every time"))
    unchanged = [name for name in request.names if name not in again]
    for name in again:
        steps += [
            Step("atc", build, "run", f"{name} is made anew before") for build in _build_names(request, manifest, name)
        ]
    if manifest is not None and unchanged:
        plan = _plan(dataclasses.replace(request, graphs=tuple(unchanged)), manifest, compiler)
        actions = {"compile": "run", "unchanged": "skip", "refused": "refused"}
        steps += [Step("atc", job.name, actions[job.state], job.why) for job in plan.jobs]  # type: ignore[arg-type]
    return steps


def run_stages(request: BuildRequest, progress: Progress, compiler: Compiler) -> tuple[Manifest, AtcPlan]:
    """Export, patch and check what has to be; return the manifest and the plan of the ATC stage."""
    manifest = _export(request, progress)
    for name in chosen_graphs(manifest, request.names):
        manifest = _patch(manifest, name, request, progress)
    plan = _plan(request, manifest, compiler)
    refused = {job.graph: job.why for job in plan.jobs if job.state == "refused"}
    for name in dict.fromkeys(job.graph for job in plan.jobs):
        progress(f"check   {name}: {refused.get(name, 'nothing stands in the way of ATC')}")
    return manifest, plan


def compile_stage(
    manifest: Manifest, plan: AtcPlan, environment: AtcEnvironment, progress: Progress, jobs: int, timeout_s: float
) -> list[JobResult]:
    """The last stage on a machine with CANN."""
    for job in plan.jobs:
        if job.state == "unchanged":
            progress(f"atc     {job.name}: unchanged")
    return run_plan(plan, manifest, environment, lambda line: progress(f"atc     {line}"), jobs, timeout_s)


def script_stage(plan: AtcPlan, path: Path) -> int:
    """The last stage for a machine elsewhere; the number of graphs in the script."""
    return write_script(plan, path) if plan.to_compile else 0


def export_steps(request: BuildRequest) -> list[Step]:
    """Per graph: does it have to be exported, and why."""
    unknown = [name for name in request.names if name not in DEVICE_GRAPHS]
    if unknown:
        raise ExportError(f"no graph {', '.join(unknown)}; graphs: {', '.join(DEVICE_GRAPHS)}")
    common = next(_export_reasons(request), None)
    if common is not None:
        return [Step("export", name, "run", common) for name in request.names]
    manifest = Manifest.load(request.directory)
    steps = []
    for name in request.names:
        why = _graph_reason(manifest, name)
        steps.append(Step("export", name, "run" if why else "skip", why or "checkpoint, code and file are unchanged"))
    return steps


def _export_reasons(request: BuildRequest) -> Iterator[str]:
    """Why every graph has to be exported; nothing when the common inputs are those of the manifest."""
    if request.force:
        yield "asked for with --force"
    if not (request.directory / MANIFEST_NAME).is_file():
        yield "not exported yet"
        return
    try:
        manifest = Manifest.load(request.directory)
    except ManifestError as error:
        yield str(error)
        return
    manifest.require_float32("ATC")
    for role, source in (("model", request.model), ("codec", request.codec)):
        directory = resolve_source(source)
        files = {directory / file: sha256 for file, sha256 in manifest.source[role]["files"].items()}
        yield from (f"{path} is missing or changed" for path in _changed(files))
    now = export_versions()
    changed = [name for name in now if manifest.versions.get(name) != now[name]]
    if changed:
        yield f"{', '.join(changed)} changed"
    limit = min(request.max_positions, manifest.model.max_positions)
    if manifest.limits["max_positions"] != limit:
        yield f"--max-positions is {limit}, was {manifest.limits['max_positions']}"
    made = {manifest.path(file): sha256 for file, sha256 in manifest.data_files.items()}
    yield from (f"{path} is missing or changed" for path in _changed(made))


def _changed(files: Mapping[Path, str]) -> Iterator[Path]:
    return (path for path, sha256 in files.items() if not path.is_file() or sha256_of(path) != sha256)


def _graph_reason(manifest: Manifest, name: str) -> str | None:
    if name not in manifest.graphs:
        return "not exported yet"
    graph = manifest.graph(name)
    return next(
        (f"{path.name} is missing or changed" for path in _changed({manifest.path(graph.file): graph.sha256})), None
    )


def _export(request: BuildRequest, progress: Progress) -> Manifest:
    steps = export_steps(request)
    for step in steps:
        if step.action == "skip":
            progress(f"export  {step.what}: unchanged")
    names = [step.what for step in steps if step.action == "run"]
    if not names:
        return Manifest.load(request.directory)
    from convert.export import export_artifacts

    progress(f"export  {', '.join(names)}: {next(s.why for s in steps if s.action == 'run')}")
    return export_artifacts(
        request.model,
        request.codec,
        request.directory,
        names,
        request.max_positions,
        report=lambda line: progress(f"export  {line}"),
    )


def _patch(manifest: Manifest, name: str, request: BuildRequest, progress: Progress) -> Manifest:
    from convert.patched_graphs import patch_graph, patch_reason

    why = patch_reason(manifest, name, request.target, request.buckets.batch)
    if why is None:
        progress(f"patch   {name}: unchanged")
        return manifest
    progress(f"patch   {name}: {why}")
    patched = patch_graph(manifest, name, request.target, request.buckets.batch)
    manifest = manifest.with_patched(patched)
    manifest.save()
    done = ", ".join(f"{count} {rule}" for rule, count in patched.lowered.items())
    progress(f"patch   {name}: {done or 'nothing to lower'}")
    return manifest


def _patch_step(manifest: Manifest | None, name: str, request: BuildRequest, exported_again: bool) -> Step:
    from convert.patched_graphs import patch_reason

    if manifest is None or exported_again or name not in manifest.graphs:
        return Step("patch", name, "run", "it is exported before")
    why = patch_reason(manifest, name, request.target, request.buckets.batch)
    return Step("patch", name, "run" if why else "skip", why or "graph, lowerings and file are unchanged")


def _build_names(request: BuildRequest, manifest: Manifest | None, name: str) -> list[str]:
    """Names of the .om files of a graph; without an export the axes are not known."""
    if manifest is None or name not in manifest.graphs:
        return [name]
    return [build_name(name, axes) for axes in request.buckets.bindings(manifest.graph(name).spec, manifest.codec)]


def _plan(request: BuildRequest, manifest: Manifest, compiler: Compiler) -> AtcPlan:
    return plan_atc(manifest, request.target, request.buckets, request.names, request.keep, compiler, request.force)


def _manifest(directory: Path) -> Manifest | None:
    try:
        return Manifest.load(directory)
    except ManifestError:
        return None
