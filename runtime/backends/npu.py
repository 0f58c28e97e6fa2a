"""PyTorch on an NPU: import torch_npu, set what parity needs, say which versions run (ATC_AND_ACL.md F).

Settings for float32 that equals the CPU: HF32 off for convolutions, products and aclnn (it is on for convolutions by
default), kernels from the installed binaries instead of online compilation, no private tensor formats, deterministic
kernels. An operator that the NPU lacks must be an error and not a silent run on the CPU, so
TORCH_NPU_FALLBACK_CPU_DISABLE is set to 1 unless the environment says otherwise.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from typing import Any

from runtime.errors import BackendUnavailableError

LOG = logging.getLogger(__name__)

# torch-npu release -> CANN release (Ascend/pytorch COMPATIBILITY.en.md); the newest build of each torch line.
CANN_FOR_TORCH_NPU = {
    "2.9.0": "8.5.0",
    "2.8.0": "8.3.RC1",
    "2.7.1": "8.3.RC1",
    "2.6.0": "8.2.RC1",
    "2.5.1": "8.1.RC1",
    "2.4.0": "8.0.0",
}


@dataclass(frozen=True, slots=True)
class NpuVersions:
    """What runs, for the stats and the reports."""

    torch: str
    torch_npu: str
    cann: str
    device: str  # name of the chip

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, torch-npu {self.torch_npu}, CANN {self.cann}"


def prepare_npu(device: str) -> NpuVersions:
    """Make `device` ("npu:0") usable for float32 parity; BackendUnavailableError says what to install or source."""
    os.environ.setdefault("TORCH_NPU_FALLBACK_CPU_DISABLE", "1")
    torch_npu, torch = _import_torch_npu()
    if not torch.npu.is_available():
        raise BackendUnavailableError(
            f"torch-npu {torch_npu.__version__} is installed, but no NPU is visible: check npu-smi info, the device "
            "mounts of the container (/dev/davinci0, /dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc), "
            "ASCEND_RT_VISIBLE_DEVICES, and that set_env.sh of CANN was sourced before Python started"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= torch.npu.device_count():
        raise BackendUnavailableError(f"{device}: this machine shows {torch.npu.device_count()} NPUs")
    torch.npu.set_device(index)
    torch.npu.conv.allow_hf32 = False
    torch.npu.matmul.allow_hf32 = False
    if hasattr(torch.npu, "aclnn"):  # younger than the two above
        torch.npu.aclnn.allow_hf32 = False
    torch_npu.npu.set_compile_mode(jit_compile=False)
    torch.npu.config.allow_internal_format = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    versions = NpuVersions(
        str(torch.__version__),
        str(torch_npu.__version__),
        _cann_version(torch_npu),
        str(torch.npu.get_device_name(index)),
    )
    LOG.info("%s: %s", device, versions)
    return versions


def _import_torch_npu() -> tuple[Any, Any]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise BackendUnavailableError(
            "torch on NPU needs PyTorch and torch-npu; run: pip install 'moss-tts-nano-ascend[npu]' with the CPU "
            "build of torch, and source set_env.sh of CANN"
        ) from error
    try:
        return importlib.import_module("torch_npu"), torch
    except ImportError as error:
        version = str(torch.__version__).partition("+")[0]
        cann = CANN_FOR_TORCH_NPU.get(version)
        pair = f" (it pairs with CANN {cann})" if cann else " (its release notes name the CANN that it pairs with)"
        raise BackendUnavailableError(
            f"torch-npu cannot be imported ({error}). For the installed torch {torch.__version__} run: "
            f"pip install torch-npu=={version}{pair}, and source set_env.sh of CANN before Python starts"
        ) from error


def _cann_version(torch_npu: Any) -> str:
    """The CANN release, where this torch_npu can tell."""
    utils = getattr(torch_npu.npu, "utils", None)
    found = getattr(utils, "get_cann_version", None)
    return str(found()) if found is not None else "unknown"
