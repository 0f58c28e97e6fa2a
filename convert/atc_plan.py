"""From an artifacts directory and a target to the list of ATC runs: what each one reads, makes and costs, and why.

Reading is all that happens here; convert.atc_run executes the plan and convert.atc_script writes it as a script.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx

from convert.atc import (
    Buckets,
    SideFile,
    atc_command,
    build_directory,
    build_name,
    is_mixed,
    recipe,
    side_files,
)
from convert.atc_keep import KeepFiles, KeepList, keep_files, unmatched
from convert.atc_memory import MemoryEstimate, estimate_memory
from op_patches.readiness.check import check_model
from op_patches.readiness.loader import is_outside, load_structure
from op_patches.targets import Target
from runtime.errors import AtcError, ManifestError
from runtime.graphs import DEVICE_GRAPHS, HOST_GRAPHS
from runtime.manifest import Manifest, OmBuild, sha256_of
from runtime.spec import GraphSpec

State = Literal["compile", "unchanged", "refused"]
Shapes = Mapping[str, tuple[int, ...]]
# The readiness check of a graph at bound input shapes: what ATC would refuse it for, or None.
Refusal = Callable[[Path, Target, Shapes], str | None]


@dataclass(frozen=True, slots=True)
class GraphSource:
    """The ONNX file that ATC reads for one graph: exported, or patched for the target."""

    file: str  # beside the manifest
    patched: bool
    model: onnx.ModelProto  # without external data
    inputs: dict[str, str]  # the file and its external data -> sha256

    @property
    def nodes(self) -> dict[str, str]:
        """Node name -> ONNX type."""
        return {node.name: node.op_type for node in self.model.graph.node}

    @property
    def opset(self) -> int:
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 0)


@dataclass(frozen=True, slots=True)
class Compiler:
    """The ATC at hand. A plan can be made without one."""

    cann: str | None = None  # version of the installation
    fake: bool = False
    program: str = "atc"


@dataclass(frozen=True, slots=True)
class AtcJob:
    """One graph with bound axes to one .om."""

    graph: str
    axes: dict[str, int]
    spec: GraphSpec  # bound
    source: str  # the ONNX file, beside the manifest
    patched: bool
    argv: tuple[str, ...]
    scratch: Path  # ATC's working directory; the .om appears here first
    output: Path  # where the .om goes, with suffix
    log: Path
    files: tuple[SideFile, ...]
    inputs: dict[str, str]
    recipe: str
    memory: MemoryEstimate
    state: State
    why: str

    @property
    def name(self) -> str:
        return build_name(self.graph, self.axes)


@dataclass(frozen=True, slots=True)
class AtcPlan:
    """Every ATC run for one target."""

    directory: Path  # absolute: the artifacts directory
    target: Target
    jobs: tuple[AtcJob, ...]
    notes: tuple[str, ...]

    @property
    def to_compile(self) -> tuple[AtcJob, ...]:
        return tuple(job for job in self.jobs if job.state == "compile")


def plan_atc(
    manifest: Manifest,
    target: Target,
    buckets: Buckets,
    graphs: Iterable[str] = (),
    keep: KeepList | None = None,
    compiler: Compiler = Compiler(),
    force: bool = False,
    refusal: Refusal | None = None,
) -> AtcPlan:
    """List the ATC runs for `target`; without names, of every exported graph that a backend opens."""
    names = chosen_graphs(manifest, graphs)
    _check_limits(manifest, buckets)
    if keep is not None and not target.half_precision:
        raise AtcError(
            f"a keep list has no effect with precision {target.precision}, which keeps every float32 node; "
            "leave --keep-fp32 out, or say --precision fp16 or mixed"
        )
    hash_of = functools.cache(sha256_of)  # the graphs share one file of weights
    sources = {name: graph_source(manifest, name, target, hash_of) for name in names}
    notes = _keep_notes(keep, sources)
    jobs: list[AtcJob] = []
    for name, source in sources.items():
        kept = KeepFiles("", "", ())
        if keep is not None:
            kept = keep_files(keep, source.nodes, _ge_types(source, target), is_mixed(target))
            notes += [f"{name}: {note}" for note in kept.notes]
        bindings = buckets.bindings(manifest.graph(name).spec, manifest.codec)
        smallest = manifest.graph(name).spec.bind(**bindings[0])
        refused = (refusal or first_refusal)(
            manifest.path(source.file), target, {t.name: t.bound_shape for t in smallest.inputs}
        )
        for axes in bindings:
            jobs.append(_job(manifest, target, name, axes, source, kept, compiler, force, refused))
    return AtcPlan(manifest.directory.resolve(), target, tuple(jobs), tuple(notes))


def first_refusal(path: Path, target: Target, shapes: Shapes) -> str | None:
    """The first finding of the readiness check at which ATC would stop, with its code and its fix."""
    for finding in check_model(path, target, shapes).blocking:
        where = f"{finding.node} ({finding.op_type}): " if finding.node else ""
        return f"{finding.code + ': ' if finding.code else ''}{where}{finding.message}; {finding.fix}"
    return None


def chosen_graphs(manifest: Manifest, graphs: Iterable[str]) -> list[str]:
    """The graphs to compile, in the order of the table; AtcError for a name that is no graph."""
    manifest.require_float32("ATC")
    wanted = list(graphs)
    unknown = [name for name in wanted if name in HOST_GRAPHS or name not in (*DEVICE_GRAPHS, *manifest.graphs)]
    if unknown:
        there = [name for name in manifest.graphs if name not in HOST_GRAPHS]
        raise AtcError(f"no graph named {', '.join(unknown)}; expected some of {', '.join(there)}")
    for name in wanted:
        manifest.graph(name)  # named but not exported: the manifest says so
    return [name for name in manifest.graphs if name not in HOST_GRAPHS and (not wanted or name in wanted)]


def graph_source(
    manifest: Manifest, name: str, target: Target, hash_of: Callable[[Path], str] = sha256_of
) -> GraphSource:
    """The patched file when the lowerings of `target` ran on the graph as it is now, else the exported one."""
    patched = manifest.patched_graph(name, str(target))
    file, sha256 = (
        (patched.file, patched.sha256) if patched else (manifest.graph(name).file, manifest.graph(name).sha256)
    )
    path = manifest.path(file)
    if not path.is_file() or sha256_of(path) != sha256:
        raise ManifestError(f"{path} is missing or is not what the manifest lists; export and patch again")
    model = load_structure(path)
    inputs = {file: sha256}
    for location in sorted(external_locations(model)):
        external = manifest.path(location)
        if not external.is_file():
            raise ManifestError(f"{external} is missing; {file} keeps its weights there. Export again")
        inputs[location] = hash_of(external)
        if inputs[location] != manifest.data_files.get(location, inputs[location]):
            raise ManifestError(f"{external} is not the file that the manifest lists; export again")
    return GraphSource(file, patched is not None and patched.file != manifest.graph(name).file, model, inputs)


def external_locations(model: onnx.ModelProto) -> set[str]:
    """Files that hold the graph's constants, relative to the ONNX file."""
    return {
        entry.value
        for tensor in model.graph.initializer
        if is_outside(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }


def _check_limits(manifest: Manifest, buckets: Buckets) -> None:
    limit = manifest.limits.get("max_positions", buckets.capacity)
    if buckets.capacity > limit:
        raise AtcError(
            f"capacity {buckets.capacity} is more than the {limit} positions the graphs were exported for; "
            "lower --capacity or export again with more positions"
        )


def _keep_notes(keep: KeepList | None, sources: Mapping[str, GraphSource]) -> list[str]:
    if keep is None:
        return []
    missing = unmatched(keep, {name: source.nodes for name, source in sources.items()})
    return [f"keep list: {', '.join(missing)}: in none of the graphs"] if missing else []


def _ge_types(source: GraphSource, target: Target) -> dict[str, tuple[str, ...]]:
    plugins = {op_type: target.plugin(op_type, source.opset) for op_type in set(source.nodes.values())}
    return {op_type: plugin.ge_ops for op_type, plugin in plugins.items() if plugin is not None}


def _job(
    manifest: Manifest,
    target: Target,
    graph: str,
    axes: dict[str, int],
    source: GraphSource,
    kept: KeepFiles,
    compiler: Compiler,
    force: bool,
    refused: str | None,
) -> AtcJob:
    spec = manifest.graph(graph).spec.bind(**axes)
    directory = manifest.directory.resolve()
    place, name = directory / build_directory(target), build_name(graph, axes)
    scratch = place / "building" / name
    files = side_files(target, place, name, kept.keep_dtype, kept.modify_mixlist)
    argv = atc_command(spec, directory / source.file, scratch / name, target, files, compiler.program)
    contents = {file.option: _text_hash(file.content) for file in files}
    inputs = source.inputs | contents
    key = recipe(spec, inputs, argv)
    state, why = _state(manifest, graph, axes, target, inputs, key, compiler, force)
    if refused is not None:
        state, why = "refused", refused
    return AtcJob(
        graph=graph,
        axes=axes,
        spec=spec,
        source=source.file,
        patched=source.patched,
        argv=argv,
        scratch=scratch,
        output=place / f"{name}.om",
        log=place / f"{name}.atc.log",
        files=tuple(files),
        inputs=inputs,
        recipe=key,
        memory=estimate_memory(source.model, spec, target.precision),
        state=state,
        why=why,
    )


def _state(
    manifest: Manifest,
    graph: str,
    axes: Mapping[str, int],
    target: Target,
    inputs: Mapping[str, str],
    key: str,
    compiler: Compiler,
    force: bool,
) -> tuple[State, str]:
    build = next((b for b in manifest.builds_of(graph, target.soc, target.precision) if b.axes == axes), None)
    if build is None:
        return "compile", "not compiled yet"
    try:
        manifest.check_build(build)
        damage = ""
    except ManifestError as error:
        damage = str(error).split(". ", maxsplit=1)[0]
    if force:
        why = "asked for with --force"
    elif build.recipe != key:
        why = _what_changed(build, inputs)
    elif build.fake and compiler.cann is not None and not compiler.fake:
        why = "the present .om was made by the fake atc of the tests"
    elif compiler.cann not in (None, build.versions.get("cann")):
        why = f"compiled by CANN {build.versions.get('cann')}, now {compiler.cann}"
    else:
        why = damage
    return ("compile", why) if why else ("unchanged", "inputs, settings and CANN are those of the present .om")


def _what_changed(build: OmBuild, inputs: Mapping[str, str]) -> str:
    changed = [name for name, sha256 in inputs.items() if build.inputs.get(name) != sha256]
    gone = [name for name in build.inputs if name not in inputs]
    return f"{', '.join(changed + gone)} changed" if changed or gone else "settings or interface changed"


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def plan_as_data(plan: AtcPlan) -> dict[str, Any]:
    """The plan for --json."""
    return {
        "directory": str(plan.directory),
        "target": str(plan.target),
        "notes": list(plan.notes),
        "jobs": [
            {
                "graph": job.graph,
                "axes": job.axes,
                "inputs": {t.name: {"dtype": t.dtype, "shape": list(t.bound_shape)} for t in job.spec.inputs},
                "outputs": {t.name: {"dtype": t.dtype, "shape": list(t.bound_shape)} for t in job.spec.outputs},
                "source": job.source,
                "patched": job.patched,
                "argv": list(job.argv),
                "output": str(job.output),
                "log": str(job.log),
                "input_bytes": input_bytes(job),
                "memory_estimate": {
                    "weight_bytes": job.memory.weight_bytes,
                    "cache_bytes": job.memory.cache_bytes,
                    "io_bytes": job.memory.io_bytes,
                    "workspace_bytes": job.memory.workspace_bytes,
                    "total_bytes": job.memory.total_bytes,
                    "tensors_of_unknown_shape": job.memory.num_unknown,
                },
                "state": job.state,
                "why": job.why,
            }
            for job in plan.jobs
        ],
    }


def input_bytes(job: AtcJob) -> int:
    return sum(t.num_bytes for t in job.spec.inputs)
