"""Tiny checkpoints with the real names, ids and layout, and upstream's outputs for them.

MOSS-SoundEffect's tests stand together, export included: all of them need these checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.sfx.config import SfxConfig, read_sfx_config
from runtime.sfx.torch_model import TorchRowModel
from runtime.sfx.weights import SfxWeights
from tests.sfx.tiny import write_codec, write_language_model, write_tokenizer

DATA = Path(__file__).parents[1] / "data" / "sfx"
CASES = json.loads((DATA / "prompt_cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products: a second thread costs more than it brings, most of all when another process wants the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sfx_lm")
    write_language_model(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sfx_codec")
    write_codec(directory)
    return directory


@pytest.fixture(scope="session")
def config(tiny_lm: Path) -> SfxConfig:
    return read_sfx_config(tiny_lm)


@pytest.fixture(scope="session")
def weights(tiny_lm: Path, config: SfxConfig) -> SfxWeights:
    return SfxWeights(tiny_lm, config)


@pytest.fixture(scope="session")
def model(weights: SfxWeights) -> TorchRowModel:
    return TorchRowModel(weights)


@pytest.fixture(scope="session")
def golden() -> Mapping[str, np.ndarray]:
    """Upstream's outputs for the tiny checkpoint (golden_lm.npz) and its prompt rows (golden_prompt.npz)."""
    return dict(np.load(DATA / "golden_lm.npz")) | dict(np.load(DATA / "golden_prompt.npz"))


@pytest.fixture
def raw_config(tiny_lm: Path) -> dict[str, Any]:
    return dict(json.loads((tiny_lm / "config.json").read_text(encoding="utf-8")))


@pytest.fixture
def cases() -> list[dict[str, Any]]:
    return [dict(case) for case in CASES]


@pytest.fixture
def read_prompt(model: TorchRowModel) -> Callable[[np.ndarray], np.ndarray]:
    """The hidden state after a prompt [T, 17]."""

    def read(rows: np.ndarray) -> np.ndarray:
        model.start(1, len(rows) + 8)
        return model.read(rows[None], np.array([len(rows)], np.int32))

    return read
