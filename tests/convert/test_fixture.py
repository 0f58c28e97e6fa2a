"""The made-up checkpoint: it stops by itself with clear margins, whatever reads it wrongly gets other codes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import convert.fixture
from convert.checkpoint import Checkpoint, open_codec, open_model
from convert.cli import cli
from convert.fixture import write_fixture
from convert.fixture_configs import FULL, TINY, codec_config_json, model_config_json
from runtime.backends.ort import OrtBackend
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import CheckpointError
from runtime.generate import generate
from runtime.manifest import Manifest, sha256_of
from runtime.modules.codec import build_codec_module
from runtime.modules.codec_state import derive_codec_state
from runtime.prompt import PromptBuilder
from runtime.sampling import SamplingParams, choose_code, decide_slot, draw_uniforms
from runtime.synthesizer import open_synthesizer
from runtime.tokenizer import Tokenizer
from tests.convert import naive_llm as naive

DATA = Path(__file__).parents[1] / "data"
FEWEST_FRAMES, MOST_FRAMES = 25, 60
MARGIN = 0.5
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it takes a short rest in the sun.",
    "今天天气很好，我们一起去公园散步吧。",
    "Please read: one, two, three.",
)


@dataclasses.dataclass(frozen=True)
class Speaker:
    """A fixture that was written and opened."""

    directory: Path
    model: Checkpoint[ModelConfig]
    builder: PromptBuilder

    def rows(self, text: str, frames: int = 12, seed: int = 0, last_code: int | None = None) -> np.ndarray:
        codes = np.random.default_rng(seed).integers(0, self.model.config.codebook_size, (frames, 16))
        if last_code is not None:
            codes[-1, 0] = last_code
        return self.builder.voice_clone(text, codes)

    def run(self, rows: np.ndarray, choose: object = None, **options: object) -> list:
        weights = {name: t.numpy() for name, t in self.model.tensors.items()}
        return naive.generate(rows, weights, self.model.config, choose or naive.greedy(), **options)


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Speaker]:
    made = {}
    for seed in (0, 1):
        directory, _ = write_fixture(tmp_path_factory.mktemp(f"seed{seed}"), "tiny", seed)
        model = open_model(directory)
        builder = PromptBuilder(model.config, Tokenizer(directory / "tokenizer.model"))
        made[seed] = Speaker(directory, model, builder)
    return made


@pytest.mark.parametrize("letter", ["a", "b"])
def test_the_naive_reference_gives_the_codes_of_upstream(letter: str) -> None:
    golden = np.load(DATA / "nano" / f"tiny_llm_{letter}.npz")
    opened = open_model(DATA / "nano" / f"tiny_llm_{letter}")
    weights = {name: t.numpy() for name, t in opened.tensors.items()}
    for penalty, name in ((1.0, "greedy"), (1.2, "greedy_pen1.2")):
        decisions = naive.generate(
            golden["prompt_input_ids"], weights, opened.config, naive.greedy(penalty), max_frames=12
        )
        np.testing.assert_array_equal([d.codes for d in decisions if d.codes], golden[f"{name}_frames"])
        np.testing.assert_allclose([d.hidden for d in decisions], golden[f"{name}_global_hidden"], atol=2e-5)


@pytest.mark.parametrize(("seed", "text"), [(0, TEXTS[0]), (0, TEXTS[1]), (1, TEXTS[2])])
def test_greedy_speech_stops_by_itself_with_clear_margins(speakers: dict[int, Speaker], seed: int, text: str) -> None:
    decisions = speakers[seed].run(speakers[seed].rows(text, seed=seed))
    frames = [d for d in decisions if d.codes]
    assert not decisions[-1].codes
    assert FEWEST_FRAMES <= len(frames) <= MOST_FRAMES
    assert min(abs(d.slot_logits[0] - d.slot_logits[1]) for d in decisions) > MARGIN
    assert min(np.diff(np.sort(logits)[-2:])[0] for d in frames for logits in d.code_logits) > MARGIN
    for channel in range(16):  # no code comes twice, so that the repetition penalty cannot change what is best
        assert len({d.codes[channel] for d in frames}) == len(frames)


def test_sampled_speech_stops_too_and_sampling_makes_a_difference(speakers: dict[int, Speaker]) -> None:
    speaker, params = speakers[0], SamplingParams()
    rng = np.random.default_rng(3)
    uniforms = iter(draw_uniforms(rng, 16)[0] for _ in range(100))
    state = {"u": next(uniforms)}

    def choose(channel: int, logits: np.ndarray, seen: list[int]) -> int:
        mask = np.zeros(len(logits), np.float32)
        mask[seen] = 1
        return choose_code(logits.astype(np.float32), mask, float(state["u"][1 + channel]), params)

    def go_on(slot_logits: np.ndarray) -> bool:
        state["u"] = next(uniforms)
        return decide_slot(slot_logits.astype(np.float32), float(state["u"][0]), params)

    rows = speaker.rows(TEXTS[1])
    sampled = speaker.run(rows, choose, go_on=go_on)
    greedy = speaker.run(rows, naive.greedy(1.2))
    assert not sampled[-1].codes
    assert FEWEST_FRAMES <= len(sampled) - 1 <= MOST_FRAMES
    both = min(len(sampled), len(greedy)) - 1
    same = np.mean([np.array(a.codes) == np.array(b.codes) for a, b in zip(sampled[:both], greedy[:both], strict=True)])
    assert 0.2 < same < 0.95


def test_the_exported_graphs_say_what_the_naive_reference_says(
    speakers: dict[int, Speaker], tiny_artifacts: Path
) -> None:
    """Graphs on ONNX Runtime with a cache, and the reference without one, are written apart: every code is the same."""
    rows = speakers[0].rows(TEXTS[2])
    manifest = Manifest.load(tiny_artifacts)
    with open_synthesizer(manifest, OrtBackend(threads=1)) as synthesizer:
        spoken = generate(synthesizer.frame_model, rows, 0, SamplingParams.greedy())
    assert spoken.finish_reason == "stop"
    np.testing.assert_array_equal(spoken.codes, [d.codes for d in speakers[0].run(rows) if d.codes])


def test_text_and_voice_decide_where_the_speech_begins(speakers: dict[int, Speaker]) -> None:
    speaker = speakers[0]

    def first_codes(rows: np.ndarray) -> tuple[int, ...]:
        return tuple(speaker.run(rows, max_frames=1)[0].codes)

    words = ("one", "two", "weather", "children", "please", "thing", "它")
    by_text = {first_codes(speaker.rows(f"We say {word}.")) for word in words}
    assert len(by_text) >= 4
    by_voice = {first_codes(speaker.rows(TEXTS[0], last_code=code)) for code in range(8)}
    assert len(by_voice) == 2


def _half_rope(x: np.ndarray, base: float) -> np.ndarray:
    """The other convention: pairs (j, j + D/2)."""
    half = x.shape[-1] // 2
    order = np.stack([np.arange(half), half + np.arange(half)], 1).reshape(-1)
    return ROPE(x[..., order], base)[..., np.argsort(order)]


def _late_last_row(x: np.ndarray, base: float) -> np.ndarray:
    """As if a step counted its position from one."""
    gap = np.concatenate([x[:, :-1], np.zeros_like(x[:, :1]), x[:, -1:]], 1)
    return np.delete(ROPE(gap, base), -2, 1)


ROPE = naive.rope
WRONG_ROPES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "none": lambda x, base: x,
    "halves": _half_rope,
    "another base": lambda x, base: ROPE(x, 500.0),
    "the last row one position late": _late_last_row,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ROPES)
def test_wrong_positions_give_other_codes(
    speakers: dict[int, Speaker], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = speakers[0].rows(TEXTS[0])
    want = [d.codes for d in speakers[0].run(rows, max_frames=3)]
    monkeypatch.setattr(naive, "rope", WRONG_ROPES[name])
    assert [d.codes for d in speakers[0].run(rows, max_frames=3)] != want


def _blocks(config: ModelConfig) -> list[str]:
    return [f"transformer.h.{n}" for n in range(config.num_layers)] + ["local_transformer.h.0"]


def test_without_any_one_attention_or_mlp_the_codes_are_others(speakers: dict[int, Speaker]) -> None:
    speaker = speakers[0]
    rows = speaker.rows(TEXTS[0])
    weights = {name: t.numpy() for name, t in speaker.model.tensors.items()}
    config = speaker.model.config
    want = [d.codes for d in naive.generate(rows, weights, config, naive.greedy(), max_frames=3)]
    for block in _blocks(config):
        for part in ("attn.c_proj", "mlp.fc_out"):
            broken = {n: np.zeros_like(w) if n.startswith(f"{block}.{part}") else w for n, w in weights.items()}
            got = [d.codes for d in naive.generate(rows, broken, config, naive.greedy(), max_frames=3)]
            assert got != want, f"{block}.{part}"


def test_reading_a_norm_or_a_head_wrongly_gives_other_codes(speakers: dict[int, Speaker]) -> None:
    speaker = speakers[0]
    rows = speaker.rows(TEXTS[0])
    weights = {name: t.numpy() for name, t in speaker.model.tensors.items()}
    want = [d.codes for d in speaker.run(rows, max_frames=3)]
    swapped = {n: w.T if n.endswith("attn.c_proj.weight") else w for n, w in weights.items()}
    qkv = {n: np.roll(w, len(w) // 3, 0) if ".c_attn." in n else w for n, w in weights.items()}
    for broken in (swapped, qkv):
        got = naive.generate(rows, broken, speaker.model.config, naive.greedy(), max_frames=3)
        assert [d.codes for d in got] != want


def test_the_sound_is_as_loud_as_speech(speakers: dict[int, Speaker]) -> None:
    speaker = speakers[0]
    codec = open_codec(speaker.directory.parent / "codec")
    frames = [d.codes for d in speaker.run(speaker.rows(TEXTS[2])) if d.codes]
    codes = np.array(frames[: len(frames) // 8 * 8], np.int32).T[None]
    decode = build_codec_module("codec_decode", codec.config, derive_codec_state(codec.config, codec.tensors))
    with torch.inference_mode():
        waveform = decode(torch.from_numpy(codes), torch.arange(codes.shape[2], dtype=torch.int32)[None]).numpy()
    assert waveform.shape == (1, 2, codes.shape[2] * 3840)
    assert np.isfinite(waveform).all()
    assert 0.02 < np.sqrt((waveform**2).mean()) < 0.2
    assert np.abs(waveform).max() < 1


def test_it_says_that_it_is_no_voice_and_is_small(speakers: dict[int, Speaker]) -> None:
    root = speakers[0].directory.parent
    for name, opener in (("model", open_model), ("codec", open_codec)):
        opened = opener(root / name)
        assert opened.made_up
        assert not opened.findings
        assert "not a voice" in (root / name / "README.md").read_text()
    assert sum(p.stat().st_size for p in root.rglob("*")) < 5_000_000
    tensors = open_codec(root / "codec").tensors
    assert "quantizer.quantizers.15.in_proj.parametrizations.weight.original1" in tensors
    assert (root / "codec" / "model-00001-of-00001.safetensors").is_file()


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(
    speakers: dict[int, Speaker], tmp_path: Path
) -> None:
    again = CliRunner().invoke(cli, ["fixture", str(tmp_path / "again"), "--size", "tiny", "--seed", "0"])
    assert again.exit_code == 0
    files = {0: speakers[0].directory, 1: speakers[1].directory, "again": tmp_path / "again" / "model"}
    sums = {key: sha256_of(path / "model.safetensors") for key, path in files.items()}
    assert sums["again"] == sums[0]
    assert sums[1] != sums[0]


def test_a_fixture_replaces_a_fixture_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "codec").mkdir()
    (tmp_path / "codec" / "mine").write_text("keep")
    with pytest.raises(CheckpointError, match="is not a fixture"):
        write_fixture(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["codec"]
    (tmp_path / "codec" / "mine").unlink()
    (tmp_path / "codec").rmdir()
    write_fixture(tmp_path)
    write_fixture(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["codec", "model"]


def test_the_full_configs_are_the_published_ones() -> None:
    for name, config_type, made in (
        ("llm", ModelConfig, model_config_json(FULL)), ("codec", CodecConfig, codec_config_json(FULL))
    ):  # fmt: skip
        published = json.loads((DATA / "published" / f"{name}.json").read_text())["config"]
        assert config_type.from_dict(made) == config_type.from_dict(published)
        assert all(made[k] == v for k, v in published.items() if k in made and k != "gpt2_config")


def test_full_is_stored_as_published_with_shared_tied_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speakers: dict[int, Speaker]
) -> None:
    monkeypatch.setattr(convert.fixture, "SIZES", {"full": TINY})  # the layout of full at the sizes of tiny
    model, _ = write_fixture(tmp_path, "full", 0)
    content = torch.load(model / "pytorch_model.bin", weights_only=True)
    assert len(content) == len(speakers[0].model.tensors)
    assert {t.dtype for t in content.values()} == {torch.bfloat16}
    head, embedding = content["audio_lm_heads.3.weight"], content["audio_embeddings.3.weight"]
    assert head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()
    opened = open_model(model)
    assert all(torch.equal(opened.tensors[n], t) for n, t in speakers[0].model.tensors.items())


def test_the_tokenizer_has_the_published_special_ids(speakers: dict[int, Speaker]) -> None:
    made = Tokenizer(speakers[0].directory / "tokenizer.model")
    published = Tokenizer(DATA / "tokenizer" / "tokenizer.model")
    assert [made.piece(i) for i in range(271)] == [published.piece(i) for i in range(271)]
    assert made.encode_template("\n") == []
    assert made.encode_template("<|im_start|>")[-1] == 4
    assert made.decode(made.encode("Ｈello 世界 🙂")) == "Hello 世界 🙂"
