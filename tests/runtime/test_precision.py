"""The precision floor and the search, on small models; judging a side by its floor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from convert.atc_keep import KeepList
from op_patches.precision import Keep, Mode, NodeRange
from op_patches.reduced_artifacts import ReducedArtifacts
from op_patches.targets import Target
from runtime.backends.ort import OrtBackend
from runtime.cli import cli
from runtime.frame_model import HostFrameModel
from runtime.manifest import Manifest
from runtime.parity_record import GREEDY, Plan, Recording, run_frames
from runtime.precision import SEARCH_GRAPHS, Loudest, Search, loudest_nodes, replay_agreement, search_keep

FRAMES = 10


def run_om(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def floor(tiny_artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report directory of a float16 floor."""
    out = tmp_path_factory.mktemp("floor")
    result = run_om("precision", tiny_artifacts, "--mode", "fp16", "--frames", FRAMES, "--threads", 1, "--report", out)
    assert result.exit_code == 0, result.output
    assert "the best that fp16 can reach" in result.stdout and "of the codes in replay" in result.stdout
    return out


@pytest.fixture(scope="module")
def rounded(tiny_artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts that behave like a float16 build."""
    directory = tmp_path_factory.mktemp("rounded")
    names = ("prefill", "frame", "step_frame", "codec_encode", "codec_stream")
    manifest = Manifest.load(tiny_artifacts)
    ReducedArtifacts(manifest, directory, Mode.FP16, Target(precision="fp16"), names).write().save()
    return directory


def parity(a: Path, b: Path, *options: object) -> Result:
    return run_om("parity", "--a", "ort", "--b", "ort", "--artifacts-a", a, "--artifacts-b", b, "--threads", 1,
                  "--text", "Hello.", "--frames", FRAMES, *options)  # fmt: skip


def test_the_floor_reports_codes_margins_sound_and_the_loudest_nodes(floor: Path) -> None:
    data = json.loads((floor / "precision.json").read_text())
    assert data["mode"] == "fp16" and 0.9 < data["code_agreement"] <= 1
    assert 20 < float(data["parity"]["audio"]["snr_db"]) < 90
    assert data["margins"]["of_choices"] == FRAMES * 16 and data["margins"]["largest_logit_error"] > 1e-4
    assert data["first_overflow"] is None and data["loudest"][0]["largest"] > 1000
    hidden = next(s for s in data["parity"]["stages"] if s["name"] == "step hidden")
    assert 1e-4 < float(hidden["metrics"]["relative"]) < 2e-2  # float16, not float32 and not noise
    page = (floor / "precision.html").read_text()
    assert page.index("the best that fp16 can reach") < page.index("<table") and "No Ascend device took part" in page


def test_a_float16_side_fails_against_float32_and_passes_against_its_floor(
    tiny_artifacts: Path, rounded: Path, floor: Path
) -> None:
    plain = parity(tiny_artifacts, rounded)
    assert plain.exit_code == 1, plain.output
    assert "reduced precision (float16" in plain.stdout or "different weights" in plain.stdout
    judged = parity(tiny_artifacts, rounded, "--floor", floor / "precision.json")
    assert judged.exit_code == 0, judged.output
    assert "the precision floor" in judged.stdout


def test_a_floor_does_not_excuse_what_is_worse_than_it(tiny_artifacts: Path, floor: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(tiny_artifacts)
    names = ("prefill", "frame", "step_frame", "codec_encode", "codec_stream")
    ReducedArtifacts(manifest, tmp_path, Mode.BF16, Target(precision="mixed_bfloat16"), names).write().save()
    assert parity(tiny_artifacts, tmp_path, "--floor", floor / "precision.json").exit_code == 1


def test_an_overflow_is_the_conclusion() -> None:
    ranges = {
        "prefill": [NodeRange("a", "Mul", 10.0, False), NodeRange("b", "Mul", 1e6, False)],
        "frame": [NodeRange("c", "Add", float("inf"), True)],
    }
    first, loudest = loudest_nodes(ranges)
    assert first == Loudest("prefill", "b", "Mul", 1e6, True)
    assert [x.node for x in loudest] == ["c", "b", "a"]


# -- the search


NODES = {"MatMul": {f"m{i}" for i in range(8)}, "Softmax": {"s0", "s1"}, "Add": {f"a{i}" for i in range(20)}}
TYPE_OF = {name: op_type for op_type, names in NODES.items() for name in names}


def needs(*needed: str):
    """Agreement 1 when all of `needed` are kept, 0.9 else."""

    def evaluate(names: frozenset[str], types: frozenset[str]) -> float:
        return 1.0 if all(n in names or TYPE_OF[n] in types for n in needed) else 0.9

    return evaluate


def test_nothing_is_kept_where_nothing_is_needed() -> None:
    found = search_keep(NODES, lambda names, types: 0.995, 0.99, 50)
    assert (found.op_types, found.names, found.evaluations) == ((), (), 1) and found.complete


@pytest.mark.parametrize("needed", [("m3",), ("m0", "m7"), ("s0", "a4"), ("m1", "s1", "a19")])
def test_the_search_finds_exactly_the_nodes_that_are_needed(needed: tuple[str, ...]) -> None:
    found = search_keep(NODES, needs(*needed), 1.0, 500)
    assert set(found.names) == set(needed) and found.op_types == ()
    assert (found.agreement, found.agreement_without, found.num_nodes, found.of_nodes) == (1.0, 0.9, len(needed), 30)
    assert found.complete


def test_a_type_that_is_needed_as_a_whole_is_named_as_a_type() -> None:
    found = search_keep(NODES, needs("s0", "s1"), 1.0, 500)
    assert found.op_types == ("Softmax",) and found.names == () and found.num_nodes == 2


def test_a_search_that_is_cut_off_says_so_and_still_reaches() -> None:
    found = search_keep(NODES, needs("a4", "m3"), 1.0, 7)
    assert not found.complete and found.agreement == 1.0 and found.evaluations <= 8


def test_the_search_mends_a_bfloat16_model(golden_llm, tmp_path: Path) -> None:
    manifest, rows = golden_llm.manifest, golden_llm.golden["prompt_input_ids"].astype(np.int32)
    model = HostFrameModel(manifest, OrtBackend(1))
    codes = run_frames(model, rows, GREEDY, 0, 24, past_end=True).codes
    trace = run_frames(model, rows, GREEDY, 0, 24, codes)
    reference = Recording(None, Plan("x", frames=24), 48000, rows[:, 0], rows, {"replay": trace}, rows, codes)  # type: ignore[arg-type]
    reduced = ReducedArtifacts(manifest, tmp_path, Mode.BF16, Target(precision="mixed_bfloat16"), SEARCH_GRAPHS)

    def evaluate(names: frozenset[str], types: frozenset[str]) -> float:
        return replay_agreement([reference], reduced.write(Keep(names, types)), 1)

    without = evaluate(frozenset(), frozenset())
    assert replay_agreement([reference, reference], reduced.write(), 1) == pytest.approx(without)
    assert 0.9 < without < 1  # random weights: some codes nearly tie
    nodes = reduced.reduced_nodes(SEARCH_GRAPHS)
    assert "MatMul" in nodes and "Transpose" not in nodes  # a view has no precision of its own
    assert evaluate(frozenset(), frozenset(nodes)) == 1.0


def test_a_keep_list_that_cannot_be_read_is_refused(tiny_artifacts: Path, tmp_path: Path) -> None:
    result = run_om("precision", tiny_artifacts, "--keep", tmp_path / "missing.txt")
    assert result.exit_code == 1 and "not a readable keep list" in result.stderr


def test_a_found_keep_list_is_written_for_atc_and_in_force_in_the_floor(
    tiny_artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Search(1.0, 0.9, 1.0, ("MatMul", "Softmax"), (), 12, 30, 5, True)
    monkeypatch.setattr("runtime.precision.search_keep", lambda *_: found)
    keep = tmp_path / "keep.txt"
    result = run_om(
        "precision", tiny_artifacts, "--frames", 4, "--threads", 1, "--search", "--keep-out", keep, "--json"
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["kept"] == ["OpType::MatMul", "OpType::Softmax"] and data["search"]["num_nodes"] == 12
    assert "90.00% without" in keep.read_text() and "--search" in keep.read_text()
    assert set(KeepList.read(keep).op_types) == {"MatMul", "Softmax"}
    again = run_om("precision", tiny_artifacts, "--frames", 4, "--threads", 1, "--keep", keep, "--json",
                   "--text", data["parity"]["plan"]["text"], "--text", "Another one.")  # fmt: skip
    assert "--text 'Another one.'" in json.loads(again.stdout)["parity"]["command"]
    hidden = [s for s in json.loads(again.stdout)["parity"]["stages"] if s["name"] == "step hidden"]
    assert hidden == [s for s in data["parity"]["stages"] if s["name"] == "step hidden"]
