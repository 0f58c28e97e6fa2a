"""The one place that turns `--backend NAME` and its options into a backend. It never falls back in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from runtime.backends.base import Backend
from runtime.errors import BackendUnavailableError, MossError
from runtime.manifest import FLOAT32, Manifest

BACKEND_NAMES = ("ort", "torch", "om", "auto")
PROVIDERS = ("cpu", "cann")
Report = Callable[[str], None]
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What the command line says about the backend."""

    name: str = "ort"
    device: str | None = None  # om: "0"; torch: "cpu" or "npu:0"; ort with the CANN provider: "0"
    threads: int | None = None  # of the CPU backends
    provider: str = "cpu"  # of ort
    simulate: bool = False  # om on the simulator
    split: bool = False  # step and frame apart instead of step_frame
    device_graphs: bool = False  # ort: prefill and step_frame as ATC compiles them, not extend (backends/shared.py)
    precision: str | None = None  # which om builds, when there are several


# What `auto` tries, in this order.
_AUTO = {
    "om": BackendOptions(name="om"),
    "torch-npu": BackendOptions(name="torch", device="npu:0"),
    "ort": BackendOptions(name="ort"),
    "torch": BackendOptions(name="torch"),
}


def open_backend(
    name: str,
    manifest: Manifest,
    threads: int | None = None,
    options: BackendOptions | None = None,
    report: Report = LOG.warning,
) -> Backend:
    """The backend called `name`; BackendUnavailableError says what it lacks here.

    `report` gets the lines that a person must see: what `auto` chose and why, and that a result is simulated.
    """
    asked = replace(options or BackendOptions(), name=name)
    if threads is not None:
        asked = replace(asked, threads=threads)
    _refuse_contradictions(asked)
    return _first_that_opens(manifest, asked, report) if name == "auto" else _open(manifest, asked, report)


def _refuse_contradictions(asked: BackendOptions) -> None:
    """An option that the chosen backend would ignore is an error, not a surprise."""
    if asked.name not in BACKEND_NAMES:
        raise BackendUnavailableError(f"no backend {asked.name}; backends: {', '.join(BACKEND_NAMES)}")
    if asked.provider not in PROVIDERS:
        raise BackendUnavailableError(f"no provider {asked.provider}; providers: {', '.join(PROVIDERS)}")
    if asked.simulate and asked.name != "om":
        raise BackendUnavailableError(f"--simulate stands in for an NPU: it needs --backend om, not {asked.name}")
    if asked.provider == "cann" and asked.name != "ort":
        raise BackendUnavailableError(f"--provider cann belongs to --backend ort, not {asked.name}")
    if asked.device_graphs and (asked.name not in ("ort", "auto") or asked.provider == "cann"):
        raise BackendUnavailableError("--device-graphs belongs to --backend ort on the CPU: the others have no choice")
    if asked.precision is not None and asked.name not in ("om", "auto"):
        raise BackendUnavailableError(
            f"--precision chooses between .om builds: it needs --backend om, not {asked.name}"
        )


def _first_that_opens(manifest: Manifest, asked: BackendOptions, report: Report) -> Backend:
    reasons = []
    for label, candidate in _AUTO.items():
        device = asked.device if label == "om" and asked.device else candidate.device
        options = replace(asked, name=candidate.name, device=device)
        try:
            backend = _open(manifest, options, report)
        except MossError as error:
            reasons.append(f"{label}: {error}")
            report(f"backend auto: not {label}: {error}")
            continue
        report(f"backend auto: chose {backend.name}")
        return backend
    raise BackendUnavailableError("backend auto: nothing can run here. " + " | ".join(reasons))


def _open(manifest: Manifest, options: BackendOptions, report: Report) -> Backend:
    if options.name == "om":
        return _open_om(manifest, options, report)
    if options.name == "torch":
        return _open_torch(manifest, options, report)
    if options.provider == "cann":
        from runtime.backends.cann_provider import CannBackend

        manifest.require_float32("--provider cann")
        return CannBackend(device_number(options.device), options.threads)
    if options.device not in (None, "cpu"):
        raise BackendUnavailableError(
            f"--backend ort runs on the CPU, not on {options.device}; for an NPU: --backend om, or --provider cann"
        )
    from runtime.backends.ort import OrtBackend
    from runtime.backends.shared import SharedBackend

    backend = OrtBackend(options.threads)
    if options.split or options.device_graphs or any(name not in manifest.graphs for name in ("extend", "frame")):
        return backend
    if manifest.cpu_weights != FLOAT32:  # a second copy is a quarter as large, one launch per frame the faster way
        return backend
    return SharedBackend(backend, manifest)


def _open_torch(manifest: Manifest, options: BackendOptions, report: Report) -> Backend:
    from runtime.backends.torch import TorchBackend

    device = options.device or "cpu"
    if device.startswith("npu"):
        from runtime.backends.npu import prepare_npu

        report(f"{device}: {prepare_npu(device)}")
    elif device != "cpu":
        raise BackendUnavailableError(f"--backend torch runs on cpu or npu:N, not on {device}")
    return TorchBackend(manifest, device, options.threads)


def _open_om(manifest: Manifest, options: BackendOptions, report: Report) -> Backend:
    from runtime.backends.om import OmBackend

    if options.simulate:
        from runtime.backends.simulator import ensure_installed

        simulated = ensure_installed(
            [(b.soc_version, b.versions.get("cann", b.cann)) for b in manifest.builds if b.fake]
        )
        report(f"simulated: {simulated.soc} with CANN {simulated.cann}, on the CPU; nothing here is a device result")
    return OmBackend(device_number(options.device), manifest, options.precision)


def device_number(device: str | None) -> int:
    """The number in "0" or "npu:0"; 0 when nothing was said."""
    text = (device or "0").removeprefix("npu:")
    if not text.isdigit():
        raise BackendUnavailableError(f"--device {device}: expected a number such as 0")
    return int(text)
