"""Fixtures that several rooms share: artifacts exported once per session from the small golden checkpoints."""

from __future__ import annotations

import os

# The matrices of the tests are small: OpenBLAS's second thread waits for the first, seven times slower when others run.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"
NANO = DATA / "nano"


@dataclass(frozen=True)
class GoldenLlm:
    """One small checkpoint: its exported language-model graphs, and what upstream computed."""

    manifest: object  # runtime.manifest.Manifest
    golden: dict[str, np.ndarray]


def pytest_report_header() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "onnx", "onnxruntime", "numpy"))


def export_llm(letter: str, directory: Path):
    """Export the four language-model graphs of tiny_llm_<letter>; the codec's config is only there to be named."""
    import json

    from convert.checkpoint import open_model
    from convert.export import _write_weights, export_graph
    from runtime.config import CodecConfig
    from runtime.graphs import LLM_GRAPHS, graph_specs
    from runtime.manifest import Manifest
    from runtime.modules.llm import build_llm_module
    from runtime.modules.llm_state import derive_llm_state

    model = open_model(NANO / f"tiny_llm_{letter}")
    codec = CodecConfig.from_dict(json.loads((NANO / "tiny_codec" / "config.json").read_text()))
    state = derive_llm_state(model.config, model.tensors, 512)
    weights = _write_weights(directory, state)
    specs = graph_specs(model.config, codec)
    graphs = {
        name: export_graph(
            specs[name], build_llm_module(name, model.config, state, 512), directory, weights, model.config, codec
        )
        for name in LLM_GRAPHS
    }
    manifest = Manifest(
        directory=directory,
        name=f"tiny_llm_{letter}",
        made_up=True,
        source={},
        model=model.config,
        codec=codec,
        limits={"max_positions": 512, "top_k_max": 50},
        graphs=graphs,
        data_files={},
        weights=weights,
        versions={},
    )
    manifest.save()
    return manifest


@pytest.fixture(scope="session", params=["a", "b"])
def golden_llm(request, tmp_path_factory) -> GoldenLlm:
    directory = tmp_path_factory.mktemp(f"tiny_llm_{request.param}")
    manifest = export_llm(request.param, directory)
    with np.load(NANO / f"tiny_llm_{request.param}.npz") as golden:
        return GoldenLlm(manifest, dict(golden))


@pytest.fixture(scope="session")
def tiny_artifacts(tmp_path_factory):
    """All graphs of the tiny made-up checkpoint (seed 0), exported once; shared, so nobody may change the files."""
    from convert.export import export_artifacts
    from convert.fixture import write_fixture

    root = tmp_path_factory.mktemp("tiny")
    model, codec = write_fixture(root / "checkpoint", size="tiny", seed=0)
    return export_artifacts(model, codec, root / "artifacts").directory


@pytest.fixture(scope="session")
def tiny_package(tiny_artifacts, tmp_path_factory):
    """The checkpoint of `tiny_artifacts` as convert-moss write-package writes it; shared like the artifacts."""
    from click.testing import CliRunner

    from convert.cli import cli

    root = tmp_path_factory.mktemp("tiny_package")
    model, codec = (str(tiny_artifacts.parent / "checkpoint" / part) for part in ("model", "codec"))
    written = CliRunner().invoke(cli, ["write-package", model, "--codec", codec, "--out", str(root)])
    assert written.exit_code == 0, written.output
    return root
