"""Reference clips: what is read, converted, noted and refused."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from runtime.audio import ClipRules, read_clip
from runtime.errors import AudioError

RATE = 48_000


def speech_like(seconds: float = 2.0, rate_hz: int = RATE, seed: int = 0) -> np.ndarray:
    """Noise in syllables: 0.2 s on, 0.1 s nearly off; peak 0.5. Shape [samples]."""
    n = int(seconds * rate_hz)
    rng = np.random.default_rng(seed)
    envelope = np.where(np.arange(n) / rate_hz % 0.3 < 0.2, 1.0, 0.003)
    signal = rng.standard_normal(n) * envelope
    return 0.5 * signal / np.abs(signal).max()


def write(path: Path, samples: np.ndarray, rate_hz: int = RATE, subtype: str | None = None) -> Path:
    soundfile.write(path, samples, rate_hz, subtype=subtype)
    return path


@pytest.mark.parametrize(
    ("name", "subtype", "tolerance"),
    [
        ("a.wav", "PCM_U8", 1 / 128),
        ("a.wav", "PCM_16", 1 / 32768),
        ("a.wav", "PCM_24", 2**-23),
        ("a.wav", "PCM_32", 2**-24),
        ("a.wav", "FLOAT", 2**-24),
        ("a.wav", "DOUBLE", 2**-24),
        ("a.wav", "ALAW", 0.02),
        ("a.wav", "MS_ADPCM", 0.4),
        ("a.flac", "PCM_16", 1 / 32768),
        ("a.aiff", "PCM_16", 1 / 32768),
        ("a.ogg", "VORBIS", 0.4),
        ("a.mp3", "MPEG_LAYER_III", 0.4),
    ],
)
def test_every_format_gives_the_samples(tmp_path, name, subtype, tolerance):
    samples = speech_like()
    clip = read_clip(write(tmp_path / name, samples, subtype=subtype))
    assert clip.waveform.dtype == np.float32
    assert clip.waveform.shape[0] == 2
    assert abs(clip.waveform.shape[1] - len(samples)) <= (
        2_500 if "mp3" in name or "ADPCM" in subtype else 0
    )  # they pad to blocks
    n = min(clip.waveform.shape[1], len(samples))
    assert np.abs(clip.waveform[0, :n] - samples[:n]).max() <= tolerance * 1.01
    assert clip.notes == ()


def test_one_channel_is_repeated(tmp_path):
    samples = speech_like().astype(np.float32)
    clip = read_clip(write(tmp_path / "a.wav", samples, subtype="FLOAT"))
    np.testing.assert_array_equal(clip.waveform, np.stack([samples, samples]))
    assert (clip.source_channels, clip.source_rate_hz, clip.seconds) == (1, RATE, 2.0)


def test_two_channels_stay_and_become_one_by_their_mean(tmp_path):
    two = np.stack([speech_like(seed=1), speech_like(seed=2)], axis=1).astype(np.float32)
    path = write(tmp_path / "a.wav", two, subtype="FLOAT")
    np.testing.assert_array_equal(read_clip(path).waveform, two.T)
    np.testing.assert_allclose(read_clip(path, num_channels=1).waveform[0], two.mean(axis=1), atol=1e-7)


def test_more_than_two_channels_are_averaged_with_a_note(tmp_path):
    six = np.stack([speech_like(seed=s) for s in range(6)], axis=1).astype(np.float32)
    clip = read_clip(write(tmp_path / "a.wav", six, subtype="FLOAT"))
    np.testing.assert_allclose(clip.waveform, np.stack([six.mean(axis=1)] * 2), atol=1e-7)
    assert clip.notes == ("6 channels averaged to one (upstream refuses such files)",)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 44_100, 96_000])
def test_any_rate_is_converted(tmp_path, rate_hz):
    clip = read_clip(write(tmp_path / "a.wav", speech_like(1.5, rate_hz), rate_hz))
    assert clip.waveform.shape == (2, -(-int(1.5 * rate_hz) * RATE // rate_hz))
    assert clip.source_rate_hz == rate_hz
    assert [n for n in clip.notes if "dull" in n] == (
        [f"{rate_hz} Hz: nothing above {rate_hz // 2} Hz, the voice will sound dull"] if rate_hz < 16_000 else []
    )


def test_the_codecs_rate_and_channels_are_used(tmp_path):
    clip = read_clip(write(tmp_path / "a.wav", speech_like()), sample_rate_hz=4_800, num_channels=1)
    assert clip.waveform.shape == (1, 9_600)
    assert clip.sample_rate_hz == 4_800


def test_levels_are_reported(tmp_path):
    clip = read_clip(write(tmp_path / "a.wav", speech_like()))
    assert clip.peak_dbfs == pytest.approx(-6.02, abs=0.01)
    assert -20 < clip.loudest_dbfs < -15


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"<!DOCTYPE html><html>404</html>", "is a web page"),
        (b"\n  <html>", "is a web page"),
        (b'{"error": "not found"}', "is JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        (b"PK\x03\x04" + bytes(100), "is a ZIP archive"),
        (b"\0\0\0\x20ftypM4A " + bytes(100), "is MP4/M4A.*ffmpeg"),
        (b"\x1aE\xdf\xa3" + bytes(100), "is WebM"),
        (b"hello, I am a text file", "is not an audio file that can be read .*Format not recognised"),
        (bytes(1000), "is not an audio file"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "is not an audio file"),
    ],
)
def test_what_is_not_audio_is_refused_with_its_kind(tmp_path, content, message):
    path = tmp_path / "clip.wav"
    path.write_bytes(content)
    with pytest.raises(AudioError, match=message) as caught:
        read_clip(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(AudioError, match="No such file"):
        read_clip(tmp_path / "gone.wav")
    with pytest.raises(AudioError, match="Is a directory"):
        read_clip(tmp_path)


def steady(kind: str) -> np.ndarray:
    n = np.arange(2 * RATE)
    if kind == "sine":
        return 0.5 * np.sin(0.03 * n)
    return np.random.default_rng(0).standard_normal(len(n)) * 0.1


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(0), "holds no samples"),
        (speech_like(0.5), r"0\.50 s; expected at least 1 s"),
        (speech_like(2)[:1], r"0\.00 s; expected at least 1 s"),
        (np.zeros(2 * RATE), "is silent: peak -120 dBFS"),
        (speech_like() * 0.001, r"is silent: peak -66 dBFS"),
        (steady("sine"), r"not speech but a steady tone or noise: its level varies by 0\.0 dB"),
        (steady("noise"), "not speech but a steady tone or noise"),
        (np.full(2 * RATE, 0.3), "not speech"),
        (np.where(np.arange(2 * RATE) == 7, np.nan, speech_like()), "1 samples are NaN or infinite"),
        (np.where(np.arange(2 * RATE) < 2, np.inf, speech_like()), "2 samples are NaN or infinite"),
        (speech_like() * 32_768, "samples reach 16384, expected -1 to 1: integers"),
    ],
)
def test_what_cannot_be_a_voice_is_refused_with_the_reason(tmp_path, samples, message):
    with pytest.raises(AudioError, match=message):
        read_clip(write(tmp_path / "a.wav", samples, subtype="FLOAT"))


def test_too_low_a_rate_is_refused(tmp_path):
    with pytest.raises(AudioError, match="3999 Hz; expected at least 4000 Hz"):
        read_clip(write(tmp_path / "a.wav", speech_like(2, 3_999), 3_999))


def test_a_long_clip_is_refused_with_the_limit(tmp_path):
    path = write(tmp_path / "hour.wav", np.zeros(3_600 * 4_000, np.int16), 4_000, "PCM_U8")
    with pytest.raises(AudioError, match="longer than 60 s, the limit for a reference clip"):
        read_clip(path)
    short = write(tmp_path / "three.wav", speech_like(3))
    with pytest.raises(AudioError, match="longer than 2 s"):
        read_clip(short, rules=ClipRules(max_seconds=2))
    assert read_clip(short, rules=ClipRules(max_seconds=3)).seconds == 3


@pytest.mark.parametrize(
    ("samples", "note"),
    [
        (np.clip(speech_like() * 8, -1, 1), r"clipped: \d+ samples stand at full scale"),
        (speech_like() + 0.1, r"constant offset of 0\.10 \(DC\)"),
        (speech_like() * 0.01, r"very quiet: the loudest 50 ms are at -\d\d dBFS"),
        (speech_like() * 12, r"samples reach 6\.00, beyond full scale"),
        (speech_like() + 0.08 * np.random.default_rng(1).standard_normal(2 * RATE), r"varies by [3-7] dB only"),
    ],
)
def test_what_should_be_known_is_noted(tmp_path, samples, note):
    clip = read_clip(write(tmp_path / "a.wav", samples, subtype="FLOAT"))
    assert len(clip.notes) == 1, clip.notes
    assert re.search(note, clip.notes[0])


def test_a_broken_off_wav_is_read_with_a_note(tmp_path):
    path = write(tmp_path / "a.wav", speech_like(4))
    path.write_bytes(path.read_bytes()[: 44 + 2 * 3 * RATE])
    clip = read_clip(path)
    assert clip.seconds == 3
    assert clip.notes == (
        "the file breaks off (384000 bytes announced, 288000 found); the 3.00 s that are there are used",
    )


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF])
def test_a_streamed_wav_without_a_size_is_no_broken_file(tmp_path, size):
    path = write(tmp_path / "a.wav", speech_like())
    data = path.read_bytes()
    path.write_bytes(data[:40] + struct.pack("<I", size) + data[44:])
    assert read_clip(path).notes == ()


@pytest.mark.parametrize("name", ["a.flac", "a.mp3"])
def test_a_broken_off_compressed_file_is_read_with_a_note_or_refused(tmp_path, name):
    path = write(tmp_path / name, speech_like(6))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    clip = read_clip(path)
    assert 3 < clip.seconds < 5
    assert "breaks off" in clip.notes[0]
    path.write_bytes(data[:200])
    with pytest.raises(AudioError):
        read_clip(path)


def test_trimming_cuts_silence_at_both_ends_and_leaves_a_margin(tmp_path):
    silence = np.zeros(RATE)
    path = write(tmp_path / "a.wav", np.concatenate([silence, speech_like(2), silence]))
    assert read_clip(path).seconds == 4
    assert read_clip(path, rules=ClipRules(trim=True)).seconds == pytest.approx(2.1, abs=0.11)


def test_a_clip_that_trimming_makes_too_short_is_refused(tmp_path):
    path = write(tmp_path / "a.wav", np.concatenate([np.zeros(2 * RATE), speech_like(0.4)]))
    with pytest.raises(AudioError, match=r"0\.\d\d s after trimming; expected at least 1 s"):
        read_clip(path, rules=ClipRules(trim=True))
