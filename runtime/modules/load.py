"""Give a module its weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from runtime.errors import ManifestError


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Give a module its part of the state, without a copy: graphs share their weights in memory too."""
    missing = [name for name in module.state_dict() if name not in state]
    if missing:
        raise ManifestError(
            f"weights: expected {missing[0]}, got none ({len(missing)} missing); made by another version: export again"
        )
    wanted = {name: state[name] for name in module.state_dict()}
    module.load_state_dict(wanted, strict=True, assign=True)
    return module.eval()
