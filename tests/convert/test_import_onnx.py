"""A published package becomes a checkpoint again, whatever tools did to it; what cannot be proved is refused in a line.

The packages are written here, from the small golden checkpoints. Recovered weights must be equal to the last bit;
convolutions under weight norm within an ulp, because a checkpoint stores them as length and direction.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from onnx import helper, numpy_helper

import convert.published_codec
from convert.checkpoint import open_codec, open_model
from convert.cli import cli
from convert.import_package import import_package, store_voices
from convert.published_package import CODEC_DIRECTORY, TTS_DIRECTORY, write_published_package
from runtime.cli import cli as run_cli
from runtime.manifest import Manifest
from runtime.voices import Voice, VoiceStore
from tests.conftest import NANO
from tests.convert import package_mutations as mutations
from tests.convert.package_mutations import mutated

CODEC_GRAPHS = ("encode", "decode_full", "codec_decode_step")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The matrices are small: a second thread waits for the first, all the longer when other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def voices_of_the_test(tmp_path_factory, monkeypatch):
    """No test may store a voice among those of the user."""
    monkeypatch.setenv("MOSS_TTS_VOICES", str(tmp_path_factory.mktemp("voices")))


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("package")
    write_published_package(NANO / "tiny_llm_b", NANO / "tiny_codec", root)
    return root


@pytest.fixture(scope="module")
def wanted() -> dict[str, torch.Tensor]:
    return plain_tensors(open_model(NANO / "tiny_llm_b").tensors, open_codec(NANO / "tiny_codec").tensors)


def plain_tensors(model, codec) -> dict[str, torch.Tensor]:
    """All tensors; weight norm folded, as a graph holds it."""
    tensors = model | {name: t for name, t in codec.items() if "parametrizations" not in name}
    for name in [n.removesuffix("original0") for n in codec if n.endswith("original0")]:
        length, direction = codec[f"{name}original0"].double(), codec[f"{name}original1"].double()
        tensors[name] = (length * direction / direction.norm(dim=(1, 2), keepdim=True)).float()
    return tensors


def recovered(package: Path, out: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors of the checkpoint that an import wrote, and its record; sizes must be those of the golden configs."""
    imported = import_package(package, out)
    model, codec = open_model(imported.model), open_codec(imported.codec)
    assert codec.config == open_codec(NANO / "tiny_codec").config
    unsaid = {"max_positions": 32768, "sample_rate_hz": codec.config.sample_rate_hz}  # no graph tells them
    assert model.config == dataclasses.replace(open_model(NANO / "tiny_llm_b").config, **unsaid)
    return plain_tensors(model.tensors, codec.tensors), imported.record


def assert_equal(got, wanted, rtol: float = 0.0) -> None:
    """Every tensor; `rtol` is of the largest value."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        allowed = max(rtol, 2**-23 if "parametrizations" in name else 0) * float(tensor.abs().max())
        np.testing.assert_allclose(got[name], tensor, rtol=0, atol=allowed, err_msg=name)


def test_the_weights_come_back_to_the_last_bit_and_every_graph_proves_them(package, wanted, tmp_path):
    got, record = recovered(package, tmp_path / "out")
    assert_equal(got, wanted)
    assert record["recovered"]["model"] == {"tensors": 98, "in_two_graphs": 98}
    assert record["recovered"]["codec"]["in_two_graphs"] == 118  # all but what the encoder alone holds
    proofs = {name.partition(":")[0] for name in record["proof"]}
    assert proofs == {"prefill", "frame", "local_decoder", "decode_step", "encode", "decode_full"}
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    origin = config["imported_package"]
    assert origin["directory"] == str(package / TTS_DIRECTORY)
    assert {"moss_tts_prefill.onnx", "moss_tts_global_shared.data"} <= origin["files"].keys()


@pytest.mark.parametrize("tool", ["renamed", "simplified", "ort_basic", "deduplicated", "rewritten"])
def test_a_package_that_went_through_tools_gives_the_same_weights(package, wanted, tmp_path, tool):
    changed = mutated(package, tmp_path / "package", getattr(mutations, tool))
    got, record = recovered(changed, tmp_path / "out")
    if tool == "rewritten":  # layer scale lies in the weights now
        got, wanted = (scaled({n: t.clone() for n, t in side.items()}) for side in (got, wanted))
    assert_equal(got, wanted)
    assert record["notices"] == []


def scaled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the layer scales multiplied in."""
    result = {name: tensor for name, tensor in tensors.items() if "layer_scale" not in name}
    for name, scale in tensors.items():
        for number, part in (("1", "self_attn.out_proj.weight"), ("2", "ffn.2.weight")):
            if name.endswith(f"layer_scale_{number}.scale"):
                result[name.replace(f"layer_scale_{number}.scale", part)] *= scale[:, None]
    return result


class UpstreamLikeLayer(convert.published_codec._Layer):
    """Upstream's way to write the same: parts by index, RoPE frequencies computed inside, fused attention."""

    def _heads(self, y, positions):
        batch, tokens, _ = y.shape
        shape = (batch, tokens, 3, self.spec.num_heads, self.spec.head_size)
        qkv = self.in_proj(self.norm1(y)).view(shape).permute(2, 0, 3, 1, 4)
        return self._rotated(qkv[0], positions), self._rotated(qkv[1], positions), qkv[2]

    def _rotated(self, x, positions):
        batch, heads, tokens, size = x.shape
        frequencies = torch.exp(torch.arange(size // 2) * (-math.log(self.spec.rope_base) * 2 / size))
        angles = frequencies * positions.to(torch.float32)[:, None, :, None]
        pairs = x.view(batch, heads, tokens, size // 2, 2)
        real, imaginary = pairs[..., 0], pairs[..., 1]
        cos, sin = torch.cos(angles), torch.sin(angles)
        turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], 4)
        return turned.view(batch, heads, tokens, size)

    def _attend(self, q, k, v, allowed):
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed[:, None])
        return mixed.transpose(1, 2).flatten(2)


def test_a_codec_that_is_written_as_upstream_writes_it_is_recognised(package, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(convert.published_codec, "_Layer", UpstreamLikeLayer)
    write_published_package(NANO / "tiny_llm_b", NANO / "tiny_codec", tmp_path / "package", graphs=CODEC_GRAPHS)
    shutil.rmtree(tmp_path / "package" / TTS_DIRECTORY)
    shutil.copytree(package / TTS_DIRECTORY, tmp_path / "package" / TTS_DIRECTORY)
    assert_equal(recovered(tmp_path / "package", tmp_path / "out")[0], wanted)


def test_a_float16_package_is_recovered_as_far_as_the_conversion_kept_it(package, wanted, tmp_path):
    changed = mutated(package, tmp_path / "package", mutations.half)
    got, record = recovered(changed, tmp_path / "out")
    assert_equal(got, wanted, rtol=1e-3)
    assert any("float16" in notice for notice in record["notices"])


def test_8_bit_weights_behind_dequantize_linear_are_dequantised_with_a_notice(package, wanted, tmp_path):
    changed = mutated(package, tmp_path / "package", mutations.weight_only_int8, "moss_tts_*.onnx")
    got, record = recovered(changed, tmp_path / "out")
    assert_equal(got, wanted, rtol=0.5 / 127 + 1e-6)
    assert not torch.equal(got["transformer.h.0.mlp.fc_in.weight"], wanted["transformer.h.0.mlp.fc_in.weight"])
    assert any("8-bit weights were dequantised" in notice for notice in record["notices"])


def refusal(package: Path, out: Path) -> str:
    """The one line with which an import ends; nothing may be left behind."""
    before = sorted(out.parent.iterdir())
    result = CliRunner().invoke(cli, ["import-onnx", str(package), "--out", str(out)])
    assert result.exit_code == 1, result.output
    assert result.stdout == "" and sorted(out.parent.iterdir()) == before
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors and result.stderr.splitlines()[-1] == errors[-1], result.stderr
    return errors[0]


@pytest.mark.parametrize(("tool", "named"), [
    ("dynamic_int8", "rounds activations to 8 bit"),
    ("ort_extended", "FusedMatMul is an operator of a runtime's own optimizer"),
])  # fmt: skip
def test_a_rewrite_whose_numbers_cannot_be_proved_is_refused_with_the_reason(package, tmp_path, tool, named):
    changed = mutated(package, tmp_path / "package", getattr(mutations, tool), "moss_tts_prefill.onnx")
    assert named in refusal(changed, tmp_path / "out")


def change_a_weight(model):
    tensor = next(t for t in model.graph.initializer if list(t.dims) == [64, 192])
    weight = numpy_helper.to_array(tensor).copy()
    weight[3, 5] += 1e-3
    tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))


def set_a_nan(model):
    tensor = next(t for t in model.graph.initializer if list(t.dims) == [64, 192])
    weight = numpy_helper.to_array(tensor).copy()
    weight[0, 0] = np.nan
    tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))


def drop_an_operand(model):
    del next(n for n in model.graph.node if n.op_type == "MatMul").input[1]


def close_a_circle(model):
    node = next(n for n in model.graph.node if n.op_type == "MatMul")
    node.input[0] = node.output[0]


def fold_what_does_not_fit(model):
    """A constant Reshape to another number of values before the first matrix product."""
    product = next(n for n in model.graph.node if n.op_type == "MatMul")
    model.graph.initializer.append(numpy_helper.from_array(np.array([7, 11]), "sizes"))
    reshape = helper.make_node("Reshape", [product.input[1], "sizes"], ["misfit"], name="misfit")
    product.input[1] = "misfit"
    model.graph.node.insert(0, reshape)


def insert_a_tanh(model):
    """In the residual stream, where no block has one."""
    node = next(n for n in model.graph.node if n.op_type == "Add" and n.name.endswith("h.1/Add_2"))
    inner = f"{node.output[0]}_inner"
    tanh = helper.make_node("Tanh", [inner], [node.output[0]], name="inserted")
    node.output[0] = inner
    model.graph.node.insert(list(model.graph.node).index(node) + 1, tanh)


def change_the_scale_of_the_scores(model):
    """The same weights, another function."""
    maker = {o: n for n in model.graph.node for o in n.output}
    node = next(n for n in model.graph.node if n.op_type == "Mul" and maker[n.input[0]].op_type == "MatMul"
                and maker[n.input[1]].op_type == "Constant")  # fmt: skip
    value = maker[node.input[1]].attribute[0].t
    value.CopyFrom(numpy_helper.from_array(np.float32(numpy_helper.to_array(value) * 1.02)))


def narrow_the_window(model):
    """The mask of one layer; its cache stays as long as it was."""
    maker = {o: n for n in model.graph.node for o in n.output}
    node = next(n for n in model.graph.node if n.op_type == "Less" and maker[n.input[1]].op_type == "Constant")
    value = maker[node.input[1]].attribute[0].t
    value.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(value) - 1))


@pytest.mark.parametrize(("change", "graph", "named"), [
    (narrow_the_window, "*tokenizer_decode_step.onnx", "layer 0 keeps 25 tokens and compares with 24"),
    (narrow_the_window, "*decode_full.onnx", "context is 24 in decode_full and 25 in codec_decode_step"),
    (change_a_weight, "moss_tts_decode_step.onnx", "prefill and decode_step hold different numbers"),
    (change_a_weight, "moss_tts_local_fixed_sampled_frame.onnx", "other numbers than any tensor"),
    (set_a_nan, "moss_tts_prefill.onnx", "NaN"),
    (drop_an_operand, "moss_tts_prefill.onnx", "has input size 1 not in range [min=2, max=2]"),
    (close_a_circle, "moss_tts_prefill.onnx", "reads what is computed from it"),
    (fold_what_does_not_fit, "moss_tts_prefill.onnx", "Reshape (misfit) on constants cannot be computed"),
    (insert_a_tanh, "moss_tts_prefill.onnx", "Tanh (inserted)"),
    (change_the_scale_of_the_scores, "moss_tts_decode_step.onnx", "the package's graphs and the recovered weights"),
    (change_the_scale_of_the_scores, "*decode_full.onnx", "decode_full: waveform: the package's graphs"),
    (change_the_scale_of_the_scores, "*encode.onnx", "encode: share of frames with other codes"),
])  # fmt: skip
def test_a_package_that_contradicts_itself_or_computes_otherwise_is_refused(package, tmp_path, change, graph, named):
    assert named in refusal(mutated(package, tmp_path / "package", change, graph), tmp_path / "out")


@pytest.mark.parametrize(("missing", "named"), [
    (["moss_audio_tokenizer_encode.onnx"], "no moss_audio_tokenizer_encode.onnx"),
    (["moss_tts_local_decoder.onnx", "moss_tts_local_cached_step.onnx"],
     "neither moss_tts_local_decoder.onnx nor moss_tts_local_cached_step.onnx"),
    (["moss_tts_decode_step.onnx"], "no moss_tts_decode_step.onnx"),
])  # fmt: skip
def test_a_missing_graph_that_is_needed_is_named(package, tmp_path, missing, named):
    shutil.copytree(package, tmp_path / "package")
    remove(tmp_path / "package", missing)
    assert named in refusal(tmp_path / "package", tmp_path / "out")


def remove(package: Path, files: list[str]) -> None:
    for file in files:
        (path,) = package.glob(f"*/{file}")
        path.unlink()


def test_graphs_and_numbers_that_only_repeat_what_others_hold_may_be_missing(package, wanted, tmp_path):
    shutil.copytree(package, tmp_path / "package")
    meta = tmp_path / "package" / CODEC_DIRECTORY / "codec_browser_onnx_meta.json"
    said = json.loads(meta.read_text())
    del said["codec_config"]["downsample_rate"]  # the decoder's patches tell it
    meta.write_text(json.dumps(said))
    files = ["moss_tts_local_decoder.onnx", "moss_tts_local_fixed_sampled_frame.onnx"]
    remove(tmp_path / "package", [*files, "moss_audio_tokenizer_decode_full.onnx"])
    got, record = recovered(tmp_path / "package", tmp_path / "out")
    assert_equal(got, wanted)
    assert sum("is not there" in notice for notice in record["notices"]) == 3
    assert "decode_step: waveform" in record["proof"] and "decode_full: waveform" not in record["proof"]


@pytest.mark.parametrize(("file", "named"), [
    (f"{TTS_DIRECTORY}/moss_tts_global_shared.data", "moss_tts_prefill.onnx"),
    (f"{CODEC_DIRECTORY}/moss_audio_tokenizer_encode.onnx", "moss_audio_tokenizer_encode.onnx"),
])  # fmt: skip
def test_a_file_that_is_cut_short_is_named(package, tmp_path, file, named):
    shutil.copytree(package, tmp_path / "package")
    path = tmp_path / "package" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    error = refusal(tmp_path / "package", tmp_path / "out")
    assert named in error and "download the package again" in error


def test_a_directory_that_holds_something_is_left_alone(package, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "exists and is not empty" in refusal(package, tmp_path / "out")


@pytest.fixture(scope="module")
def spoken(tiny_artifacts, tmp_path_factory) -> Path:
    """The package of the made-up checkpoint that speaks, with a voice and defaults of its own."""
    root = tmp_path_factory.mktemp("spoken")
    graphs = ("prefill", "decode_step", "local_cached_step", "encode", "codec_decode_step")
    model, codec = (tiny_artifacts.parent / "checkpoint" / part for part in ("model", "codec"))
    voices = {"Ava": np.random.default_rng(5).integers(0, 64, (12, 16))}
    path = write_published_package(model, codec, root, voices, graphs) / "browser_poc_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["generation_defaults"] |= {"audio_temperature": 1.1, "audio_top_k": 7, "max_new_frames": 6}
    path.write_text(json.dumps(manifest))
    return root


def test_voices_and_defaults_of_the_package_speak_through_artifacts_of_the_import(spoken, tmp_path):
    runner, checkpoint, artifacts = CliRunner(), tmp_path / "checkpoint", tmp_path / "artifacts"
    result = runner.invoke(cli, ["import-onnx", str(spoken), "--out", str(checkpoint)])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [str(checkpoint / "model"), str(checkpoint / "codec")]
    source = [str(checkpoint / "model"), "--codec", str(checkpoint / "codec"), "--out", str(artifacts)]
    planned = runner.invoke(cli, ["build", *source, "--dry-run"])
    assert planned.exit_code == 0 and "export" in planned.stdout, planned.output
    graphs = ("prefill", "frame", "step_frame", "codec_encode", "codec_stream")
    exported = runner.invoke(cli, ["export", *source, *(word for name in graphs for word in ("--only", name))])
    assert exported.exit_code == 0, exported.output
    manifest = Manifest.load(artifacts)
    assert manifest.made_up and manifest.source["defaults"]["temperature"] == 1.1
    assert manifest.source["imported_package"]["files"]
    codes = []
    for directory, options in ((artifacts, ["--template", "onnx"]), (spoken, ["--as-published"])):
        out = tmp_path / f"{directory.name}.json"
        command = ["say", "--artifacts", str(directory), "--text", "Hello there, you two.", "--seed", "3", *options]
        command += ["--voice", "Ava", "--threads", "1", "--out", str(out.with_suffix(".wav")), "--codes-out", str(out)]
        said = runner.invoke(run_cli, command)
        assert said.exit_code == 0, said.output
        codes.append(json.loads(out.read_text()))
    assert codes[0] == codes[1]


def test_a_voice_whose_name_is_taken_by_another_codecs_voice_stays(tmp_path):
    voice = Voice("Ava", np.ones((3, 16), np.int32), "Ava (built in)", "", "1" * 64, 0.24)
    store, lines = VoiceStore(tmp_path / "voices"), []
    assert store_voices((voice,), store, lines.append) == 1
    assert store_voices((voice,), store, lines.append) == 0 and lines == []
    assert store_voices((dataclasses.replace(voice, codec_id="2" * 64),), store, lines.append) == 0
    assert "Ava exists for another codec" in lines[0] and store.load("Ava").codec_id == voice.codec_id


def test_a_voice_that_the_codec_cannot_read_is_refused(spoken, tmp_path):
    shutil.copytree(spoken, tmp_path / "package")
    path = tmp_path / "package" / TTS_DIRECTORY / "browser_poc_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["builtin_voices"][0]["prompt_audio_codes"].append([64] * 16)
    path.write_text(json.dumps(manifest))
    assert "built-in voice Ava: codes [13, 16]" in refusal(tmp_path / "package", tmp_path / "out")


def test_a_package_in_the_place_of_a_checkpoint_is_recognised(spoken, tmp_path):
    source = str(spoken / TTS_DIRECTORY)
    result = CliRunner().invoke(cli, ["export", source, "--codec", source, "--out", str(tmp_path / "artifacts")])
    assert result.exit_code == 1 and "convert-moss import-onnx" in result.stderr
