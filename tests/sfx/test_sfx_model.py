"""The torch modules against upstream's hidden states and logits; the mapped checkpoint and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import BackendUnavailableError, CapacityError, CheckpointError
from runtime.sfx.config import SfxConfig
from runtime.sfx.mapped import INDEX_NAME
from runtime.sfx.torch_model import CHUNK_ROWS, TorchRowModel, open_device
from runtime.sfx.weights import SfxWeights

Golden = Mapping[str, np.ndarray]
TOLERANCE = {"rtol": 0, "atol": 2e-5}  # the golden README's; a NumPy port differs by 9e-6


def test_prefill_and_step_equal_upstream(model: TorchRowModel, golden: Golden, weights: SfxWeights) -> None:
    prompt = golden["ids_0"]
    np.testing.assert_allclose(weights.embeddings().embed(prompt[-4:]), golden["prefill_embeds"], **TOLERANCE)
    model.start(1, 300)
    hidden = model.read(prompt[None], np.array([len(prompt)], np.int32))
    np.testing.assert_allclose(hidden[0], golden["prefill_hidden"], **TOLERANCE)
    np.testing.assert_allclose(model.inside(hidden).codes[0], golden["prefill_audio"][:, :-1], **TOLERANCE)
    np.testing.assert_allclose(model.text(hidden)[0, golden["text_logit_ids"]], golden["prefill_text"], **TOLERANCE)
    hidden = model.read(golden["step_ids"].astype(np.int32)[None, None], np.array([1], np.int32))
    np.testing.assert_allclose(hidden[0], golden["decode_hidden"], **TOLERANCE)
    np.testing.assert_allclose(model.inside(hidden).codes[0], golden["decode_audio"][:, :-1], **TOLERANCE)


def test_slot_logits_are_two_rows_of_the_text_head(
    model: TorchRowModel, golden: Golden, config: SfxConfig, read_prompt: Callable[[np.ndarray], np.ndarray]
) -> None:
    hidden = read_prompt(golden["ids_0"])
    both = model.text(hidden)[:, [config.gen_slot_id, config.delay_slot_id]]
    np.testing.assert_allclose(model.inside(hidden).slots, both, **TOLERANCE)


def test_a_batch_of_unequal_prompts_equals_upstream(model: TorchRowModel, golden: Golden) -> None:
    lengths = np.array([len(golden[f"ids_{i}"]) for i in range(3)], np.int32)
    rows = np.zeros((3, lengths.max(), 17), np.int32)  # any padding will do
    for i, length in enumerate(lengths):
        rows[i, :length] = golden[f"ids_{i}"]
    model.start(3, 300)
    logits = model.inside(model.read(rows, lengths)).codes[:, 0]
    np.testing.assert_allclose(logits, golden["batch_last_audio0_nopos"][:, :-1], **TOLERANCE)


def test_a_prompt_in_chunks_equals_the_prompt_at_once(
    model: TorchRowModel, golden: Golden, monkeypatch: pytest.MonkeyPatch,
    read_prompt: Callable[[np.ndarray], np.ndarray],
) -> None:  # fmt: skip
    assert len(golden["ids_0"]) < CHUNK_ROWS
    whole = read_prompt(golden["ids_0"])
    monkeypatch.setattr(model, "chunk_rows", 64)
    np.testing.assert_allclose(read_prompt(golden["ids_0"]), whole, **TOLERANCE)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 3e-5), ("float16", 5e-7)])  # measured 8.3e-6 and 6.0e-8
def test_half_precision_stays_close_to_float32(
    weights: SfxWeights, golden: Golden, read_prompt: Callable[[np.ndarray], np.ndarray], dtype: str, error: float
) -> None:
    half = TorchRowModel(weights, dtype=dtype)
    assert half.backend_name == f"torch cpu {dtype}"
    half.start(1, 300)
    prompt = golden["ids_0"]
    got, want = half.read(prompt[None], np.array([len(prompt)], np.int32))[0], read_prompt(prompt)[0]
    # Without the planted constant of channel 0, which would hide any error.
    got, want = got[1:].astype(np.float64), want[1:].astype(np.float64)
    assert not np.array_equal(got, want)
    assert 1 - got @ want / np.linalg.norm(got) / np.linalg.norm(want) < error


def test_more_rows_than_asked_for_are_refused(model: TorchRowModel, config: SfxConfig) -> None:
    with pytest.raises(CapacityError, match="max-new-tokens"):
        model.start(1, config.max_positions + 1)
    model.start(1, 10)
    with pytest.raises(CapacityError):
        model.read(np.zeros((1, 11, 17), np.int32), np.array([11], np.int32))


def test_a_sharded_bfloat16_checkpoint_reads_like_one_file(
    tiny_lm: Path, tmp_path: Path, config: SfxConfig, golden: Golden
) -> None:
    tensors = {k: v.to(torch.bfloat16) for k, v in load_file(tiny_lm / "model.safetensors").items()}
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:20], "model-2.safetensors": names[20:]}
    for shard, held in shards.items():
        save_file({n: tensors[n] for n in held}, tmp_path / shard)
    weight_map = {n: shard for shard, held in shards.items() for n in held}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    weights = SfxWeights(tmp_path, config)
    assert weights.dtype == "bfloat16"
    name = "language_model.layers.1.mlp.up_proj.weight"
    assert torch.equal(weights.tensor(name), tensors[name])
    rows = golden["ids_0"][:3]
    want = tensors["language_model.embed_tokens.weight"][rows[:, 0]].float()
    for book in range(16):
        want += tensors[f"emb_ext.{book}.weight"][rows[:, 1 + book]].float()
    np.testing.assert_allclose(weights.embeddings().embed(rows), want.numpy(), rtol=0, atol=1e-6)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors does not exist"):
        SfxWeights(tmp_path, config)


def test_weights_that_do_not_fit_the_config_are_refused(tiny_lm: Path, tmp_path: Path, config: SfxConfig) -> None:
    tensors = load_file(tiny_lm / "model.safetensors")
    spare = tensors.pop("lm_heads.3.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_heads\.3\.weight"):
        SfxWeights(tmp_path, config)
    save_file(tensors | {"lm_heads.3.weight": spare[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected \[1025, 16\], got \[1024, 16\]"):
        SfxWeights(tmp_path, config)
    save_file(tensors | {"lm_heads.3.weight": spare, "talker.weight": spare.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="talker"):
        SfxWeights(tmp_path, config)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x02\0\0\0\0\0\0\0x]"])
def test_a_damaged_file_is_named(tmp_path: Path, config: SfxConfig, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*download it again"):
        SfxWeights(tmp_path, config)


def test_a_cut_file_is_named(tiny_lm: Path, tmp_path: Path, config: SfxConfig) -> None:
    shutil.copy(tiny_lm / "model.safetensors", tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(10_000_000)
    with pytest.raises(CheckpointError, match="does not fit into the file"):
        SfxWeights(tmp_path, config)


def test_a_device_that_is_not_here_says_what_it_needs() -> None:
    with pytest.raises(BackendUnavailableError, match="torch-npu"):
        open_device("npu")
    with pytest.raises(BackendUnavailableError, match="expected cpu, npu or npu:N"):
        open_device("cuda")
