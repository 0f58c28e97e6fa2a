"""Audio files that are written: values, headers, clipping, and nothing half-written."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from runtime.audio_writer import AudioWriter, SampleFormat, check_output_path, to_integers, wav_header, write_audio
from runtime.errors import AudioError

RATE = 48_000
GOLDEN = Path(__file__).parents[1] / "data" / "audio" / "audio_io.npz"


def noise(num_samples: int = 10_001, channels: int = 2, peak: float = 0.9) -> np.ndarray:
    return np.random.default_rng(0).uniform(-peak, peak, (channels, num_samples)).astype(np.float32)


def test_16_bit_values_are_the_published_ones(tmp_path):
    with np.load(GOLDEN) as golden:
        samples, want = golden["pcm_in"].T, golden["pcm16_onnx_writer"]
    written = write_audio(tmp_path / "a.wav", samples, RATE)
    np.testing.assert_array_equal(soundfile.read(tmp_path / "a.wav", dtype="int16")[0], want)
    assert written.num_clipped == np.count_nonzero(np.abs(samples) > 1) == 2


def test_halves_round_to_even():
    halves = (np.array([0.5, 1.5, 2.5, -0.5, -1.5]) / 32767).astype(np.float32)
    assert to_integers(halves, 16).tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("mono", [False, True])
@pytest.mark.parametrize(
    ("name", "sample_format", "subtype", "tolerance"),
    [
        ("a.wav", SampleFormat.PCM16, "PCM_16", 1.5 / 32767),
        ("a.wav", SampleFormat.PCM24, "PCM_24", 2**-22),
        ("a.wav", SampleFormat.FLOAT, "FLOAT", 0),
        ("a.flac", SampleFormat.PCM16, "PCM_16", 1.5 / 32767),
        ("a.flac", SampleFormat.PCM24, "PCM_24", 2**-22),
        ("A.OGG", SampleFormat.PCM16, "VORBIS", 0.03),
    ],
)
def test_every_format_is_read_back(tmp_path, name, sample_format, subtype, tolerance, mono):
    n = np.arange(10_001)
    waveform = 0.8 * np.stack([np.sin(0.05 * n), np.cos(0.03 * n)]).astype(np.float32)
    written = write_audio(tmp_path / name, waveform, RATE, sample_format, mono)
    samples, rate_hz = soundfile.read(tmp_path / name, always_2d=True)
    assert (rate_hz, soundfile.info(tmp_path / name).subtype) == (RATE, subtype)
    want = waveform.mean(axis=0, keepdims=True) if mono else waveform
    np.testing.assert_allclose(samples.T, want, rtol=0, atol=tolerance)
    assert (written.num_samples, written.num_clipped, written.path) == (10_001, 0, tmp_path / name)


@pytest.mark.parametrize("mono", [False, True])
@pytest.mark.parametrize("sample_format", SampleFormat)
@pytest.mark.parametrize("pieces", [1, 3])
def test_the_wav_header_is_complete_and_right(tmp_path, sample_format, mono, pieces):
    """Against the RIFF layout, field by field: readers differ in what they forgive."""
    waveform = noise()
    with AudioWriter(tmp_path / "a.wav", RATE, 2, sample_format, mono) as writer:
        for piece in np.array_split(waveform, pieces, axis=1):
            writer.write(piece)
        assert writer.close().num_samples == 10_001
    data = (tmp_path / "a.wav").read_bytes()
    assert (data[:4], data[8:16]) == (b"RIFF", b"WAVEfmt ")
    assert struct.unpack("<I", data[4:8])[0] == len(data) - 8
    size, channels = {"pcm16": 2, "pcm24": 3, "float": 4}[sample_format.value], 1 if mono else 2
    kind, ch, rate, byte_rate, align, bits = struct.unpack("<HHIIHH", data[20:36])
    assert (kind, ch, rate) == (3 if sample_format is SampleFormat.FLOAT else 1, channels, RATE)
    assert (byte_rate, align, bits) == (RATE * size * channels, size * channels, 8 * size)
    at = data.index(b"data")
    assert struct.unpack("<I", data[at + 4 : at + 8])[0] == 10_001 * size * channels
    assert len(data) - at - 8 == 10_001 * size * channels + (10_001 * size * channels) % 2
    if sample_format is SampleFormat.FLOAT:
        assert data[36:50] == b"\0\0fact" + struct.pack("<II", 4, 10_001)


def test_a_stream_of_unknown_length_has_the_largest_sizes():
    header = wav_header(RATE, 2, SampleFormat.PCM16, 0xFFFFFFFF)
    assert len(header) == 44
    assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"


def test_pieces_and_the_whole_give_the_same_bytes(tmp_path):
    waveform = noise()
    for name in ("a.wav", "a.flac"):
        write_audio(tmp_path / name, waveform, RATE)
        with AudioWriter(tmp_path / f"b{name}", RATE, 2) as writer:
            for start in range(0, 10_001, 777):
                writer.write(waveform[:, start : start + 777])
            writer.close()
        assert soundfile.read(tmp_path / name)[0].tolist() == soundfile.read(tmp_path / f"b{name}")[0].tolist()
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "ba.wav").read_bytes()


def test_samples_beyond_full_scale_are_clipped_and_counted_not_wrapped(tmp_path):
    loud = np.array([[0.5, 1.5, -1.5, 1.0]], np.float32)
    for sample_format in SampleFormat:
        written = write_audio(tmp_path / "a.wav", loud, RATE, sample_format)
        assert written.num_clipped == 2
        np.testing.assert_allclose(soundfile.read(tmp_path / "a.wav")[0], [0.5, 1, -1, 1], atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_refused_and_leave_no_file(tmp_path, bad):
    waveform = noise(100)
    waveform[1, 5] = bad
    with pytest.raises(AudioError, match=r"a\.wav: 1 of 200 samples are NaN or infinite; nothing was written"):
        write_audio(tmp_path / "a.wav", waveform, RATE)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.wav"
    write_audio(path, noise(50), RATE)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), AudioWriter(path, RATE, 2) as writer:
        writer.write(noise(1000))
        raise KeyboardInterrupt
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_writer_can_keep_what_is_finished(tmp_path):
    with AudioWriter(tmp_path / "a.wav", RATE, 2) as writer:
        writer.write(noise(1000))
        assert writer.close().seconds == 1000 / RATE
    assert soundfile.info(tmp_path / "a.wav").frames == 1000


def test_the_file_has_ordinary_permissions(tmp_path):
    (tmp_path / "plain").write_text("")
    write_audio(tmp_path / "a.wav", noise(50), RATE)
    assert (tmp_path / "a.wav").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("name", "sample_format", "message"),
    [
        ("a.mp4", SampleFormat.PCM16, r"ends in \.wav, \.flac, \.ogg, got \.mp4"),
        ("a", SampleFormat.PCM16, "got no suffix"),
        ("a.flac", SampleFormat.FLOAT, "FLAC holds integers"),
        ("gone/a.wav", SampleFormat.PCM16, "gone does not exist"),
        ("dir.wav", SampleFormat.PCM16, "is a directory"),
    ],
)
def test_an_impossible_name_is_refused_before_anything_is_spoken(tmp_path, name, sample_format, message):
    (tmp_path / "dir.wav").mkdir()
    with pytest.raises(AudioError, match=message):
        check_output_path(tmp_path / name, sample_format)


def test_a_piece_of_another_shape_is_refused(tmp_path):
    with (
        pytest.raises(AudioError, match=r"expected \[2, samples\], got \[1, 50\]"),
        AudioWriter(tmp_path / "a.wav", RATE, 2) as writer,
    ):
        writer.write(noise(50, channels=1))
