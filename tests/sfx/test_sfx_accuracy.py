"""run-om sfx-accuracy: what passes, what fails, and what was not measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from runtime.cli import cli
from runtime.errors import ParityError
from runtime.parity_verdict import Stage, Verdict
from runtime.sfx.accuracy import (
    LIMITS,
    Trace,
    compare_traces,
    compare_waveforms,
    overall,
    trace_rows,
)
from runtime.sfx.config import SfxConfig
from runtime.sfx.sampling import SfxSampling
from runtime.sfx.torch_model import TorchRowModel

ROWS = 40


@pytest.fixture(scope="module")
def reference(model: TorchRowModel, golden: Mapping[str, np.ndarray]) -> Trace:
    return trace_rows(model, golden["ids_0"], golden["gen_greedy"][:ROWS])


def stages_of(
    reference: Trace, other: Trace, golden: Mapping[str, np.ndarray], config: SfxConfig, dtype: str = "float32"
) -> dict[str, Stage]:
    rows = golden["gen_greedy"][:ROWS]
    found = compare_traces(reference, other, golden["ids_0"], rows, config, SfxSampling(), LIMITS[dtype])
    return {s.name: s for s in found}


def test_a_model_against_itself_passes(
    reference: Trace, golden: Mapping[str, np.ndarray], config: SfxConfig
) -> None:  # fmt: skip
    stages = stages_of(reference, reference, golden, config)
    assert len(stages) == 2 + 1 + 16 + 1
    assert {s.verdict for s in stages.values()} == {Verdict.EXACT}
    assert stages["codebook 15"].text.startswith("24 of 24 best candidates")  # it starts 15 rows after codebook 0


@pytest.mark.parametrize("noise", [1e-2, np.nan])
def test_other_hidden_states_fail(
    reference: Trace, golden: Mapping[str, np.ndarray], config: SfxConfig, noise: float
) -> None:
    hidden = reference.hidden.copy()
    hidden[5] += noise * np.arange(16)
    stages = stages_of(reference, dataclasses.replace(reference, hidden=hidden), golden, config)
    assert stages["prefill hidden"].verdict is Verdict.EXACT
    assert stages["step hidden"].verdict is Verdict.DIVERGENT


def test_nan_fails_whatever_the_limits_allow(
    reference: Trace, golden: Mapping[str, np.ndarray], config: SfxConfig
) -> None:  # fmt: skip
    codes = reference.codes.copy()
    codes[20, 3, 5] = np.nan  # one row of 36: within the 5 % that bfloat16 may differ
    stages = stages_of(reference, dataclasses.replace(reference, codes=codes), golden, config, "bfloat16")
    assert stages["codebook 3"].verdict is Verdict.DIVERGENT


def test_another_best_code_fails_its_codebook_and_the_divergence(
    reference: Trace, golden: Mapping[str, np.ndarray], config: SfxConfig
) -> None:
    codes = reference.codes.copy()
    codes[20, 3, np.argsort(codes[20, 3])[-2]] += 10
    stages = stages_of(reference, dataclasses.replace(reference, codes=codes), golden, config)
    assert stages["codebook 3"].verdict is Verdict.DIVERGENT
    assert stages["codebook 4"].verdict is Verdict.EXACT
    assert stages["distributions"].verdict is Verdict.DIVERGENT
    assert stages["codebook 3"].frame == 20 and stages["codebook 3"].codebook == 3


def test_a_close_call_is_counted_and_does_not_fail(
    reference: Trace, golden: Mapping[str, np.ndarray], config: SfxConfig
) -> None:
    close = reference.codes.copy()
    second = np.argsort(close[20, 3])[-2]
    close[20, 3, second] = close[20, 3].max() - 1e-4
    swapped = close.copy()
    swapped[20, 3, second] += 2e-4
    stages = stages_of(
        dataclasses.replace(reference, codes=close), dataclasses.replace(reference, codes=swapped), golden, config
    )
    assert stages["codebook 3"].verdict is Verdict.NEAR_TIE


def test_traces_of_different_length_cannot_be_compared(
    reference: Trace, golden: Mapping[str, np.ndarray], config: SfxConfig
) -> None:
    short = Trace(reference.hidden[1:], reference.slots[1:], reference.codes[1:])
    with pytest.raises(ParityError):
        stages_of(reference, short, golden, config)


def test_the_codec_is_judged_by_its_noise() -> None:
    signal = np.sin(np.arange(4800, dtype=np.float32))[None]
    cases = {1e-6: Verdict.WITHIN_TOLERANCE, 1e-3: Verdict.DIVERGENT, np.nan: Verdict.DIVERGENT, 0.0: Verdict.EXACT}
    for noise, verdict in cases.items():
        assert compare_waveforms(signal, signal + np.float32(noise), 24000, LIMITS["float32"]).verdict is verdict
    assert compare_waveforms(signal, signal[:, 1:], 24000, LIMITS["float32"]).verdict is Verdict.DIVERGENT


def test_nothing_measured_is_not_agreement() -> None:
    not_measured = Stage("a", Verdict.NOT_MEASURED, "")
    assert overall([not_measured]) is Verdict.NOT_MEASURED and overall([not_measured]).exit_code == 2
    assert overall([not_measured, Stage("b", Verdict.EXACT, "")]) is Verdict.EXACT
    assert overall([Stage("c", Verdict.DIVERGENT, ""), Stage("b", Verdict.EXACT, "")]) is Verdict.DIVERGENT


def test_the_command_compares_and_fails_with_exit_code_1(
    tiny_lm: Path, tiny_codec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["sfx-accuracy", "--checkpoint", str(tiny_lm), "--codec", str(tiny_codec), "--seed", "4",
                 "--max-new-tokens", "40", "--dtype", "bfloat16"]  # fmt: skip
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    assert (
        "torch cpu bfloat16 against torch cpu float32" in result.stdout and "verdict: WITHIN_TOLERANCE" in result.stdout
    )
    assert "both run torch cpu" in result.stdout  # the codec was not measured
    monkeypatch.setitem(LIMITS, "bfloat16", LIMITS["float32"])
    result = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert facts["verdict"] == "DIVERGENT" and facts["num_rows"] > 0
