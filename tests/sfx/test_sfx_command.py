"""run-om sfx from words to a file: sound as upstream's, seeds, notices, and what is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result

from runtime.cli import cli
from runtime.errors import CheckpointError
from runtime.sfx.codec import Decoding, decode, open_sfx_codec, read_sfx_codec_config
from runtime.sfx.config import SfxConfig
from runtime.sfx.prompt import SoundPrompt
from runtime.sfx.sampling import SfxSampling
from runtime.sfx.sound_effects import SoundEffects

DATA = Path(__file__).parents[1] / "data" / "sfx"


@pytest.fixture
def run(tiny_lm: Path, tiny_codec: Path):  # type: ignore[no-untyped-def]
    def call(*arguments: str, command: str = "sfx", codec: Path = tiny_codec) -> Result:
        directories = ("--checkpoint", str(tiny_lm), "--codec", str(codec))
        return CliRunner().invoke(cli, [command, *directories, *arguments], catch_exceptions=False)

    return call


def test_codes_become_the_waveform_of_upstream(
    tiny_codec: Path, config: SfxConfig, golden: Mapping[str, np.ndarray]
) -> None:
    with open_sfx_codec(tiny_codec, config) as codec:
        waveform = decode(codec, golden["codes_sample_rec"].astype(np.int32), Decoding.UPSTREAM)
    assert waveform.shape == (1, 5 * 1920)
    # The codec's own tolerance (tests/runtime/test_codec_golden.py); amplitudes here are about 4.
    np.testing.assert_allclose(waveform[0, ::31], golden["wav_sample_rec_every31"], rtol=0, atol=2e-5)


def test_long_clips_are_decoded_as_upstream_whole_and_in_chunks_of_8_s(tiny_codec: Path, config: SfxConfig) -> None:
    golden = np.load(DATA / "golden_codec.npz")
    codes = golden["codes_long"].T.astype(np.int32)  # 16.8 s
    wanted = {Decoding.UPSTREAM: "wav_long_chunk8_every97", Decoding.WHOLE: "wav_long_whole_every97"}
    with open_sfx_codec(tiny_codec, config) as codec:
        for decoding, name in wanted.items():
            waveform = decode(codec, codes, decoding)[0, ::97]
            np.testing.assert_allclose(waveform, golden[name], rtol=0, atol=2e-5)


def test_words_become_a_file_and_the_seed_repeats_it(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files = [tmp_path / name for name in ("a.wav", "b.wav")]
    for file in files:
        result = run("--prompt", "rain", "--seconds", "10", "--seed", "4", "--out", str(file), "--json")
        assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    samples, rate = soundfile.read(files[0])
    assert rate == 24000 and samples.shape == (facts["frames"] * 1920,)
    assert facts["finish_reason"] == "end" and facts["seconds"] == facts["frames"] * 0.08
    assert files[0].read_bytes() == files[1].read_bytes()


def test_prompts_in_one_batch_are_the_sounds_they_are_alone(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    both = ("--prompt", "rain", "--prompt", "风声", "--out", str(tmp_path / "a.wav"), "--out", str(tmp_path / "b.wav"))
    assert run(*both, "--seed", "7").exit_code == 0
    assert run("--prompt", "风声", "--out", str(tmp_path / "c.wav"), "--seed", "8").exit_code == 0
    assert (tmp_path / "b.wav").read_bytes() == (tmp_path / "c.wav").read_bytes()


def test_a_cut_run_says_what_it_dropped(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = run("--prompt", "rain", "--greedy", "--max-new-tokens", "30", "--out", str(tmp_path / "a.wav"))
    assert result.exit_code == 0
    assert "cut after 30 rows" in result.stderr and "15 incomplete frames" in result.stderr
    assert soundfile.info(tmp_path / "a.wav").frames == 14 * 1920


def test_a_run_without_audio_is_an_error_and_writes_no_file(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = run("--prompt", "rain", "--max-new-tokens", "16", "--out", str(tmp_path / "a.wav"))
    assert result.exit_code == 1
    assert "without a complete frame of audio" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "a.wav").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "rain", "--out", "a.txt"], "a.txt"),
        (["--prompt", "rain", "--prompt", "wind", "--out", "a.wav"], "one different --out per --prompt"),
        (["--prompt", "rain", "--out", "a.wav", "--tokens", "5", "--seconds", "5"], "got both"),
        (["--prompt", "rain", "--out", "a.wav", "--seconds", "0"], "--seconds"),
        (["--prompt", " ", "--out", "a.wav"], "description is empty"),
        (["--prompt", "rain", "--out", "a.wav", "--top-p", "0"], "top_p"),
        (["--prompt", "rain", "--out", "a.wav", "--device", "npu"], "torch-npu"),
    ],
)
def test_a_wrong_request_is_one_line(run, arguments: list[str], said: str) -> None:  # type: ignore[no-untyped-def]
    result = run(*arguments)
    assert result.exit_code == 1
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_ids_missing_from_the_config_are_a_notice_and_change_nothing(
    run, tiny_lm: Path, tiny_codec: Path, tmp_path: Path  # type: ignore[no-untyped-def]
) -> None:  # fmt: skip
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(tiny_lm / name)
    raw = json.loads((tiny_lm / "config.json").read_text(encoding="utf-8"))
    del raw["pad_token_id"], raw["im_start_token_id"], raw["im_end_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    arguments = ("sfx", "--codec", str(tiny_codec), "--prompt", "rain", "--seed", "4", "--out", str(tmp_path / "a.wav"))
    result = CliRunner().invoke(cli, [*arguments, "--checkpoint", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stderr.count("taken from the published table") == 3
    run("--prompt", "rain", "--seed", "4", "--out", str(tmp_path / "b.wav"))
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


def test_another_codec_is_refused(tiny_codec: Path, tmp_path: Path, config: SfxConfig) -> None:
    shutil.copytree(tiny_codec, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tiny_codec / "config.json").read_text(encoding="utf-8"))
    raw["quantizer_kwargs"]["num_quantizers"] = 8
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="24 kHz MOSS-Audio-Tokenizer"):
        read_sfx_codec_config(tmp_path, config)
    raw["quantizer_kwargs"]["num_quantizers"] = 32
    raw["decoder_kwargs"][0]["dim_feedforward"] = 81
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"config\.json and weights differ .*81"):
        open_sfx_codec(tmp_path, config)


def test_a_server_can_call_it_without_files(tiny_lm: Path, tiny_codec: Path) -> None:
    with SoundEffects.open(tiny_lm, tiny_codec) as effects:
        [sound] = effects.create([SoundPrompt("rain", tokens=12)], [4], SfxSampling(), 300)
    assert sound.waveform.shape == (1, sound.num_frames * 1920) and sound.sample_rate_hz == 24000


def test_bench_prints_every_figure(run) -> None:  # type: ignore[no-untyped-def]
    arguments = ("--num-warmup", "2", "--num-iterations", "1", "--seed", "4")
    result = run(*arguments, command="sfx-bench")
    assert result.exit_code == 0, result.stderr
    for name in ("LLM seconds", "codec seconds", "total seconds", "RTF", "LLM tokens / s", "peak memory: host"):
        assert name in result.stdout
    assert result.stderr.count("run ") == 3
    facts = json.loads(run(*arguments, "--json", command="sfx-bench").stdout)
    llm, codec, total = (facts["figures"][f"{part}_seconds"]["median"] for part in ("llm", "codec", "total"))
    assert total == pytest.approx(llm + codec) and codec > 0
    assert facts["figures"]["rtf"]["median"] == pytest.approx(total / facts["audio_seconds"])
    assert run("--num-iterations", "0", command="sfx-bench").exit_code == 1
