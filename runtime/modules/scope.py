"""Names for the nodes of an exported graph: where a value was computed, in words a reader of ATC's log understands.

Plain torch runs ignore both functions; the tracer (convert/trace.py) reads them. A node is called by the modules it
lies in and its label: `global/layer_03/attention/scores`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

SCOPES: list[str] = []  # the names that are open right now, outermost first


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Open a name for everything computed inside, such as one pass of an unrolled loop."""
    SCOPES.append(name)
    try:
        yield
    finally:
        SCOPES.pop()


def label(x: Tensor, name: str) -> Tensor:
    """Call the value just computed by a name of its own."""
    if has_torch_function((x,)):
        result: Any = handle_torch_function(label, (x,), x, name)
        return result  # type: ignore[no-any-return]  # the handler returns what it was given
    return x
