"""The exported parts: equal to torch, to upstream's rows, clean for ATC, and as large as the plan says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import soundfile
import torch
from click.testing import CliRunner, Result

from convert.cli import cli as convert_cli
from convert.sfx_export import export_part, export_sfx
from convert.sfx_patch import patch_parts
from convert.sfx_plan import GIB, atc_builds, atc_script, configs_of, memory_plan, published_codec, published_config
from convert.sfx_verify import REFERENCE_MAX_BYTES, TOO_LARGE, verify_part
from op_patches.readiness.check import check_model
from op_patches.targets import Target
from runtime.backends import om_device
from runtime.backends.simulator import SimulatorConfig, installed, uninstall
from runtime.cli import cli as runtime_cli
from runtime.config import CodecConfig
from runtime.errors import (
    AtcError,
    BackendUnavailableError,
    CapacityError,
    ExportError,
    ManifestError,
    SpecMismatchError,
)
from runtime.modules.sfx import SfxTextHead
from runtime.sfx.artifacts import open_artifacts
from runtime.sfx.config import SfxConfig
from runtime.sfx.generate import generate
from runtime.sfx.graphs import SfxPlan, sfx_graph_specs, text_spec
from runtime.sfx.manifest import SFX_MANIFEST_NAME, SfxManifest
from runtime.sfx.sampling import SfxSampling
from runtime.sfx.torch_model import TorchRowModel
from tests.fake_cann.tree import make_tree

TARGET = Target.parse("cann=8.5,soc=Ascend910B4,precision=origin")
PLANS = {dtype: SfxPlan(layers_per_block=1, rows=16, capacity=400, dtype=dtype) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def artifacts(
    tiny_lm: Path, tiny_codec: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, SfxManifest]:  # fmt: skip
    root = tmp_path_factory.mktemp("sfx_artifacts")
    return {dtype: export_sfx(tiny_lm, tiny_codec, root / dtype, plan) for dtype, plan in PLANS.items()}


@pytest.fixture
def exported(artifacts: Mapping[str, SfxManifest]) -> SfxManifest:
    return artifacts["float32"]


@pytest.mark.parametrize(("name", "penalty"), [("greedy", 1.0), ("greedy_pen", 1.2)])
def test_onnx_runtime_generates_the_rows_of_upstream(
    exported: SfxManifest, golden: Mapping[str, np.ndarray], name: str, penalty: float
) -> None:
    with open_artifacts(exported.directory) as effects:
        [run] = generate(effects.model, [golden["ids_0"]], SfxSampling.greedy(penalty), [0], 190)
    np.testing.assert_array_equal(run.rows, golden[f"gen_{name}"])


def test_a_seed_gives_the_same_rows_on_onnx_runtime_and_torch(
    exported: SfxManifest, model: TorchRowModel, golden: Mapping[str, np.ndarray]
) -> None:
    prompts = [golden["ids_1"], golden["ids_2"]]
    with open_artifacts(exported.directory) as effects:
        assert effects.model.backend_name == "ort float32"
        ours = generate(effects.model, prompts, SfxSampling(), [3, 4], 60)
    for run, want in zip(ours, generate(model, prompts, SfxSampling(), [3, 4], 60), strict=True):
        np.testing.assert_array_equal(run.rows, want.rows)


def test_the_command_speaks_from_artifacts(
    exported: SfxManifest, tiny_lm: Path, tiny_codec: Path, tmp_path: Path
) -> None:
    sources = {
        "a.wav": ["--artifacts", str(exported.directory)],
        "b.wav": ["--checkpoint", str(tiny_lm), "--codec", str(tiny_codec)],
    }
    for name, source in sources.items():
        arguments = ["sfx", *source, "--prompt", "rain", "--seed", "4", "--out", str(tmp_path / name)]
        result = CliRunner().invoke(runtime_cli, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
    a, b = (soundfile.read(tmp_path / name, dtype="int16")[0].astype(int) for name in sources)
    assert a.shape == b.shape and np.abs(a - b).max() <= 1  # one step of 16 bits where rounding decides
    result = CliRunner().invoke(runtime_cli, ["sfx", *sources["a.wav"], "--dtype", "float32", "--prompt", "x", "--out",
                                              str(tmp_path / "c.wav")])  # fmt: skip
    assert result.exit_code == 1 and "leave out --dtype" in result.stderr


def test_more_rows_than_the_capacity_are_refused(exported: SfxManifest, golden: Mapping[str, np.ndarray]) -> None:
    with open_artifacts(exported.directory) as effects, pytest.raises(CapacityError, match="400"):
        generate(effects.model, [golden["ids_0"]], SfxSampling(), [0], 250)


def test_every_graph_was_compared_with_torch(artifacts: Mapping[str, SfxManifest]) -> None:
    for manifest in artifacts.values():
        for name, graph in manifest.graphs.items():
            assert set(graph.max_abs_difference) == {t.name for t in graph.spec.outputs}, name
    assert "onnx.reference" in artifacts["bfloat16"].graph("block_0").verification


def test_a_wrong_weight_does_not_pass_the_comparison(config: SfxConfig, tmp_path: Path) -> None:
    def build(state: Mapping[str, torch.Tensor]) -> SfxTextHead:
        head = SfxTextHead(state)
        head.forward = lambda hidden: hidden @ head.text * (1.5 if isinstance(hidden, torch.Tensor) else 1.0)  # type: ignore[method-assign]
        return head

    tensors = [("text", torch.ones(config.hidden_size, config.vocab_size))]
    with pytest.raises(ExportError, match="torch and ONNX differ"):
        export_part(text_spec(config), tensors, build, tmp_path, [{"B": 1}], 1)
    assert not list(tmp_path.glob("*.onnx"))


def test_a_large_bfloat16_part_says_that_it_was_not_run(config: SfxConfig) -> None:
    text = torch.empty(REFERENCE_MAX_BYTES, 1, dtype=torch.bfloat16, device="meta")
    found = verify_part(text_spec(config), SfxTextHead({"text": text}), Path("none.onnx"), [{"B": 1}], 1)
    assert found.max_abs_difference == {} and found.what == TOO_LARGE


def test_weights_that_float16_cannot_hold_are_refused(tiny_lm: Path, tiny_codec: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(tiny_lm / name)
    tensors = load_file(tiny_lm / "model.safetensors")
    tensors["language_model.layers.1.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(tensors, tmp_path / "model.safetensors")
    plan = SfxPlan(layers_per_block=1, rows=2, capacity=40, dtype="float16")
    with pytest.raises(ExportError, match=r"layers\.0\.up: not every value is finite in float16"):
        export_sfx(tmp_path, tiny_codec, tmp_path / "out", plan)
    assert not (tmp_path / "out" / SFX_MANIFEST_NAME).exists()


def test_weights_lie_outside_the_protobuf_and_once(artifacts: Mapping[str, SfxManifest]) -> None:
    for manifest in artifacts.values():
        for graph in manifest.graphs.values():
            proto = onnx.load(manifest.directory / graph.file, load_external_data=False)
            assert proto.ByteSize() < 1e6
            external = [t for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
            places = [{e.key: e.value for e in t.external_data} for t in external]
            assert {p["location"] for p in places} == {graph.weights_file}
            assert all(int(p["offset"]) % 4096 == 0 for p in places)
            assert sum(int(p["length"]) for p in places) == graph.weight_bytes


def test_the_graphs_are_ready_for_atc_without_a_finding(artifacts: Mapping[str, SfxManifest]) -> None:
    for manifest in artifacts.values():
        for build in atc_builds(manifest, TARGET):
            assert build.readiness.ready
            if build.name != "codec_stream":  # the codec is shared with MOSS-TTS-Nano and patched as there
                assert build.readiness.findings == ()
                assert {e.value for e in build.readiness.engines} <= {"aicore", "local"}


def test_lowerings_leave_the_language_model_alone_and_take_layer_norm_out_of_the_codec(
    artifacts: Mapping[str, SfxManifest],
) -> None:
    for manifest in artifacts.values():
        files = patch_parts(manifest, TARGET)
        for build in atc_builds(manifest, TARGET, files):
            if build.name == "codec_stream":
                nodes = onnx.load(files[build.name], load_external_data=False).graph.node
                assert "LayerNormalization" not in {n.op_type for n in nodes}
                assert build.readiness.ready
            else:
                assert files[build.name] == manifest.directory / f"{build.name}.onnx"


def test_half_precision_graphs_keep_float32_islands(artifacts: Mapping[str, SfxManifest]) -> None:
    manifest = artifacts["bfloat16"]
    model = onnx.load(manifest.directory / "block_0.onnx", load_external_data=False)
    typed = onnx.shape_inference.infer_shapes(model).graph
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*typed.value_info, *typed.input, *typed.output)}
    for node in typed.node:
        if node.op_type in ("Softmax", "Sqrt", "ReduceMean"):
            assert kinds[node.output[0]] == onnx.TensorProto.FLOAT, node.name
        if node.op_type == "MatMul":
            assert kinds[node.output[0]] == onnx.TensorProto.BFLOAT16, node.name
    assert kinds["hidden"] == kinds["hidden_next"] == onnx.TensorProto.FLOAT
    assert kinds["past_key_0"] == onnx.TensorProto.BFLOAT16


def test_node_count_follows_from_the_architecture(artifacts: Mapping[str, SfxManifest]) -> None:
    assert [artifacts[d].graph("block_0").num_nodes for d in ("float32", "bfloat16")] == [72, 83]  # one layer
    norm = 6  # x * x, mean, + eps, sqrt, /, * weight
    assert artifacts["float32"].graph("block_1").num_nodes == 72 + norm


def test_the_atc_runs_bind_every_axis_and_leave_the_weights_outside(artifacts: Mapping[str, SfxManifest]) -> None:
    builds = {b.name: b for b in atc_builds(artifacts["bfloat16"], TARGET)}
    assert set(builds) == {"block_0", "block_1", "inside_heads", "text_head", "codec_stream"}
    argv = builds["block_1"].argv
    assert "--external_weight=1" in argv and "--precision_mode_v2=origin" in argv
    assert "past_key_1:1,2,400,8" in next(a for a in argv if a.startswith("--input_shape=")).split(";")
    with pytest.raises(AtcError, match="precision=origin"):
        atc_builds(artifacts["bfloat16"], Target.parse("cann=8.5,soc=Ascend910B4,precision=fp16"))
    with pytest.raises(AtcError, match="no bfloat16"):
        atc_builds(artifacts["bfloat16"], Target.parse("cann=8.5,soc=Ascend310P3,precision=origin"))


def test_the_script_runs_atc_once_per_graph(
    artifacts: Mapping[str, SfxManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, log = tmp_path / "build.sh", tmp_path / "log"
    arguments = ["sfx-plan", str(artifacts["bfloat16"].directory), "--script", str(script)]
    result = CliRunner().invoke(convert_cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "5 ATC runs" in result.stderr
    (tmp_path / "atc").write_text(f'#!/bin/sh\nprintf "%s\\n" "$2" >>{log}\n')
    (tmp_path / "atc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    subprocess.run([script], check=True, capture_output=True)
    models = [Path(line).name for line in log.read_text().splitlines()]
    assert models[:-1] == [f"{name}.onnx" for name in list(artifacts["bfloat16"].graphs)[:-1]]
    assert models[-1] == "codec_stream.Ascend910B4-8.5-origin.onnx"


@pytest.fixture(scope="module")
def compiled(artifacts: Mapping[str, SfxManifest], tmp_path_factory: pytest.TempPathFactory) -> SfxManifest:
    """The float32 parts, compiled by the script with the fake atc."""
    manifest, root = artifacts["float32"], tmp_path_factory.mktemp("sfx_cann")
    (root / "build.sh").write_text(atc_script(atc_builds(manifest, TARGET, patch_parts(manifest, TARGET))))
    home = make_tree(root / "machine")
    environ = {**os.environ, "PATH": f"{home}/bin:{os.environ['PATH']}", "ASCEND_HOME_PATH": str(home)}
    done = subprocess.run(["bash", root / "build.sh"], env=environ, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return manifest


def test_compiled_parts_on_the_simulator_make_the_sound_of_onnx_runtime(compiled: SfxManifest, tmp_path: Path) -> None:
    def sfx(name: str, *options: str) -> Result:
        arguments = ["sfx", "--artifacts", str(compiled.directory), "--prompt", "rain", "--seed", "4", *options]
        try:
            return CliRunner().invoke(runtime_cli, [*arguments, "--out", str(tmp_path / name)], catch_exceptions=False)
        finally:
            om_device.close_all()  # what the end of the process does: finalize, and fail on a leak
            uninstall()

    results = [sfx("a.wav"), sfx("b.wav", "--backend", "om", "--simulate")]
    assert [r.exit_code for r in results] == [0, 0], results[1].stderr
    assert "om (simulated)" in results[1].stdout and "nothing here is a device result" in results[1].stderr
    a, b = (soundfile.read(tmp_path / name, dtype="int16")[0].astype(int) for name in ("a.wav", "b.wav"))
    assert a.shape == b.shape and np.abs(a - b).max() <= 1
    two = sfx("c.wav", "--backend", "om", "--simulate", "--prompt", "wind", "--out", str(tmp_path / "d.wav"))
    assert two.exit_code == 1 and "run them in turn" in two.stderr


def test_a_part_that_is_not_compiled_names_the_script(artifacts: Mapping[str, SfxManifest]) -> None:
    with installed(SimulatorConfig(soc="Ascend910B3")), pytest.raises(BackendUnavailableError, match="--script"):
        open_artifacts(artifacts["bfloat16"].directory, "om")
    assert om_device._process is None or not om_device._process.devices  # the device was given back


def test_the_full_size_plan_adds_up_to_the_published_figures() -> None:
    config, codec, _ = configs_of(None, None)
    plan = memory_plan(config, codec, SfxPlan(), 32 * GIB)
    parts = {p.name: p for p in plan.parts}
    blocks = [p for name, p in parts.items() if name.startswith("block_")]
    assert len(blocks) == 4
    # docs/soundeffect.md: a layer has 192.9 M parameters, the text head 0.622 B, a cached row takes 144 KiB.
    assert sum(p.weights for p in blocks) == pytest.approx(36 * 192.9e6 * 2, rel=1e-3)
    assert parts["text_head"].weights == 151936 * 4096 * 2
    assert sum(p.cache for p in blocks) == 1024 * 144 * 1024
    assert parts["codec_stream"].weights == pytest.approx(3.55e9, rel=0.01)
    assert plan.fits(plan.total(with_codec=True))
    assert not memory_plan(config, codec, SfxPlan(dtype="float32"), 32 * GIB).fits(
        memory_plan(config, codec, SfxPlan(dtype="float32"), 32 * GIB).total(with_codec=True)
    )


def test_the_plan_counts_what_the_export_wrote(artifacts: Mapping[str, SfxManifest]) -> None:
    for manifest in artifacts.values():
        plan = memory_plan(manifest.config, manifest.codec, manifest.plan, 32 * GIB)
        assert {p.name: p.weights for p in plan.parts} == {n: g.weight_bytes for n, g in manifest.graphs.items()}
        files = sum(r.num_bytes for r in manifest.embeddings.values())
        assert files == plan.host_bytes * 4 // {"float32": 4, "bfloat16": 2}[manifest.plan.dtype]  # stored as float32


def test_the_published_configs_have_the_published_sizes() -> None:
    config = SfxConfig.from_dict(published_config())
    codec = CodecConfig.from_dict(published_codec(32))
    assert config.notices == () and config.heads_per_kv == 4
    assert [s.context for s in codec.decoder] == [125, 250, 500, 1000]


def test_the_plan_command_says_whether_it_fits() -> None:
    result = CliRunner().invoke(convert_cli, ["sfx-plan", "--hbm-gib", "17"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "codec on the CPU:" in result.stdout and "fits 17 GiB" in result.stdout
    assert "DOES NOT FIT 17 GiB" in result.stdout
    facts = json.loads(CliRunner().invoke(convert_cli, ["sfx-plan", "--json"]).stdout)
    assert facts["fits"] == {"codec_on_cpu": True, "codec_on_device": True}
    result = CliRunner().invoke(convert_cli, ["sfx-plan", "--script", "x.sh"])
    assert result.exit_code == 1 and "sfx-export first" in result.stderr


def test_the_manifest_survives_a_round_trip_and_names_damage(exported: SfxManifest, tmp_path: Path) -> None:
    again = SfxManifest.load(exported.directory)
    assert again == exported
    exported.check_files()
    with pytest.raises(ManifestError, match="sfx-export"):
        SfxManifest.load(tmp_path)
    (tmp_path / SFX_MANIFEST_NAME).write_text('{"format_version": 1}')
    with pytest.raises(ManifestError, match="damaged"):
        SfxManifest.load(tmp_path)
    (tmp_path / SFX_MANIFEST_NAME).write_text('{"format_version": 7}')
    with pytest.raises(ManifestError, match="format version 7"):
        SfxManifest.load(tmp_path)
    with pytest.raises(ManifestError, match="no graph block_9"):
        exported.graph("block_9")


def test_the_script_is_not_written_for_files_that_changed(exported: SfxManifest, tmp_path: Path) -> None:
    copy = shutil.copytree(exported.directory, tmp_path / "copy")
    with (copy / "text_head.bin").open("r+b") as file:
        file.write(b"\1")
    result = CliRunner().invoke(convert_cli, ["sfx-plan", str(copy), "--script", str(tmp_path / "build.sh")])
    assert result.exit_code == 1 and "text_head.bin differs from what was exported" in result.stderr
    assert not (tmp_path / "build.sh").exists()


def test_impossible_plans_are_refused(config: SfxConfig) -> None:
    for numbers in ({"rows": 0}, {"rows": 32, "capacity": 16}, {"dtype": "int8"}):
        with pytest.raises(SpecMismatchError):
            SfxPlan(**numbers)  # type: ignore[arg-type]
    assert list(sfx_graph_specs(config, SfxPlan(layers_per_block=9))) == ["block_0", "inside_heads", "text_head"]


def test_readiness_still_finds_what_is_wrong(exported: SfxManifest) -> None:
    """The clean reports above mean something: the same graph at an opset without Softmax-13 is not clean."""
    proto = onnx.load(exported.directory / "block_0.onnx", load_external_data=False)
    next(n for n in proto.graph.node if n.op_type == "Softmax").op_type = "Einsum"
    assert not check_model(proto, TARGET).ready
