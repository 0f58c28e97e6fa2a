"""The pipeline on a real, tiny checkpoint: what runs, what is skipped, and why."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result

from convert import export as export_module
from convert import patched_graphs, recorded_inputs
from convert.atc import Buckets
from convert.atc_plan import Compiler, plan_atc
from convert.atc_run import require_atc
from convert.build import BuildRequest, Step, compile_stage, plan_build, run_stages
from convert.cann import Host
from convert.cli import cli
from op_patches.targets import Target
from runtime.backends.fake_om import read_fake_om
from runtime.errors import ExportError, PatchError
from runtime.manifest import Manifest
from tests.fake_cann.tree import make_tree

NANO = Path(__file__).resolve().parents[1] / "data" / "nano"
GRAPHS = ("step", "codec_stream")


def request_for(directory: Path, checkpoints: Path = NANO, **changes: object) -> BuildRequest:
    request = BuildRequest(
        str(checkpoints / "tiny_llm_b"),
        str(checkpoints / "tiny_codec"),
        directory,
        Target(soc="Ascend910B4"),
        Buckets(capacity=32, prefill=(8,), stream_frames=(1, 2)),
        max_positions=256,
        graphs=GRAPHS,
    )
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def actions(steps: list[Step]) -> dict[str, Counter[str]]:
    return {stage: Counter(s.action for s in steps if s.stage == stage) for stage in ("export", "patch", "atc")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifacts directory after export, patch and check."""
    directory = tmp_path_factory.mktemp("built") / "artifacts"
    lines: list[str] = []
    manifest, plan = run_stages(request_for(directory), lines.append, Compiler())
    assert [job.state for job in plan.jobs] == ["compile"] * 3, lines
    assert {job.source for job in plan.jobs} == {f"{g}.Ascend910B4-8.5-origin.onnx" for g in GRAPHS}
    assert all(p.lowered.get("layer_norm") for p in manifest.patched)
    return directory


@pytest.fixture
def artifacts(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "artifacts"))


def test_a_dry_run_before_anything_lists_every_stage(tmp_path: Path) -> None:
    steps = plan_build(request_for(tmp_path / "new"), Compiler())
    assert actions(steps) == {"export": {"run": 2}, "patch": {"run": 2}, "atc": {"run": 2}}
    assert str(steps[0]).split() == ["export", "step", "run", "not", "exported", "yet"]


def test_a_second_run_skips_everything_and_compiles_what_is_missing(artifacts: Path, tmp_path: Path) -> None:
    request = request_for(artifacts)
    steps = plan_build(request, Compiler())
    assert actions(steps) == {"export": {"skip": 2}, "patch": {"skip": 2}, "atc": {"run": 3}}
    home = make_tree(tmp_path / "machine")
    environ = {"PATH": f"{home}/bin:/usr/bin:/bin", "ASCEND_HOME_PATH": str(home), "HOME": str(tmp_path)}
    environment = require_atc(Host(tmp_path, environ))
    lines: list[str] = []
    manifest, plan = run_stages(request, lines.append, environment.compiler)
    assert [line for line in lines if "unchanged" not in line and not line.startswith("check")] == []
    results = compile_stage(manifest, plan, environment, lines.append, 2, 60)
    assert [r.explanation for r in results] == [None] * 3
    after = Manifest.load(artifacts)
    step = after.builds_of("step")[0]
    assert list(step.inputs) == ["step.Ascend910B4-8.5-origin.onnx", "weights.bin", "--op_precision_mode"]
    om = read_fake_om(after.check_build(step))
    bound = step.bound_spec(after.graph("step").spec)
    assert [(t.onnx_name, t.shape) for t in om.inputs] == [(t.name, t.bound_shape) for t in bound.inputs]
    assert [(t.onnx_name, t.shape) for t in om.outputs] == [(t.name, t.bound_shape) for t in bound.outputs]
    assert actions(plan_build(request, environment.compiler))["atc"] == {"skip": 3}
    # A new export with the same result keeps the records of what was compiled.
    run_stages(dataclasses.replace(request, force=True), lines.append, environment.compiler)
    assert actions(plan_build(request, environment.compiler))["atc"] == {"skip": 3}


def test_a_changed_checkpoint_runs_every_stage(artifacts: Path, tmp_path: Path) -> None:
    checkpoints = Path(shutil.copytree(NANO, tmp_path / "checkpoints"))
    config = checkpoints / "tiny_codec/config.json"
    config.write_text(config.read_text() + "\n")
    steps = plan_build(request_for(artifacts, checkpoints), Compiler())
    assert {s.action for s in steps} == {"run"}
    assert steps[0].why == f"{config} is missing or changed"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: (d / "weights.bin").write_bytes(b""), "weights.bin is missing or changed"),
        (lambda d: (d / "manifest.json").write_text("{"), "not readable JSON"),
        (lambda d: (d / "manifest.json").unlink(), "not exported yet"),
    ],
)
def test_damaged_artifacts_are_exported_again(artifacts: Path, change: object, why: str) -> None:
    change(artifacts)  # type: ignore[operator]
    steps = plan_build(request_for(artifacts), Compiler())
    assert actions(steps)["export"] == {"run": 2}
    assert why in steps[0].why


def test_one_damaged_graph_is_exported_alone(artifacts: Path) -> None:
    (artifacts / "step.onnx").unlink()
    steps = plan_build(request_for(artifacts), Compiler())
    assert [(s.what, s.action) for s in steps if s.stage == "export"] == [("step", "run"), ("codec_stream", "skip")]
    lines: list[str] = []
    run_stages(request_for(artifacts), lines.append, Compiler())
    assert "export  codec_stream: unchanged" in lines
    assert "patch   step: unchanged" in lines, "the same export gives the same patched graph"


def test_another_limit_or_other_code_is_a_reason(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = plan_build(request_for(artifacts, max_positions=200), Compiler())
    assert steps[0].why == "--max-positions is 200, was 256"
    monkeypatch.setattr(patched_graphs, "lowering_code", lambda: "other")
    steps = plan_build(request_for(artifacts), Compiler())
    assert actions(steps) == {"export": {"skip": 2}, "patch": {"run": 2}, "atc": {"run": 3}}
    assert next(s.why for s in steps if s.stage == "patch") == "the lowerings or their tables changed"


def test_another_target_is_patched_for_itself(artifacts: Path) -> None:
    request = request_for(artifacts, target=Target(soc="Ascend310P3", precision="fp16"), graphs=("step",))
    assert actions(plan_build(request, Compiler()))["patch"] == {"run": 1}
    manifest, _ = run_stages(request, lambda _: None, Compiler())
    assert {p.file for p in manifest.patched if p.graph == "step"} == {
        "step.Ascend910B4-8.5-origin.onnx",
        "step.Ascend310P3-8.5-fp16.onnx",
    }


def test_float32_on_310p_is_patched_for_one_batch(artifacts: Path) -> None:
    request = request_for(artifacts, target=Target(soc="Ascend310P3", precision="origin"), graphs=("step",))
    two = dataclasses.replace(request, buckets=Buckets(batch=2, capacity=32, prefill=(8,)))
    manifest, plan = run_stages(two, lambda _: None, Compiler())
    patched = manifest.patched_graph("step", str(request.target))
    assert patched is not None
    assert patched.inputs["batch"] == "2"
    assert set(patched.lowered) == {"layer_norm", "matmul_310p", "lifted_weights"}
    row = onnx.load(manifest.path(patched.file), load_external_data=False).graph.input[0]
    assert row.type.tensor_type.shape.dim[0].dim_value == 2
    assert [job.state for job in plan.jobs] == ["compile"]
    again = [s for s in plan_build(two, Compiler()) if s.stage == "patch"]
    assert [s.action for s in again] == ["skip"]
    (other,) = [s for s in plan_build(request, Compiler()) if s.stage == "patch"]
    assert (other.action, other.why) == ("run", "the batch is 1 now")
    (job,) = plan_atc(manifest, request.target, request.buckets, ["step"]).jobs
    assert job.state == "refused"  # the file of batch 2 is not compiled for batch 1
    assert "the model says 2, --input_shape 1" in job.why


def test_a_patched_graph_that_answers_differently_is_refused(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = patched_graphs.apply_lowerings

    def wrong(model: object, target: Target, **bound: object) -> object:
        patched, report = lower(model, target, **bound)  # type: ignore[arg-type]
        mul = next(n for n in patched.graph.node if n.op_type == "Mul")
        mul.op_type = "Add"
        return patched, report

    monkeypatch.setattr(patched_graphs, "apply_lowerings", wrong)
    manifest = Manifest.load(artifacts)
    before = manifest.path("step.Ascend910B4-8.5-origin.onnx").read_bytes()
    with pytest.raises(PatchError, match="the patched graph differs"):
        patched_graphs.patch_graph(manifest, "step", Target(soc="Ascend910B4"))
    assert manifest.path("step.Ascend910B4-8.5-origin.onnx").read_bytes() == before


def test_an_interrupted_export_keeps_the_graphs_it_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export_module.export_graph

    def interrupted(spec: object, *args: object) -> object:
        if spec.name == "codec_stream":  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return whole(spec, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(export_module, "export_graph", interrupted)
    request = request_for(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run_stages(request, lambda _: None, Compiler())
    steps = plan_build(request, Compiler())
    assert [(s.what, s.action) for s in steps if s.stage == "export"] == [("step", "skip"), ("codec_stream", "run")]


def test_fewer_positions_than_the_verification_visits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="199 positions"):
        run_stages(request_for(tmp_path / "a", max_positions=199), lambda _: None, Compiler())


def test_an_unknown_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no graph stop"):
        plan_build(request_for(tmp_path, graphs=("stop",)), Compiler())


def test_the_code_hash_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_inputs, "_ROOT", tmp_path)
    (tmp_path / "a.py").write_text("1")
    one = recorded_inputs.code_hash(["*.py"])
    (tmp_path / "a.py").write_text("2")
    two = recorded_inputs.code_hash(["*.py"])
    (tmp_path / "b.py").write_text("")
    assert len({one, two, recorded_inputs.code_hash(["*.py"])}) == 3


def test_the_command_lists_runs_and_scripts(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("convert.cann._SYSTEM_HOMES", ())  # also on a machine that has CANN
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = [
        "build", str(NANO / "tiny_llm_b"), "--codec", str(NANO / "tiny_codec"), "--out", str(artifacts),
        "--target", "910B4", "--graphs", ",".join(GRAPHS), "--max-positions", "256", "--capacity", "32",
        "--prefill", "8", "--stream-frames", "1,2",
    ]  # fmt: skip

    def run(*more: str) -> Result:
        return CliRunner().invoke(cli, [*arguments, *more], catch_exceptions=False)

    listed = run("--dry-run", "--json")
    assert listed.exit_code == 0
    assert Counter(step["action"] for step in json.loads(listed.stdout) if step["stage"] == "atc") == {"run": 3}
    assert "no CANN here" in listed.stderr
    script = tmp_path / "build_om.sh"
    scripted = run("--script", str(script))
    assert scripted.exit_code == 0
    assert "compiles 3 graphs" in scripted.stderr and script.is_file()
    compiled = run()
    assert compiled.exit_code == 1
    assert "patch   step: unchanged" in compiled.stderr
    assert "check   step: nothing stands in the way of ATC" in compiled.stderr
    assert compiled.stderr.rstrip().splitlines()[-1].startswith("error: atc is not on PATH")
