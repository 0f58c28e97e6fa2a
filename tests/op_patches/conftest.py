"""`lower`: run the lowerings on a graph in ONNX text and hold every promise that each of them makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper

from op_patches.evaluate import run_replacement
from op_patches.pipeline import Options, apply_lowerings
from op_patches.report import LoweringReport
from op_patches.targets import Target

Feeds = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Lowered:
    model: ModelProto
    report: LoweringReport

    @property
    def ops(self) -> list[str]:
        return [node.op_type for node in self.model.graph.node]

    def count(self, rule: str) -> int:
        return self.report.rule(rule).count

    def refusal(self, rule: str) -> str:
        """The only reason that a rule gave for leaving a node alone."""
        (refused,) = self.report.rule(rule).refused
        return refused.reason


def parse(graph: str, opset: int = 17, domains: str = "", ir_version: int = 9) -> ModelProto:
    """A model from ONNX text; `domains` adds imports such as '"com.microsoft": 1'."""
    imports = f'"": {opset}' + (f", {domains}" if domains else "")
    model = onnx.parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{imports}]> {graph}")
    assert isinstance(model, ModelProto)
    return model


def random_feeds(model: ModelProto, seed: int = 0, axes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Normal numbers, small integers, and coins; open axes become 3, 4, … unless `axes` says otherwise."""
    rng = np.random.default_rng(seed)
    known = dict(axes or {})
    feeds: dict[str, Any] = {}
    for info in model.graph.input:
        kind = info.type.tensor_type
        shape = [d.dim_value or known.setdefault(d.dim_param, 3 + len(known)) for d in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype == np.bool_:
            feeds[info.name] = rng.random(shape) < 0.5
        elif dtype.kind in "iu":
            feeds[info.name] = rng.integers(0, 3, shape).astype(dtype)
        else:
            feeds[info.name] = np.asarray(rng.standard_normal(shape)).astype(dtype)
    return feeds


@pytest.fixture
def lower() -> Callable[..., Lowered]:
    def run(
        graph: str | ModelProto,
        target: str = "910B4",
        *,
        opset: int = 17,
        domains: str = "",
        feeds: Feeds | None = None,
        compare: bool = True,
        rtol: float = 2e-5,
        input_shapes: Mapping[str, list[int]] | None = None,
        **options: str,
    ) -> Lowered:
        model = parse(graph, opset, domains) if isinstance(graph, str) else graph
        before = model.SerializeToString()
        chosen = Target.parse(target)
        patched, report = apply_lowerings(model, chosen, input_shapes=input_shapes, options=Options(**options))
        assert model.SerializeToString() == before, "the input was touched"
        if not input_shapes:
            assert list(patched.graph.input) == list(model.graph.input)
            assert list(patched.graph.output) == list(model.graph.output)
        again, second = apply_lowerings(patched, chosen, options=Options(**options))
        assert not second.changed, f"a second run changed {second.counts}"
        assert again.SerializeToString() == patched.SerializeToString()
        names = [node.name for node in patched.graph.node]
        assert all(names) and len(set(names)) == len(names)
        if compare:
            axes = {"B": 2}
            inputs = feeds or random_feeds(patched if input_shapes else model, axes=axes)
            for want, got in zip(run_replacement(model, inputs), run_replacement(patched, inputs), strict=True):
                assert want.dtype == got.dtype
                finite = want[np.isfinite(want)].astype(np.float64) if want.dtype.kind == "f" else np.ones(1)
                scale = float(np.abs(finite).max(initial=1.0))
                np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * scale)
        return Lowered(patched, report)

    return run
