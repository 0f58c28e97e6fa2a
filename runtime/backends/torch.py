"""Graphs as torch modules, eager, on the CPU or an NPU: the same definitions that the ONNX files were exported from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime.errors import BackendError, BackendUnavailableError
from runtime.graphs import LLM_GRAPHS
from runtime.manifest import Manifest
from runtime.spec import Array, GraphSpec
from runtime.weights import WEIGHTS_NAME, map_weights

if TYPE_CHECKING:
    import torch


class TorchBackend:
    """Builds the module of a graph and gives it the weights of the artifacts directory."""

    def __init__(self, manifest: Manifest, device: str = "cpu", threads: int | None = None) -> None:
        manifest.require_float32("backend torch")
        try:
            import torch
        except ImportError as error:
            raise BackendUnavailableError(
                "backend torch needs PyTorch, which is not installed here; run: pip install torch==2.13.0"
            ) from error
        if threads is not None:
            torch.set_num_threads(threads)
        self.manifest, self.device = manifest, torch.device(device)
        self.name = f"torch {device}"
        arrays = map_weights(manifest.path(WEIGHTS_NAME), manifest.weights)
        self._state = {name: torch.from_numpy(np.asarray(a)) for name, a in arrays.items()}

    def open(self, spec: GraphSpec, path: Path) -> TorchSession:
        from runtime.modules.codec import build_codec_module
        from runtime.modules.llm import build_llm_module

        if spec.name in LLM_GRAPHS:
            module = build_llm_module(
                spec.name, self.manifest.model, self._state, self.manifest.limits["max_positions"]
            )
        else:
            module = build_codec_module(spec.name, self.manifest.codec, self._state)
        return TorchSession(spec, module.to(self.device), self.device)


class TorchSession:
    """One graph as a module; feeds and results are NumPy arrays."""

    def __init__(self, spec: GraphSpec, module: torch.nn.Module, device: torch.device) -> None:
        self.spec = spec
        self._module: torch.nn.Module | None = module
        self._device = device

    @property
    def module(self) -> torch.nn.Module:
        """The module itself, for values that no graph outputs."""
        if self._module is None:
            raise BackendError(f"{self.spec.name}: the session is closed; open it again")
        return self._module

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        import torch

        module = self.module
        self.spec.check_feeds(feeds)
        with torch.inference_mode():
            inputs = [torch.from_numpy(np.ascontiguousarray(feeds[t.name])).to(self._device) for t in self.spec.inputs]
            outputs = module(*inputs)
            if isinstance(outputs, torch.Tensor):
                outputs = (outputs,)
            return {t.name: o.cpu().numpy() for t, o in zip(self.spec.outputs, outputs, strict=True)}

    def close(self) -> None:
        self._module = None

    def __enter__(self) -> TorchSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
