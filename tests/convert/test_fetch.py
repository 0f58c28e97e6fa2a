"""Fetching: from a cache that stands for the hub's, and from a hub that is replaced at its boundary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from convert.checkpoint import open_model
from convert.cli import cli
from convert.hub_cache import DEFAULT_CODEC_ID, DEFAULT_MODEL_ID

NANO = Path(__file__).parents[1] / "data" / "nano"
TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer" / "tokenizer.model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> dict[str, Path]:
    """What the two repositories hold, code included."""
    model, codec = tmp_path / "hub" / "model", tmp_path / "hub" / "codec"
    shutil.copytree(NANO / "tiny_llm_a", model, copy_function=shutil.copyfile)
    shutil.copytree(NANO / "tiny_codec", codec, copy_function=shutil.copyfile)
    shutil.copyfile(TOKENIZER, model / "tokenizer.model")
    for directory in (model, codec):
        (directory / "modeling_moss.py").write_text("raise SystemExit('code ran')")
    return {DEFAULT_MODEL_ID: model, DEFAULT_CODEC_ID: codec}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def snapshot(cache: Path, repository: str) -> Path:
    return cache / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT


def fill(cache: Path, hub: dict[str, Path]) -> None:
    for repository, source in hub.items():
        target = snapshot(cache, repository)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.py"), copy_function=shutil.copyfile)
        (target.parents[1] / "refs").mkdir()
        (target.parents[1] / "refs" / "main").write_text(COMMIT)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["fetch", *arguments])


def test_a_filled_cache_is_enough_offline(cache: Path, hub: dict[str, Path], tmp_path: Path) -> None:
    fill(cache, hub)
    result = run("--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    copied = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert copied == {
        "model/config.json", "model/model.safetensors", "model/tokenizer.model",
        "codec/config.json", f"codec/{INDEX}", f"codec/{SHARD}",
    }  # fmt: skip
    assert open_model(DEFAULT_MODEL_ID).directory == snapshot(cache, DEFAULT_MODEL_ID)
    assert open_model(tmp_path / "out" / "model").files == open_model(DEFAULT_MODEL_ID).files


@pytest.mark.parametrize(("repository", "gone"), [
    (DEFAULT_MODEL_ID, "tokenizer.model"), (DEFAULT_MODEL_ID, "config.json"), (DEFAULT_CODEC_ID, SHARD),
])  # fmt: skip
def test_offline_exactly_the_missing_file_is_named(
    cache: Path, hub: dict[str, Path], repository: str, gone: str
) -> None:
    fill(cache, hub)
    (snapshot(cache, repository) / gone).unlink()
    result = run()
    assert result.exit_code == 1
    assert f"{repository}: offline, and the cache {cache} lacks {gone}; unset HF_HUB_OFFLINE" in result.output


def test_an_empty_cache_lacks_what_is_published(cache: Path) -> None:
    result = run()
    assert result.exit_code == 1
    assert "lacks config.json, tokenizer.model, pytorch_model.bin;" in result.output


def online(monkeypatch: pytest.MonkeyPatch, cache: Path, hub: dict[str, Path], breaks_at: int = 99) -> list[str]:
    """Replace the hub: the files come from `hub`; the download with number `breaks_at` fails."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked: list[str] = []

    def model_info(self: object, repository: str) -> SimpleNamespace:
        names = [SimpleNamespace(rfilename=p.name) for p in hub[repository].iterdir()]
        return SimpleNamespace(sha=COMMIT, siblings=names)

    def download(repository: str, name: str, revision: str) -> str:
        assert revision == COMMIT
        asked.append(name)
        if len(asked) == breaks_at:
            raise httpx.ConnectError("[Errno 101] Network is unreachable\nmore lines")
        target = snapshot(cache, repository) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(hub[repository] / name, target)
        return str(target)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_online_only_the_needed_files_come_and_the_cache_serves_offline_afterwards(
    cache: Path, hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = online(monkeypatch, cache, hub)
    assert run().exit_code == 0
    assert set(asked) == {"config.json", "model.safetensors", "tokenizer.model", INDEX, SHARD}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run().exit_code == 0
    assert open_model(DEFAULT_MODEL_ID).storage_dtype == "bfloat16"


def test_a_broken_network_is_one_line_and_the_next_run_goes_on(
    cache: Path, hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    online(monkeypatch, cache, hub, breaks_at=2)
    result = run()
    assert result.exit_code == 1
    last = result.output.strip().splitlines()[-1]
    assert last.startswith(
        f"error: {DEFAULT_MODEL_ID}: the download did not finish ([Errno 101] Network is unreachable)"
    )
    assert "Traceback" not in result.output
    online(monkeypatch, cache, hub)
    assert run().exit_code == 0


def test_a_repository_without_weights_is_refused(
    cache: Path, hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub[DEFAULT_CODEC_ID] / INDEX).unlink()
    online(monkeypatch, cache, hub)
    result = run()
    assert result.exit_code == 1
    assert f"the repository lacks {INDEX}" in result.output


def test_a_damaged_index_is_refused(cache: Path, hub: dict[str, Path]) -> None:
    (hub[DEFAULT_CODEC_ID] / INDEX).write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    fill(cache, hub)
    result = run()
    assert result.exit_code == 1
    assert "the index is damaged" in result.output


def test_a_name_that_is_no_hub_id_is_refused(cache: Path) -> None:
    result = run("--model", "not an id")
    assert result.exit_code == 1
    assert "expected a hub id of the form owner/name" in result.output
