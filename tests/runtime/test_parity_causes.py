"""Each guess at a cause is provoked: side b makes the mistake, and the report must name stage, frame and cause."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import MethodType

import numpy as np
import pytest
import soundfile

from runtime.assembly import open_codec
from runtime.backends.ort import OrtBackend
from runtime.errors import ParityError
from runtime.frame_model import HostFrameModel
from runtime.manifest import Manifest, sha256_of
from runtime.parity import Parity, compare
from runtime.parity_faults import Engine
from runtime.parity_record import Plan, Recording, record
from runtime.parity_verdict import Verdict
from runtime.prompt import Template
from runtime.sampling import MASKED, SamplingParams
from runtime.synthesizer import Synthesizer

FRAMES = 12


@pytest.fixture(scope="module")
def manifest(tiny_artifacts: Path) -> Manifest:
    return Manifest.load(tiny_artifacts)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest) -> Path:
    rate = manifest.codec.sample_rate_hz
    t = np.arange(2 * rate) / rate
    path = tmp_path_factory.mktemp("clip") / "clip.wav"
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * 140 * t) * (1 + 0.5 * np.sin(2 * np.pi * 3 * t)), rate)
    return path


@pytest.fixture(scope="module")
def a(manifest: Manifest, clip: Path) -> Recording:
    backend = OrtBackend(1)
    with Synthesizer(manifest, HostFrameModel(manifest, backend), open_codec(manifest, backend)) as synthesizer:
        return record(synthesizer, backend, Plan("Hello there.", clip, frames=FRAMES))


class Side:
    """Side b, whose parts a test may spoil before it runs."""

    def __init__(self, manifest: Manifest, template: Template = Template.PYTORCH, capacity: int | None = None) -> None:
        self.backend = OrtBackend(1)
        self.model = HostFrameModel(manifest, self.backend, capacity=capacity)
        self.synthesizer = Synthesizer(manifest, self.model, open_codec(manifest, self.backend), template)

    def feeds(self, change) -> None:
        """`change(feeds)` spoils what every step gets."""
        original = self.model._step_feeds

        def spoiled(model):
            feeds = original()
            change(feeds)
            return feeds

        self.model._step_feeds = MethodType(spoiled, self.model)

    def outputs(self, change, graphs=("frame", "step_frame"), of_codec=False) -> None:
        """`change(outputs)` spoils what graphs give."""
        sessions = [self.model._sessions[g] for g in graphs]
        if of_codec:
            sessions = list(self.synthesizer.codec._stream._sessions.values())
        for session in sessions:
            original = session.run

            def spoiled(feeds, original=original):
                outputs = original(feeds)
                change(outputs)
                return outputs

            session.run = spoiled

    def against(self, a: Recording, plan: Plan | None = None, engine: bool = True) -> Parity:
        with self.synthesizer as synthesizer:
            b = record(synthesizer, self.backend, plan or a.plan, a)
        return compare(a, b, engine=Engine("a", self.synthesizer.manifest, OrtBackend(1)) if engine else None)


def assert_parts(parity: Parity, stage: str, kind: str, words: str = "") -> None:
    assert parity.verdict is Verdict.DIVERGENT
    assert parity.divergence is not None and parity.divergence.name == stage, parity.text
    assert parity.cause is not None and parity.cause.kind == kind, parity.text
    assert words in parity.cause.text, parity.cause.text
    assert parity.cause.text in parity.text


def test_the_same_side_twice_is_exact(manifest, a):
    parity = Side(manifest).against(a)
    assert parity.verdict is Verdict.EXACT and parity.cause is None and parity.verdict.exit_code == 0


@pytest.mark.parametrize(("by", "words"), [(1, "one too high"), (-1, "one too low")])
def test_a_position_that_is_off_by_one(manifest, a, by, words):
    side = Side(manifest)
    side.feeds(lambda feeds: feeds.update(position=feeds["position"] + np.int32(by)))
    parity = side.against(a)
    assert_parts(parity, "step hidden", "position", words)
    assert parity.divergence.frame == 1 and "rerun with this fault" in parity.cause.evidence


def test_a_prefill_that_takes_the_row_before_the_last(manifest, a):
    side = Side(manifest)
    session = side.model._sessions["prefill"]
    original = session.run
    session.run = lambda feeds: original({**feeds, "last": feeds["last"] - np.int32(1)})
    parity = side.against(a)
    assert_parts(parity, "prefill hidden", "position", "one row before the last")
    assert parity.divergence.frame == 0


@pytest.mark.parametrize(
    ("shift", "words"), [(-1, "one row too early"), (1, "one row too late"), (None, "never reach the cache")]
)
def test_cache_rows_in_the_wrong_place(manifest, a, shift, words):
    side = Side(manifest)
    cache = side.model._cache

    def append(rows):
        views, _ = cache.visible()
        if shift is not None:
            for view, new in zip(views, rows, strict=True):
                view[:, :, cache.length + shift] = new[:, :, 0]
        cache._mask[..., cache.length] = 0
        cache.length += 1

    cache.append = append
    parity = side.against(a)
    assert_parts(parity, "step hidden", "cache row", words)


@pytest.mark.parametrize("whole_cache", [False, True])  # a host cache shows blocks of 128 rows, an .om all of it
def test_a_missing_cache_mask(manifest, a, whole_cache):
    side = Side(manifest, capacity=192)

    def change(feeds):
        if whole_cache:
            for name in [n for n in feeds if n.startswith("past_")]:
                whole = np.zeros((*feeds[name].shape[:2], 192, feeds[name].shape[3]), np.float32)
                whole[:, :, : feeds[name].shape[2]] = feeds[name]
                feeds[name] = whole
        feeds["cache_mask"] = np.zeros((1, 1, 1, feeds["past_key_0"].shape[2]), np.float32)

    side.feeds(change)
    assert_parts(side.against(a), "step hidden", "mask", "missing")


def test_a_mask_that_opens_a_row_too_late(manifest, a):
    side = Side(manifest)

    def change(feeds):
        mask = feeds["cache_mask"].copy()
        mask[..., int(feeds["position"][0]) - 1] = MASKED
        feeds["cache_mask"] = mask

    side.feeds(change)
    assert_parts(side.against(a), "step hidden", "mask", "one step too late")


def test_a_step_that_reads_the_codes_of_the_frame_before(manifest, a):
    side = Side(manifest)
    kept: list[np.ndarray] = []

    def change(feeds):
        row = feeds["row"].copy()
        if kept and int(feeds["position"][0]) > len(a.replay_rows):
            row[..., 1:] = kept[-1]
        kept.append(feeds["row"][..., 1:])
        feeds["row"] = row

    side.feeds(change)
    assert_parts(side.against(a), "step hidden", "row", "frame before the last")


def test_a_step_that_no_fault_explains_is_said_to_be_one(manifest, a):
    side = Side(manifest)
    side.outputs(lambda outputs: outputs.update(hidden=outputs["hidden"][:, ::-1].copy()), ("step_frame",))
    assert_parts(side.against(a), "step hidden", "step", "what only a step does")


def test_reduced_precision(manifest, a):
    side = Side(manifest)

    def change(outputs):
        for name, value in outputs.items():
            if value.dtype == np.float32:
                outputs[name] = value.astype(np.float16).astype(np.float32)

    side.outputs(change, ("prefill", "frame", "step_frame"))
    assert_parts(side.against(a), "prefill hidden", "precision", "float16")


def test_a_scaled_hidden_state(manifest, a):
    side = Side(manifest)
    side.outputs(lambda outputs: outputs.update(hidden=outputs["hidden"] * np.float32(1.5)), ("prefill", "step_frame"))
    assert_parts(side.against(a), "prefill hidden", "scale", "1.5")


def test_different_weights(manifest, a, tmp_path):
    directory = Path(shutil.copytree(manifest.directory, tmp_path / "artifacts"))
    weights = np.fromfile(directory / "weights.bin", np.uint8)
    record_ = next(r for name, r in manifest.weights.items() if "layer" in name and len(r.shape) == 2)
    part = weights[record_.offset : record_.offset + record_.num_bytes].view(np.float32)
    part *= np.float32(1.3)
    weights.tofile(directory / "weights.bin")
    data_files = {**manifest.data_files, "weights.bin": sha256_of(directory / "weights.bin")}
    changed = dataclasses.replace(manifest, directory=directory, data_files=data_files)
    parity = Side(changed).against(a)
    assert parity.verdict is Verdict.DIVERGENT
    assert parity.cause is not None and parity.cause.kind == "weights" and "sha256" in parity.cause.evidence


def test_swapped_codebooks(manifest, a):
    side = Side(manifest)

    def change(outputs):
        logits = outputs["code_logits"].copy()
        logits[:, [3, 5]] = logits[:, [5, 3]]
        outputs["code_logits"] = logits

    side.outputs(change)
    parity = side.against(a)
    assert_parts(parity, "code logits", "codebooks", "swapped")
    assert (parity.divergence.frame, parity.divergence.codebook) == (0, 3)
    assert "b's 3 is a's 5" in parity.cause.evidence


def test_one_codebook_that_is_a_frame_late(manifest, a):
    side = Side(manifest)
    last: list[np.ndarray] = []

    def change(outputs):
        codes = outputs["codes"].copy()
        last.append(codes[:, 7].copy())
        codes[:, 7] = last[-2] if len(last) > 1 else codes[:, 7]
        outputs["codes"] = codes

    side.outputs(change)
    b_model = side.model
    original = b_model.prefill
    b_model.prefill = lambda rows: (last.clear(), original(rows))[1]
    parity = side.against(a)
    assert parity.verdict is Verdict.DIVERGENT and parity.divergence.codebook == 7
    assert parity.cause.kind == "codebooks" and "codebook 7 is one frame late" in parity.cause.text


def test_another_seed(manifest, a):
    side = Side(manifest)
    original = side.model.next_frame
    other = np.random.default_rng(5)
    from runtime.sampling import draw_uniforms

    def next_frame(uniforms, sampling, keep_logits=False):
        if side.model._hidden is not None:
            other.bit_generator.state = np.random.default_rng(5).bit_generator.state
        return original(draw_uniforms(other, 16), sampling, keep_logits)

    side.model.next_frame = next_frame
    plan = dataclasses.replace(a.plan, sampling=SamplingParams(temperature=3.0, top_k=50, top_p=1.0))
    good = Side(manifest)
    with good.synthesizer as synthesizer:
        wild = record(synthesizer, good.backend, plan)
    parity = side.against(wild, plan)
    assert parity.stage("code logits").verdict.agrees and parity.mode("greedy").verdict.agrees
    assert_parts(parity, "seeded", "seed", "another seed")
    assert "seed 5" in parity.cause.evidence


def test_a_sampler_that_ignores_the_penalty_is_a_sampling_cause(manifest, a):
    side = Side(manifest)
    original = side.model.next_frame

    def next_frame(uniforms, sampling, keep_logits=False):
        return original(uniforms, dataclasses.replace(sampling, temperature=5.0), keep_logits)

    side.model.next_frame = next_frame
    assert_parts(side.against(a), "seeded", "sampling", "another rule")


def test_another_prompt_template(manifest, a):
    assert_parts(Side(manifest, Template.ONNX).against(a), "prompt rows", "template", "im_start")


def test_another_reference_clip(manifest, a, clip, tmp_path):
    samples, rate = soundfile.read(clip)
    soundfile.write(tmp_path / "other.wav", samples[::-1] * 0.7, rate)
    side = Side(manifest)
    parity = side.against(a, dataclasses.replace(a.plan, voice=tmp_path / "other.wav"))
    assert_parts(parity, "reference codes", "encoder")
    assert parity.stage("prompt rows").verdict is Verdict.EXACT
    assert parity.stage("code logits").verdict.agrees  # the replay reads a's prompt


def test_nan_names_the_first_place(manifest, a):
    side = Side(manifest)
    count = [0]

    def change(outputs):
        count[0] += 1
        if count[0] % 2 == 0:
            outputs["code_logits"] = outputs["code_logits"].copy()
            outputs["code_logits"][0, 4, 3] = np.nan

    side.outputs(change, ("step_frame",))
    parity = side.against(a)
    assert_parts(parity, "code logits", "overflow")
    assert parity.divergence.codebook == 4 and "NaN" in parity.divergence.text


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda w: w[:, ::-1], "channels", "swapped"),
        (lambda w: w * np.float32(0.5), "gain", "multiplied by 2"),
    ],
)
def test_what_is_wrong_with_a_waveform(manifest, a, change, kind, words):
    side = Side(manifest)
    side.outputs(lambda outputs: outputs.update(waveform=change(outputs["waveform"])), of_codec=True)
    assert_parts(side.against(a), "waveform", kind, words)


def test_a_late_waveform(manifest, a):
    late = np.roll(a.waveform, 37, axis=1)
    late[:, :37] = 0
    parity = compare(a, dataclasses.replace(a, waveform=late))
    assert_parts(parity, "waveform", "lag", "37 samples late")


def test_garbage_of_the_reference_is_not_fed_to_the_other_side(manifest, a):
    broken = dataclasses.replace(a, replay_codes=np.where(a.replay_codes == a.replay_codes[0, 0], -1, a.replay_codes))
    with pytest.raises(ParityError, match="the reference chose codes from -1"):
        Side(manifest).against(broken)
