"""Stored voices: adding, finding, refusing stale ones, and the command."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner

from runtime.cli import cli
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import AudioError, ManifestError
from runtime.manifest import Manifest, sha256_of
from runtime.voices import VOICES_ENV, Voice, VoiceStore, codec_id, default_directory, encode_clip, find_voice

CODES = np.arange(32, dtype=np.int32).reshape(2, 16)


class FakeCodec:
    """Two codebooks: the frame number, and the sign of the frame's first sample; counts its runs."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(sample_rate_hz=4_800, num_channels=2, samples_per_frame=384)
        self.runs = 0

    def encode(self, waveform):
        assert waveform.shape[0] == 2
        self.runs += 1
        frames = waveform[0, : waveform.shape[1] // 384 * 384].reshape(-1, 384)
        return np.stack([np.arange(len(frames)), frames[:, 0] > 0], axis=1).astype(np.int32)


@pytest.fixture
def clip(tmp_path) -> Path:
    n = np.arange(2 * 4_800)
    samples = np.random.default_rng(0).standard_normal(len(n)) * np.where(n % 1_440 < 960, 0.2, 0.001)
    soundfile.write(tmp_path / "clip.wav", samples, 4_800)
    return tmp_path / "clip.wav"


@pytest.fixture
def store(tmp_path) -> VoiceStore:
    return VoiceStore(tmp_path / "voices")


def stored(name: str, codec: str = "c0ffee") -> Voice:
    return Voice(name, CODES, "clip.wav", "ab12", codec, 1.5, "What it says.", ("very quiet",))


def test_a_voice_comes_back_as_it_was_stored(store):
    store.add(stored("anna"))
    voice = store.load("anna")
    np.testing.assert_array_equal(voice.codes, CODES)
    assert voice.codes.dtype == np.int32
    assert voice.to_dict() == stored("anna").to_dict()


def test_voices_are_listed_and_removed(store):
    assert store.names() == []
    for name in ("zoë", "李", "anna-2"):
        store.add(stored(name))
    (store.directory / "not a voice.json").write_text("{}")
    assert store.names() == ["anna-2", "zoë", "李"]
    store.remove("zoë")
    assert store.names() == ["anna-2", "李"]
    with pytest.raises(AudioError, match=r"no voice named zoë in .*; stored voices: anna-2, 李"):
        store.remove("zoë")


def test_two_spellings_of_a_name_are_one_voice(store):
    store.add(stored("zoe\u0308"))
    assert store.load("zo\u00eb").seconds == 1.5


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "a.wav", ".", "..", "-x", "_x", "a b", "a\0", "x" * 65, "a\n", "C:x", "~"]
)
def test_a_name_is_never_a_path(store, name):
    for action in (store.load, store.remove, lambda n: store.add(stored(n))):
        with pytest.raises(AudioError, match="expected 1 to 64 letters, digits"):
            action(name)
    assert not store.directory.exists()


def test_a_taken_name_is_kept_unless_replaced(store):
    store.add(stored("anna"))
    with pytest.raises(AudioError, match=r"voice anna exists in .*--replace"):
        store.add(stored("anna", "beef"))
    assert store.load("anna").codec_id == "c0ffee"
    store.add(stored("anna", "beef"), overwrite=True)
    assert store.load("anna").codec_id == "beef"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not readable"),
        ("[]", "format version None, expected 1"),
        ('{"format_version": 2}', "format version 2, expected 1"),
        ('{"format_version": 1, "name": "anna"}', "is damaged"),
        (json.dumps({**stored("anna").to_dict(), "codes": []}), r"is damaged \(codes \[0\]\)"),
        (json.dumps({**stored("anna").to_dict(), "codes": [[1], [1, 2]]}), "is damaged"),
        (json.dumps({**stored("anna").to_dict(), "extra": 1}), "is damaged"),
    ],
)
def test_a_damaged_voice_is_refused_in_one_line(store, content, message):
    store.directory.mkdir()
    (store.directory / "anna.json").write_text(content)
    with pytest.raises(AudioError, match=message) as caught:
        store.load("anna")
    assert "\n" not in str(caught.value)


def test_a_clip_is_encoded_once_and_then_found_by_name(store, clip):
    codec = FakeCodec()
    store.add(encode_clip(clip, codec, "c0ffee", name="anna", text="Hi."))
    voice = find_voice("anna", store, codec, "c0ffee")
    assert codec.runs == 1
    assert (voice.codes.shape, voice.clip, voice.clip_sha256, voice.text) == (
        (25, 2),
        "clip.wav",
        sha256_of(clip),
        "Hi.",
    )
    assert voice.seconds == 2.0


def test_a_file_is_encoded_and_not_stored(store, clip):
    voice = find_voice(str(clip), store, FakeCodec(), "c0ffee")
    assert (voice.name, voice.codes[:3, 0].tolist()) == ("", [0, 1, 2])
    assert store.names() == []


def test_a_voice_of_another_codec_is_refused_with_what_to_do(store):
    store.add(stored("anna"))
    with pytest.raises(AudioError, match=r"encoded by another codec .*run-om voice add anna clip\.wav --replace"):
        find_voice("anna", store, FakeCodec(), "beef")


def test_an_unknown_voice_names_those_that_exist(store):
    store.add(stored("anna"))
    with pytest.raises(AudioError, match=r"no voice named bob in .*; stored voices: anna"):
        find_voice("bob", store, FakeCodec(), "c0ffee")
    with pytest.raises(AudioError, match=r"--voice bob\.wav: no such file.*stored voices: anna"):
        find_voice("bob.wav", store, FakeCodec(), "c0ffee")


def test_the_codec_is_known_by_its_weights(tmp_path):
    def manifest(files: dict[str, str]) -> SimpleNamespace:
        return SimpleNamespace(directory=tmp_path, source={"codec": {"files": files}, "model": {"files": {"m": "1"}}})

    one = codec_id(manifest({"a.safetensors": "11", "config.json": "22"}))
    assert one == codec_id(manifest({"b.safetensors": "11", "config.json": "33"}))
    assert one != codec_id(manifest({"a.safetensors": "12", "config.json": "22"}))
    with pytest.raises(ManifestError, match="does not say which codec"):
        codec_id(manifest({}))


def test_the_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_directory() == tmp_path / "data" / "moss-tts-nano-ascend" / "voices"
    monkeypatch.setenv(VOICES_ENV, str(tmp_path / "mine"))
    assert VoiceStore().directory == tmp_path / "mine"


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["voice", *args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command_lists_shows_and_removes(monkeypatch, tmp_path):
    monkeypatch.setenv(VOICES_ENV, str(tmp_path / "voices"))
    assert run("list") == (0, f"no voices in {tmp_path / 'voices'}\n")
    VoiceStore().add(stored("anna"))
    assert run("list") == (0, "anna: 2 frames, 1.5 s, from clip.wav\n")
    assert json.loads(run("list", "--json")[1])[0]["name"] == "anna"
    assert "codec_id: c0ffee\n" in run("show", "anna")[1]
    assert json.loads(run("show", "anna", "--json")[1])["codes"] == CODES.tolist()
    assert run("remove", "anna") == (0, "removed voice anna\n")
    assert run("show", "anna")[0] == 1


def test_adding_needs_artifacts_and_a_free_name(monkeypatch, tmp_path, clip):
    monkeypatch.setenv(VOICES_ENV, str(tmp_path / "voices"))
    code, output = run("add", "anna", str(clip), "--artifacts", str(tmp_path))
    assert (code, output.startswith("error: ")) == (1, True)
    assert "manifest.json" in output
    VoiceStore().add(stored("anna"))
    code, output = run("add", "anna", str(clip), "--artifacts", str(tmp_path))
    assert code == 1
    assert "voice anna exists" in output


def test_a_voice_is_added_through_the_command(monkeypatch, tmp_path, clip):
    """The wiring; the codec itself is tested with its graphs."""
    nano = Path(__file__).parents[1] / "data" / "nano"
    Manifest(
        directory=tmp_path,
        name="tiny",
        made_up=True,
        source={"codec": {"files": {"model.safetensors": "11"}}},
        model=ModelConfig.from_dict(json.loads((nano / "tiny_llm_b" / "config.json").read_text())),
        codec=CodecConfig.from_dict(json.loads((nano / "tiny_codec" / "config.json").read_text())),
        limits={"max_positions": 512, "top_k_max": 50},
        graphs={},
        data_files={},
        weights={},
        versions={},
    ).save()
    monkeypatch.setenv(VOICES_ENV, str(tmp_path / "voices"))
    monkeypatch.setattr("runtime.commands.voice.open_chosen", lambda manifest, backend: None)
    monkeypatch.setattr("runtime.assembly.open_codec", lambda manifest, backend: nullcontext(FakeCodec()))
    add = ("add", "anna", str(clip), "--artifacts", str(tmp_path), "--text", "Hi.")
    assert run(*add) == (0, f"voice anna: 25 frames from 2.0 s, stored in {tmp_path / 'voices' / 'anna.json'}\n")
    voice = VoiceStore().load("anna")
    assert (voice.text, voice.codec_id) == ("Hi.", codec_id(Manifest.load(tmp_path)))
    assert run(*add)[0] == 1
    assert run(*add, "--replace")[0] == 0
    code, output = run("add", "bob", str(tmp_path / "manifest.json"), "--artifacts", str(tmp_path))
    assert (code, output) == (1, f"error: {tmp_path / 'manifest.json'} is JSON, not audio\n")
