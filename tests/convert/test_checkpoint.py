"""Opening checkpoints: what is handled, what is refused, and that each is named with file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from convert.checkpoint import examine, open_codec, open_model
from convert.cli import cli
from convert.expected_tensors import expected_codec_tensors, expected_model_tensors, tied_heads
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data"
MODEL, CODEC = DATA / "nano" / "tiny_llm_b", DATA / "nano" / "tiny_codec"
PUBLISHED = DATA / "published"
SHARD = "model-00001-of-00001.safetensors"
LN = "transformer.h.0.ln_1.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model", copy_function=shutil.copyfile))


@pytest.fixture
def codec(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CODEC, tmp_path / "codec", copy_function=shutil.copyfile))


def change(directory: Path, edit: Callable[[Tensors], object], file: str = "model.safetensors") -> None:
    """Rewrite the weights after `edit`, which returns other tensors or changes those it gets."""
    tensors = {name: t.clone() for name, t in load_file(directory / file).items()}
    changed = edit(tensors)
    save_file(
        {n: t.contiguous() for n, t in (changed if isinstance(changed, dict) else tensors).items()}, directory / file
    )


def change_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def refusal(directory: Path, opener: Callable[[Path], object] = open_model) -> str:
    with pytest.raises(CheckpointError) as caught:
        opener(directory)
    return str(caught.value)


def rules(directory: Path) -> set[str]:
    return {finding.rule for finding in examine(directory).findings} - {"tokenizer"}


@pytest.mark.parametrize(("name", "config_type", "expected", "count"), [
    ("llm", ModelConfig, expected_model_tensors, 194), ("codec", CodecConfig, expected_codec_tensors, 374),
])  # fmt: skip
def test_the_expected_tensors_are_the_published_ones(name, config_type, expected, count) -> None:
    published = json.loads((PUBLISHED / f"{name}.json").read_text())
    shapes = expected(config_type.from_dict(published["config"]))
    assert shapes == {n: tuple(s) for n, s in published["tensors"].items()}
    assert len(shapes) == count


@pytest.mark.parametrize(("letter", "count", "dtype"), [("a", 74, "bfloat16"), ("b", 98, "float32")])
def test_tied_heads_are_the_very_embedding_whether_stored_or_not(letter: str, count: int, dtype: str) -> None:
    opened = open_model(DATA / "nano" / f"tiny_llm_{letter}")
    assert len(opened.tensors) == count
    assert opened.storage_dtype == dtype
    assert all(t.dtype == torch.float32 for t in opened.tensors.values())
    for head, embedding in tied_heads(opened.config).items():
        assert opened.tensors[head] is opened.tensors[embedding]
    assert set(opened.files) == {"config.json", "model.safetensors"}
    assert not opened.made_up


def test_every_layout_gives_the_same_tensors(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    parts = {"a": names[::2], "b": names[1::2]}

    def directory(name: str) -> Path:
        (tmp_path / name).mkdir()
        shutil.copyfile(model / "config.json", tmp_path / name / "config.json")
        return tmp_path / name

    one, shards, pickles = directory("bin"), directory("shards"), directory("bins")
    torch.save(tensors, one / "pytorch_model.bin")
    for part, listed in parts.items():
        save_file({n: tensors[n].clone() for n in listed}, shards / f"{part}.safetensors")
        torch.save({n: tensors[n].clone() for n in listed}, pickles / f"{part}.bin")
    for target, index, suffix in ((shards, "model.safetensors", "safetensors"), (pickles, "pytorch_model.bin", "bin")):
        weight_map = {n: f"{part}.{suffix}" for part, listed in parts.items() for n in listed}
        (target / f"{index}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    want = open_model(model).tensors
    for target in (one, shards, pickles):
        got = open_model(target).tensors
        assert list(got) == list(want)
        assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_without_loss(model: Path, dtype: torch.dtype) -> None:
    change(model, lambda tensors: {n: t.to(dtype) for n, t in tensors.items()})
    opened = open_model(model)
    assert opened.storage_dtype == str(dtype).removeprefix("torch.")
    stored = load_file(model / "model.safetensors")
    assert torch.equal(opened.tensors[LN], stored[LN].float())


def test_a_pickle_that_shares_storage_between_tied_tensors_is_tied(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    for head, embedding in tied_heads(open_model(model).config).items():
        tensors[head] = tensors[embedding]
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert examine(model).tied


@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "module._orig_mod."])
def test_a_uniform_tool_prefix_is_taken_off_with_a_notice(model: Path, prefix: str) -> None:
    change(model, lambda tensors: {prefix + n: t for n, t in tensors.items()})
    assert rules(model) == {"prefix"}
    assert LN in open_model(model).tensors


def test_a_prefix_on_some_names_only_is_refused(model: Path) -> None:
    change(model, lambda tensors: {(f"module.{n}" if n == LN else n): t for n, t in tensors.items()})
    message = refusal(model)
    assert f"module.{LN}" in message
    assert "no such tensor" in message


def test_lora_tensors_are_refused_with_the_advice_to_merge(model: Path) -> None:
    change(model, lambda tensors: {f"base_model.model.{n}": t for n, t in tensors.items()}
           | {"base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight": torch.zeros(4, 64)})  # fmt: skip
    message = refusal(model)
    assert "merge" in message
    assert "lora_A" in message
    assert message.count("\n") == 0  # not hundreds of unknown tensors besides


def test_an_adapter_alone_is_refused_and_beside_weights_is_noted(model: Path) -> None:
    shutil.copyfile(model / "model.safetensors", model / "adapter_model.safetensors")
    assert rules(model) == {"adapter"}
    (model / "model.safetensors").unlink()
    assert "merge" in refusal(model)


def test_an_untied_head_is_used_as_it_is(model: Path) -> None:
    change(model, lambda tensors: tensors["audio_lm_heads.3.weight"].add_(1.0))
    opened = open_model(model)
    assert [f.tensor for f in opened.findings if f.rule == "untied"] == ["audio_lm_heads.3.weight"]
    assert not torch.equal(opened.tensors["audio_lm_heads.3.weight"], opened.tensors["audio_embeddings.3.weight"])
    assert opened.tensors["audio_lm_heads.2.weight"] is opened.tensors["audio_embeddings.2.weight"]
    assert examine(model).tied is False


def test_an_absent_head_is_missing_when_the_config_says_untied(model: Path) -> None:
    change(model, lambda tensors: tensors.pop("text_lm_head.weight"))
    open_model(model)
    change_config(model, tie_word_embeddings=False)
    assert "text_lm_head.weight" in refusal(model)


def test_an_embedding_kept_under_the_name_of_its_head_is_found(model: Path) -> None:
    change(model, lambda tensors: tensors.pop("transformer.wte.weight"))
    assert examine(model).tied


def test_the_stray_table_is_left_out_with_a_notice(model: Path) -> None:
    change(model, lambda tensors: tensors | {"local_transformer.wte.weight": torch.zeros(5, 64)})
    assert rules(model) == {"stray"}
    assert "local_transformer.wte.weight" not in open_model(model).tensors


def test_unknown_missing_misshapen_and_nonfinite_are_all_named_at_once(model: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors.pop("transformer.ln_f.bias")
        tensors["transformer.h.9.ln_1.weight"] = torch.zeros(64)
        tensors["transformer.h.1.mlp.fc_in.weight"] = tensors["transformer.h.1.mlp.fc_in.weight"].T
        tensors["audio_embeddings.2.weight"][3, 4] = float("nan")
        tensors["audio_lm_heads.2.weight"] = tensors["audio_embeddings.2.weight"].clone()
        tensors[LN][7] = float("inf")

    change(model, edit)
    message = refusal(model)
    assert "transformer.ln_f.bias: expected [64], the tensor is not there" in message
    assert "model.safetensors: transformer.h.9.ln_1.weight: this model has no such tensor" in message
    assert "expected [160, 64], got [64, 160] (transposed: a Conv1D layout)" in message
    assert "audio_embeddings.2.weight: 1 of 4096 values are not finite, the first is nan at 196" in message
    assert f"{LN}: 1 of 64 values are not finite, the first is inf at 7" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(model: Path, dtype: torch.dtype) -> None:
    change(model, lambda tensors: tensors | {LN: tensors[LN].to(dtype)})
    message = refusal(model)
    assert f"{LN}: expected float32, float16 or bfloat16, got {str(dtype).removeprefix('torch.')}" in message


def test_mixed_dtypes_are_noted(model: Path) -> None:
    change(model, lambda tensors: tensors | {LN: tensors[LN].half()})
    assert rules(model) == {"mixed-dtypes"}
    assert open_model(model).storage_dtype == "mixed"


@pytest.mark.parametrize(("content", "rule"), [
    (b"", "empty-file"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "lfs-pointer"),
    (b"\n<!DOCTYPE html><html><body>404</body></html>", "html"),
    (b"\xff\xff\xff\xff\xff\xff\xff\x7f" + b"x" * 100, "truncated"),
    (b"\x08\0\0\0\0\0\0\0notjson!", "unreadable"),
])  # fmt: skip
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.model", "config.json"])
def test_what_is_not_data_is_named(model: Path, file: str, content: bytes, rule: str) -> None:
    (model / file).write_bytes(content)
    if file != "model.safetensors" and rule in ("truncated", "unreadable"):
        rule = {"tokenizer.model": "tokenizer", "config.json": "config"}[file]
    findings = [f for f in examine(model).findings if f.blocks]
    assert [(f.rule, f.file) for f in findings] == [(rule, file)]
    assert refusal(model).count("\n") == 0


@pytest.mark.parametrize("keep", [5, 3000, -1])
def test_a_cut_off_safetensors_file_is_refused_with_both_sizes(model: Path, keep: int) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    message = refusal(model)
    assert "model.safetensors" in message
    if keep == -1:
        assert f"expected {len(whole)} bytes, got {len(whole) - 1}" in message


@pytest.mark.parametrize("keep", [0.1, 0.6, 0.999])
def test_a_cut_off_pickle_is_refused(model: Path, keep: float) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    whole = (model / "pytorch_model.bin").read_bytes()
    (model / "pytorch_model.bin").write_bytes(whole[: int(len(whole) * keep)])
    assert "pytorch_model.bin" in refusal(model)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("ran"),))


def test_code_in_a_pickle_is_refused_and_never_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    torch.save({"x": _Evil()}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert "code in a checkpoint is never run" in refusal(model)
    assert not (model / "ran").exists()


def test_a_trainer_checkpoint_is_refused(model: Path) -> None:
    torch.save({"state_dict": {LN: torch.zeros(64)}, "epoch": 3}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    message = refusal(model)
    assert "state_dict" in message
    assert "expected a tensor, got dict" in message


def test_missing_shards_and_wrong_indexes_are_named(codec: Path) -> None:
    index = codec / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first = next(iter(listed["weight_map"]))
    for shard, words in (("gone.safetensors", "does not exist"), ("../x.safetensors", "not a file beside the index")):
        index.write_text(json.dumps({"weight_map": listed["weight_map"] | {first: shard}}))
        message = refusal(codec, open_codec)
        assert shard in message
        assert words in message
    index.write_text(json.dumps({"weight_map": listed["weight_map"] | {"ghost": SHARD}}))
    assert f"{SHARD}: ghost: the index lists this tensor here and the file lacks it" in refusal(codec, open_codec)
    index.write_text("[]")
    assert "weight_map" in refusal(codec, open_codec)


def test_a_tensor_in_two_shards_is_refused(codec: Path) -> None:
    index = codec / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    name = "encoder.1.input_proj.weight"
    save_file({name: load_file(codec / SHARD)[name], "other": torch.zeros(1)}, codec / "second.safetensors")
    index.write_text(json.dumps({"weight_map": listed | {"other": "second.safetensors"}}))
    assert f"second.safetensors: {name}: {SHARD} holds the same tensor" in refusal(codec, open_codec)


def test_a_tensor_that_the_index_forgot_is_read_with_a_notice(codec: Path) -> None:
    index = codec / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    forgotten = "encoder.1.input_proj.weight"
    index.write_text(json.dumps({"weight_map": {n: s for n, s in listed.items() if n != forgotten}}))
    opened = open_codec(codec)
    assert [(f.rule, f.tensor) for f in opened.findings] == [("not-in-index", forgotten)]
    assert forgotten in opened.tensors


def test_of_two_layouts_the_safetensors_file_is_read_with_a_notice(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    torch.save({n: t + 1 for n, t in tensors.items()}, model / "pytorch_model.bin")
    assert rules(model) == {"two-layouts"}
    assert torch.equal(open_model(model).tensors[LN], tensors[LN])


def test_older_codec_names_are_read(codec: Path) -> None:
    older = (
        (".parametrizations.weight.original0", ".weight_g"), (".parametrizations.weight.original1", ".weight_v"),
        ("encoder.1.transformer.layers.0.self_attn.in_proj.weight",
         "encoder.1.transformer.layers.0.self_attn.in_proj_weight"),
        ("self_attn.in_proj.weight", "self_attn.in_projs.0.weight"),
        ("self_attn.out_proj.weight", "self_attn.out_projs.0.weight"),
        ("ffn.0.weight", "linear1.weight"), ("ffn.2.weight", "linear2.weight"),
    )  # fmt: skip

    def rename(tensors: Tensors) -> Tensors:
        for new, old in older:
            tensors = {n.replace(new, old): t for n, t in tensors.items()}
        return tensors

    want = open_codec(codec).tensors
    change(codec, rename, SHARD)
    names = sorted(load_file(codec / SHARD))
    (codec / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, SHARD)}))
    got = open_codec(codec)
    assert {f.rule for f in got.findings} == {"older-name"}
    assert all(torch.equal(got.tensors[n], want[n]) for n in want)


def test_a_codec_config_that_contradicts_itself_is_refused(codec: Path) -> None:
    raw = json.loads((codec / "config.json").read_text())
    rate, quantizer = raw["sampling_rate"], raw["quantizer_kwargs"]
    change_config(codec, sample_rate=rate + 1, quantizer_kwargs=quantizer | {"output_dim": quantizer["input_dim"] + 1})
    message = refusal(codec, open_codec)
    assert f"sample_rate {rate + 1} and sampling_rate {rate} differ" in message
    assert f"output_dim differs from input_dim {quantizer['input_dim']}" in message


def test_a_tensor_under_two_names_is_refused(codec: Path) -> None:
    name = "quantizer.input_proj.parametrizations.weight.original0"
    change(codec, lambda t: t | {"quantizer.input_proj.weight_g": t[name].clone()}, SHARD)
    assert f"{name} is here under two names" in refusal(codec, open_codec)


def test_a_weight_norm_direction_of_zero_is_refused(codec: Path) -> None:
    name = "quantizer.output_proj.parametrizations.weight.original1"
    change(codec, lambda tensors: tensors[name][2].zero_(), SHARD)
    assert f"{name}: a row of this weight-norm direction is zero" in refusal(codec, open_codec)


def test_a_24_khz_codec_gets_the_identity_where_it_has_no_projection(codec: Path) -> None:
    raw = json.loads((codec / "config.json").read_text())
    stage = raw["decoder_kwargs"][1]
    stage["input_dimension"] = stage["d_model"] = raw["encoder_kwargs"][1]["d_model"]
    name = "decoder.1.input_proj.weight"
    kwargs, width = raw["quantizer_kwargs"], stage["d_model"] * raw["decoder_kwargs"][0]["patch_size"]
    kwargs["input_dim"] = kwargs["output_dim"] = raw["code_dim"] = width
    raw["encoder_kwargs"][-2]["output_dimension"] = width // raw["encoder_kwargs"][-1]["patch_size"]
    shapes = expected_codec_tensors(CodecConfig.from_dict(raw))
    tensors = {n: torch.ones(s) for n, s in shapes.items() if n != name}
    save_file(tensors, codec / SHARD)
    (codec / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SHARD)}))
    for model_type, usable in (("speech_tokenizer", True), ("moss-audio-tokenizer", False)):
        (codec / "config.json").write_text(json.dumps(raw | {"model_type": model_type}))
        if usable:
            assert torch.equal(open_codec(codec).tensors[name], torch.eye(stage["d_model"]))
        else:
            assert name in refusal(codec, open_codec)


def test_a_missing_pad_token_is_noted_and_another_one_is_kept(model: Path) -> None:
    change_config(model, pad_token_id=2)
    assert open_model(model).config.pad_id == 2
    change_config(model, pad_token_id=None)
    opened = open_model(model)
    assert opened.config.pad_id == 3
    assert [f.rule for f in opened.findings if f.rule != "tokenizer"] == ["pad-token"]


@pytest.mark.parametrize(("fields", "words"), [
    ({"im_start_token_id": 512}, "im_start_id 512 lies outside the vocabulary of 512"),
    ({"audio_end_token_id": 9}, "both 9"),
    ({"audio_pad_token_id": 63}, "audio_pad_token_id 63 is a code"),
    ({"local_transformer_layers": 3}, "local_transformer.h.2.ln_1.weight"),
    ({"n_vq": 8}, "16 codebook sizes for n_vq = 8"),
    ({"n_vq": None}, "field n_vq is missing"),
    ({"pad_token_id": "three"}, "pad_token_id"),
    ({"gpt2_config": [1]}, "wrong type"),
    ({"model_type": "llama"}, "expected model_type moss_tts_nano, got 'llama'"),
])  # fmt: skip
def test_a_config_that_cannot_be_is_refused(model: Path, fields: dict[str, object], words: str) -> None:
    change_config(model, **fields)
    assert words in refusal(model)


def test_a_config_that_says_something_twice_is_noted(model: Path) -> None:
    change_config(model, hidden_size=99)
    assert rules(model) == {"config-twice"}


def test_the_other_checkpoint_is_refused_by_its_model_type(model: Path, codec: Path) -> None:
    assert "two checkpoints" in refusal(model, open_codec)
    assert "two checkpoints" in refusal(codec)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(model: Path) -> None:
    shutil.copyfile(DATA / "tokenizer" / "tokenizer.model", model / "tokenizer.model")
    assert "16384 pieces for a vocabulary of 512" in refusal(model)


def test_sources_that_are_no_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(tmp_path / "file")
    assert "no such directory" in refusal(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="run: convert-moss fetch"):
        open_model("nobody/has-this")


def test_doctor_prints_what_it_found_and_its_exit_code(model: Path) -> None:
    good = CliRunner().invoke(cli, ["doctor", str(model)])
    assert good.exit_code == 0
    assert "language model, 3 global and 2 local blocks of width 64" in good.output
    assert good.output.rstrip().endswith("usable")
    change(model, lambda tensors: tensors.pop(LN))
    bad = CliRunner().invoke(cli, ["doctor", str(model), "--json"])
    assert bad.exit_code == 1
    facts = json.loads(bad.output)
    assert facts["usable"] is False
    assert [f["tensor"] for f in facts["findings"] if f["severity"] == "blocks"] == [LN]
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == 2
