"""Give a module its weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Give a module its part of the state, without a copy: graphs share their weights in memory too."""
    wanted = {name: state[name] for name in module.state_dict()}
    module.load_state_dict(wanted, strict=True, assign=True)
    return module.eval()
