"""The ATC command as data, keep lists, the memory estimate, and what is compiled or skipped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import onnx
import pytest

from convert.atc import OP_PRECISION_INI, Buckets, atc_command, check_path, recipe, side_files
from convert.atc_keep import KeepList, keep_files, unmatched
from convert.atc_memory import estimate_memory
from convert.atc_plan import AtcPlan, Compiler, plan_as_data, plan_atc
from op_patches.targets import Target
from runtime.errors import AtcError, ManifestError
from runtime.manifest import Manifest, OmBuild, sha256_of
from runtime.spec import GraphSpec, TensorSpec
from tests.fake_cann.artifacts import CODEC, SPECS, make_artifacts, make_model

TARGET = Target(soc="Ascend910B3")
SMALL = Buckets(capacity=32, prefill=(8, 16), stream_frames=(1, 2))


def plan(manifest: Manifest, target: Target = TARGET, **options: object) -> AtcPlan:
    return plan_atc(manifest, target, SMALL, **options)  # type: ignore[arg-type]


def test_a_command_names_everything_that_decides_the_numbers(tmp_path: Path) -> None:
    spec = SPECS[0].bind(B=1, T=128)
    files = side_files(TARGET, tmp_path / "om", "prefill-B1-T128", "", "")
    assert atc_command(spec, tmp_path / "prefill.onnx", tmp_path / "om/prefill", TARGET, files) == (
        "atc",
        "--framework=5",
        f"--model={tmp_path}/prefill.onnx",
        f"--output={tmp_path}/om/prefill",
        "--soc_version=Ascend910B3",
        "--input_format=ND",
        "--input_shape=rows:1,128,8",
        "--precision_mode_v2=origin",
        f"--op_precision_mode={tmp_path}/om/op_precision.ini",
        "--deterministic=1",
        "--log=error",
    )
    assert "[ByOpType]\nConv2D=enable_float_32_execution\n" in OP_PRECISION_INI


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/a b/x.onnx", "refuses ' '"),
        ("/a=b/x", "refuses '='"),
        ("/a:b", "refuses ':'"),
        ("x.onnx", "absolute"),
        ("/" + "x" * 4096, "4096 at most"),
    ],
)
def test_a_path_that_atc_refuses_is_reported_before_it_runs(path: str, complaint: str) -> None:
    with pytest.raises(AtcError, match=complaint):
        check_path(Path(path))


def test_chinese_paths_are_taken() -> None:
    check_path(Path("/模型/step.onnx"))


def test_every_open_axis_of_a_graph_is_bound_from_its_buckets() -> None:
    prefill, step, stream = SPECS
    assert SMALL.bindings(prefill, CODEC) == [{"B": 1, "T": 8}, {"B": 1, "T": 16}]
    assert SMALL.bindings(step, CODEC) == [{"B": 1, "C": 32}]
    assert SMALL.bindings(stream, CODEC) == [{"B": 1, "F": 1}, {"B": 1, "F": 2}]
    per_frame = CODEC.decoder[-1].tokens_per_frame
    tokens = TensorSpec("tokens", "float32", ("N", f"F{per_frame}"))
    decode = GraphSpec("codec_decode", (TensorSpec("codes", "int32", ("B", "F")),), (tokens,))
    (axes,) = Buckets(decode_frames=(16,)).bindings(decode, CODEC)
    assert axes == {"B": 1, "F": 16, "N": 16 * CODEC.samples_per_frame, f"F{per_frame}": 16 * per_frame}


@pytest.mark.parametrize(
    "sizes", [{"prefill": ()}, {"batch": 0}, {"prefill": (8, 8)}, {"prefill": (2048,)}, {"decode_frames": (125,)}]
)
def test_impossible_buckets_are_refused(sizes: dict[str, object]) -> None:
    with pytest.raises(AtcError):
        Buckets(**sizes)  # type: ignore[arg-type]


def test_a_capacity_beyond_the_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AtcError, match="64 positions"):
        plan_atc(make_artifacts(tmp_path), TARGET, Buckets(capacity=65, prefill=(8,)))


def test_a_graph_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AtcError, match="no graph named stop"):
        plan(make_artifacts(tmp_path), graphs=["stop"])
    with pytest.raises(ManifestError, match="no graph frame"):
        plan(make_artifacts(tmp_path), graphs=["frame"])


def test_the_graph_for_cpus_is_never_compiled(tiny_artifacts: Path) -> None:
    manifest = Manifest.load(tiny_artifacts)
    assert "extend" in manifest.graphs
    planned = plan_atc(manifest, TARGET, Buckets(capacity=64, prefill=(8,)))
    assert {job.graph for job in planned.jobs} == set(manifest.graphs) - {"extend"}
    with pytest.raises(AtcError, match="no graph named extend; expected some of prefill"):
        plan_atc(manifest, TARGET, Buckets(capacity=64, prefill=(8,)), graphs=["extend"])


def test_the_recipe_ignores_where_files_are_but_not_what_they_say(tmp_path: Path) -> None:
    spec = SPECS[0].bind(B=1, T=8)
    here = atc_command(spec, tmp_path / "a.onnx", tmp_path / "a", TARGET, [])
    there = atc_command(spec, tmp_path / "b/a.onnx", tmp_path / "b/a", TARGET, [])
    other = atc_command(spec, tmp_path / "a.onnx", tmp_path / "a", dataclasses.replace(TARGET, precision="fp16"), [])
    assert recipe(spec, {"a": "1"}, here) == recipe(spec, {"a": "1"}, there)
    assert recipe(spec, {"a": "1"}, here) != recipe(spec, {"a": "2"}, here)
    assert recipe(spec, {"a": "1"}, here) != recipe(spec, {"a": "1"}, other)
    assert recipe(SPECS[0].bind(B=1, T=16), {"a": "1"}, here) != recipe(spec, {"a": "1"}, here)


def test_a_fresh_plan_compiles_every_bucket_of_every_graph(tmp_path: Path) -> None:
    made = plan(make_artifacts(tmp_path))
    names = ["prefill-B1-T8", "prefill-B1-T16", "step-B1-C32", "codec_stream-B1-F1", "codec_stream-B1-F2"]
    assert [job.name for job in made.to_compile] == names
    data = plan_as_data(made)
    assert json.loads(json.dumps(data))["jobs"][2]["input_bytes"] == (8 + 32 * 8) * 4
    assert made.jobs[0].output == tmp_path / "om/Ascend910B3-origin/prefill-B1-T8.om"


def built(manifest: Manifest, made: AtcPlan, **changes: object) -> Manifest:
    """The manifest after the first job of the plan ran."""
    job = made.jobs[0]
    job.output.parent.mkdir(parents=True, exist_ok=True)
    job.output.write_bytes(b"om")
    build = OmBuild(
        job.graph, job.axes, TARGET.soc, TARGET.cann, TARGET.precision, str(job.output.relative_to(made.directory)),
        sha256_of(job.output), 2, job.argv, job.inputs, job.recipe, {"cann": "8.5.0"}, "log", 1.0,
    )  # fmt: skip
    return manifest.with_build(dataclasses.replace(build, **changes))  # type: ignore[arg-type]


def test_unchanged_inputs_are_skipped_and_every_change_is_named(tmp_path: Path) -> None:
    manifest = make_artifacts(tmp_path)
    after = built(manifest, plan(manifest))

    def first(m: Manifest = after, **options: object) -> tuple[str, str]:
        job = plan(m, **options).jobs[0]
        return job.state, job.why

    assert first()[0] == "unchanged"
    assert first(compiler=Compiler("8.5.0"))[0] == "unchanged"
    assert first(compiler=Compiler("9.0.0")) == ("compile", "compiled by CANN 8.5.0, now 9.0.0")
    assert first(force=True) == ("compile", "asked for with --force")
    assert first(built(manifest, plan(manifest), fake=True))[0] == "unchanged"
    fake = built(manifest, plan(manifest), fake=True)
    assert first(fake, compiler=Compiler("8.5.0")) == (
        "compile",
        "the present .om was made by the fake atc of the tests",
    )
    assert first(fake, compiler=Compiler("8.5.0", fake=True))[0] == "unchanged"
    assert first(built(manifest, plan(manifest), recipe="x"))[1] == "settings or interface changed"
    output = plan(manifest).jobs[0].output
    output.write_bytes(b"other")
    assert "sha256" in first()[1]
    output.unlink()
    assert "is missing" in first()[1]


def test_changed_weights_compile_again(tmp_path: Path) -> None:
    manifest = make_artifacts(tmp_path)
    after = built(manifest, plan(manifest))
    (tmp_path / "weights.bin").write_bytes(bytes(256))
    with pytest.raises(ManifestError, match=r"weights\.bin is not the file"):
        plan(after)
    exported_again = dataclasses.replace(after, data_files={"weights.bin": sha256_of(tmp_path / "weights.bin")})
    assert plan(exported_again).jobs[0].why == "weights.bin changed"


def test_a_graph_file_that_the_manifest_does_not_know_is_refused(tmp_path: Path) -> None:
    manifest = make_artifacts(tmp_path)
    with (tmp_path / "step.onnx").open("ab") as file:
        file.write(b" ")
    with pytest.raises(ManifestError, match=r"step\.onnx is missing or is not what the manifest lists"):
        plan(manifest)


def test_a_graph_that_the_readiness_check_refuses_is_not_compiled(tmp_path: Path) -> None:
    manifest = make_artifacts(tmp_path)
    made = plan(manifest, refusal=lambda path, target, shapes: "E13010: no" if path.name == "step.onnx" else None)
    assert [job.state for job in made.jobs] == ["compile", "compile", "refused", "compile", "compile"]
    assert made.jobs[2].why == "E13010: no"


def test_the_readiness_tables_decide_by_default(tmp_path: Path) -> None:
    made = plan(make_artifacts(tmp_path, op_type="QLinearConv"), graphs=["prefill"])
    assert {job.state for job in made.jobs} == {"refused"}
    assert "E13010" in made.jobs[0].why


def test_a_keep_list_needs_reduced_precision(tmp_path: Path) -> None:
    with pytest.raises(AtcError, match="no effect with precision origin"):
        plan(make_artifacts(tmp_path), keep=KeepList(("a",), ()))


def test_a_keep_list_becomes_the_files_that_atc_reads(tmp_path: Path) -> None:
    keep = KeepList.parse("# note\nprefill/layer_00/mlp/tanh\n\nOpType::MatMul  # scores\nghost\n", "keep.txt")
    manifest = make_artifacts(tmp_path)
    half = plan(manifest, dataclasses.replace(TARGET, precision="fp16"), keep=keep)
    files = {file.option: file.content for file in half.jobs[0].files}
    assert files["--keep_dtype"].split() == ["prefill/layer_00/attention/scores", "prefill/layer_00/mlp/tanh"]
    assert "--modify_mixlist" not in files
    assert any("ghost" in note for note in half.notes)
    mixed = plan(manifest, dataclasses.replace(TARGET, precision="mixed_float16"), keep=keep)
    files = {file.option: file.content for file in mixed.jobs[0].files}
    assert files["--keep_dtype"].split() == ["prefill/layer_00/mlp/tanh"]
    assert json.loads(files["--modify_mixlist"])["black-list"]["to-add"] == ["BatchMatMulV2"]
    assert f"--modify_mixlist={tmp_path}/om/Ascend910B3-mixed_float16/prefill-B1-T8.mixlist.json" in mixed.jobs[0].argv


def test_what_atc_cannot_express_is_said() -> None:
    nodes = {"a": "MatMul", "b": "Gemm", "c": "Reshape", "d": "LayerNormalization"}
    ge_types = {"MatMul": ("MatMulV2",), "Gemm": ("MatMulV2",), "LayerNormalization": ("LayerNorm", "Adds")}
    files = keep_files(KeepList(("c", "d"), ("MatMul",)), nodes, ge_types, mixed=True)
    assert files.keep_dtype == "d\n"
    assert [note.split(":")[0] for note in files.notes] == ["OpType", "c", "d"]
    assert "1 Gemm nodes stay float32" in files.notes[0]
    assert unmatched(KeepList(("a", "x"), ("Gemm", "Conv")), {"g": nodes}) == ["x", "OpType::Conv"]


@pytest.mark.parametrize("text", ["", "# only a comment", "two words", "OpType::", "OpType::a::b"])
def test_a_keep_list_that_says_nothing_sensible_is_refused(text: str) -> None:
    with pytest.raises(AtcError, match=r"keep\.txt"):
        KeepList.parse(text, "keep.txt")


def test_memory_counts_weights_cache_and_the_largest_set_of_live_tensors() -> None:
    step = SPECS[1].bind(B=1, C=32)
    estimate = estimate_memory(make_model(SPECS[1]), step, "origin")
    tensor = 32 * 8 * 4
    assert estimate.weight_bytes == 8 * 8 * 4 + 4
    assert estimate.cache_bytes == tensor
    assert estimate.io_bytes == 8 * 4 + tensor
    # A tensor dies after its last reader: sum and scores live together, then scores and bent; never all three.
    assert estimate.workspace_bytes == 2 * tensor
    assert estimate.num_unknown == 0
    half = estimate_memory(make_model(SPECS[1]), step, "fp16")
    assert (half.weight_bytes, half.workspace_bytes) == (130, tensor)


def test_a_view_costs_no_memory() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[B, 128] x) => (float[B, 128] y) '
        "<int64[2] shape = {0, 128}> { a = Tanh(x) b = Reshape(a, shape) c = Sin(x) y = Add(b, c) }"
    )
    spec = GraphSpec("g", (TensorSpec("x", "float32", (1, 128)),), (TensorSpec("y", "float32", (1, 128)),))
    # b shows the memory of a, which therefore lives until b is read.
    assert estimate_memory(model, spec, "origin").workspace_bytes == 2 * 512
