"""Export of whole artifacts: what is written, what is refused, and that nothing half-done stays."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import onnx
import pytest
import torch
from click.testing import CliRunner

from convert import export as export_module
from convert.cli import cli
from convert.export import export_artifacts
from runtime.errors import ExportError, ManifestError
from runtime.graphs import GRAPH_NAMES
from runtime.manifest import Manifest
from tests.conftest import NANO


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """tiny_llm_b and tiny_codec; a tokenizer does not belong to them, which export allows with a notice."""
    directory = tmp_path_factory.mktemp("checkpoint")
    shutil.copytree(NANO / "tiny_llm_b", directory / "model")
    shutil.copytree(NANO / "tiny_codec", directory / "codec")
    return directory


@pytest.fixture(scope="session")
def exported(checkpoint, tmp_path_factory):
    return export_artifacts(checkpoint / "model", checkpoint / "codec", tmp_path_factory.mktemp("artifacts") / "tiny")


def test_every_graph_is_exported_and_the_manifest_reads_back(exported):
    loaded = Manifest.load(exported.directory)
    assert loaded == exported and tuple(loaded.graphs) == GRAPH_NAMES
    loaded.check_hashes()
    assert not [p.name for p in exported.directory.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("name", GRAPH_NAMES)
def test_a_graph_is_what_atc_wants(exported, name):
    graph = exported.graph(name)
    model = onnx.load(exported.path(graph.file), load_external_data=False)
    assert model.ir_version <= 8
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]
    ops = Counter(n.op_type for n in model.graph.node)
    forbidden = {"Shape", "Range", "If", "Loop", "Scan", "Einsum", "Trilu", "Expand", "Gemm", "Constant"}
    assert not forbidden & set(ops)
    assert all(0 not in i.dims for i in model.graph.initializer)
    assert all(n.name for n in model.graph.node)
    assert {d.key: d.value for i in model.graph.initializer for d in i.external_data}["location"] == "weights.bin"


def test_node_counts_follow_from_the_architecture(exported):
    config = exported.model

    def ops(name):
        model = onnx.load(exported.path(exported.graph(name).file), load_external_data=False)
        return Counter(n.op_type for n in model.graph.node)

    for name in ("prefill", "step"):
        assert ops(name)["LayerNormalization"] == 2 * config.num_layers + 1
        assert ops(name)["Tanh"] == config.num_layers
    # 1 + n_vq positions in n_vq passes; the first LayerNorm of the first layer is a table but for the first pass
    passes = config.n_vq
    assert ops("frame")["LayerNormalization"] == passes * 2 * config.local_layers - (passes - 1) + passes
    assert ops("frame")["TopK"] == config.n_vq
    assert ops("step_frame") == ops("step") + ops("frame")


def test_names_lead_back_to_the_module(exported):
    model = onnx.load(exported.path(exported.graph("step").file), load_external_data=False)
    names = {n.name for n in model.graph.node}
    assert "global/layer_02/attention/past_scores" in names and "global/layer_00/mlp/fc_in/matmul" in names


def test_graphs_share_their_weights_in_one_file(exported):
    def offsets(name):
        model = onnx.load(exported.path(exported.graph(name).file), load_external_data=False)
        return {i.name: [e.value for e in i.external_data] for i in model.graph.initializer if i.external_data}

    step, prefill = offsets("step"), offsets("prefill")
    assert step == prefill
    frame, fused = offsets("frame"), offsets("step_frame")
    assert frame.items() <= fused.items()
    for name, views in (("global_.audio_table", exported.model.n_vq - 1), ("local.audio_heads", exported.model.n_vq)):
        assert len([n for n in frame if n.startswith(f"{name}.at_")]) == views  # one codebook each, nothing copied


def test_one_graph_alone_keeps_the_others(checkpoint, exported, tmp_path):
    directory = tmp_path / "tiny"
    first = export_artifacts(checkpoint / "model", checkpoint / "codec", directory, only=["step"])
    assert tuple(first.graphs) == ("step",)
    second = export_artifacts(checkpoint / "model", checkpoint / "codec", directory, only=["frame"])
    assert tuple(second.graphs) == ("step", "frame")
    third = export_artifacts(checkpoint / "model", checkpoint / "codec", directory, only=["frame"], max_positions=256)
    assert tuple(third.graphs) == ("frame",)  # other limits: the old step would not fit


def test_the_same_checkpoint_gives_the_same_bytes(checkpoint, exported, tmp_path):
    again = export_artifacts(checkpoint / "model", checkpoint / "codec", tmp_path / "again", only=["frame"])
    assert again.graph("frame").sha256 == exported.graph("frame").sha256
    assert again.data_files == exported.data_files


def test_a_module_that_differs_from_its_graph_is_not_exported(checkpoint, tmp_path, monkeypatch):
    """Break the mathematics between trace and verification: the export must say so and leave no graph."""
    honest = export_module.build_module

    def broken(name, *args):
        module = honest(name, *args)
        calls = []
        forward = module.forward

        def wrong(*inputs):
            calls.append(1)
            outputs = forward(*inputs)
            return outputs if len(calls) == 1 else (outputs[0] + 1e-3, *outputs[1:])

        module.forward = wrong
        return module

    monkeypatch.setattr(export_module, "build_module", broken)
    with pytest.raises(ExportError, match=r"prefill: torch and ONNX differ.*hidden"):
        export_artifacts(checkpoint / "model", checkpoint / "codec", tmp_path / "x", only=["prefill"])
    assert not list((tmp_path / "x").glob("*.onnx")) and not (tmp_path / "x" / "manifest.json").exists()


def test_a_codec_of_another_model_is_refused(checkpoint, tmp_path):
    with pytest.raises(ExportError, match="16 codebooks of 1024 codes, the codec reads 16 of 64"):
        model = tmp_path / "a"
        shutil.copytree(NANO / "tiny_llm_a", model)
        export_artifacts(model, checkpoint / "codec", tmp_path / "out")


def test_untied_heads_are_exported_as_they_are(checkpoint, tmp_path):
    """A fine-tuned audio head gets its own table; verification compares torch with ONNX, so change one and look."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(checkpoint / "model", model)
    tensors = load_file(model / "model.safetensors")
    tensors["audio_lm_heads.3.weight"] = tensors["audio_embeddings.3.weight"] + 0.5
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    manifest = export_artifacts(model, checkpoint / "codec", tmp_path / "out", only=["frame"])
    weights = torch.from_file(
        str(manifest.path("weights.bin")), size=manifest.path("weights.bin").stat().st_size // 4, dtype=torch.float32
    )
    v, e = manifest.model.codebook_size, manifest.model.hidden_size
    start = manifest.weights["local.audio_heads"].offset // 4 + 3 * e * v
    torch.testing.assert_close(weights[start : start + v * e].reshape(e, v), tensors["audio_lm_heads.3.weight"].T)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "step.onnx").write_bytes(b"x"), "step.onnx: sha256"),
        (lambda d: (d / "frame.onnx").unlink(), "frame.onnx is missing"),
        (lambda d: (d / "manifest.json").unlink(), "holds no manifest.json"),
        (lambda d: (d / "manifest.json").write_text("{"), "not readable JSON"),
        (lambda d: (d / "manifest.json").write_text('{"format_version": 99}'), "format version 99"),
        (lambda d: (d / "manifest.json").write_text('{"format_version": 1}'), "damaged"),
    ],
)
def test_artifacts_that_do_not_match_their_manifest_are_refused(exported, tmp_path, damage, message):
    directory = tmp_path / "copy"
    shutil.copytree(exported.directory, directory)
    damage(directory)
    with pytest.raises(ManifestError, match=message):
        Manifest.load(directory).check_hashes()


def test_the_command_says_what_it_made_and_one_line_when_it_cannot(checkpoint, tmp_path):
    run = CliRunner()
    arguments = [
        "export",
        str(checkpoint / "model"),
        "--codec",
        str(checkpoint / "codec"),
        "--out",
        str(tmp_path / "o"),
    ]
    result = run.invoke(cli, [*arguments, "--only", "step"])
    assert result.exit_code == 0 and "step" in result.stdout
    result = run.invoke(
        cli, ["export", str(tmp_path), "--codec", str(checkpoint / "codec"), "--out", str(tmp_path / "p")]
    )
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "config.json" in result.stderr
    assert json.loads((tmp_path / "o" / "manifest.json").read_text())["name"] == "o"
