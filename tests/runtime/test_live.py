"""Speech while it is made: how large a chunk may be, what a listener meets, and what lies in the file meanwhile."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from runtime.audio_writer import LiveWriter, SampleFormat
from runtime.errors import AudioError
from runtime.live import CHUNKS, Live

RATE, FRAME = 48_000, 3840  # a frame is 80 ms


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def writer(path: Path) -> LiveWriter:
    return LiveWriter(path, RATE, 2, SampleFormat.PCM16, mono=False)


def play(tmp_path: Path, seconds_per_frame: float, num_frames: int) -> Live:
    """A stream whose frames take so long each; the codec takes a tenth of that."""
    clock = Clock()
    with writer(tmp_path / "live.wav") as out:
        live = Live(out, RATE, clock)
        left = num_frames
        while left:
            chunk = min(live.chunk(), left)
            clock.now += chunk * seconds_per_frame
            live.decoded(np.zeros((2, chunk * FRAME), np.float32), chunk, 0.1 * chunk * seconds_per_frame)
            left -= chunk
    return live


def test_the_first_frame_goes_out_alone_and_chunks_grow_with_the_lead(tmp_path: Path) -> None:
    figures = play(tmp_path, 0.020, 100).figures  # four times real time
    assert figures.first_audio_ms == pytest.approx(20) and figures.underrun_seconds == 0
    assert figures.chunks[8] >= 10 and figures.chunks[1] <= 3
    assert sum(frames * calls for frames, calls in figures.chunks.items()) == 100
    assert figures.codec_share == pytest.approx(0.1)


def test_a_stream_that_falls_behind_keeps_its_chunks_small_and_counts_the_silence(tmp_path: Path) -> None:
    figures = play(tmp_path, 0.100, 50).figures  # slower than the 80 ms that a frame lasts
    assert figures.chunks == {1: 50}
    assert figures.underrun_seconds == pytest.approx(49 * 0.020)


def test_a_chunk_never_takes_more_than_half_of_the_lead(tmp_path: Path) -> None:
    clock = Clock()
    with writer(tmp_path / "live.wav") as out:
        live = Live(out, RATE, clock)
        for _ in range(40):
            chunk, before = live.chunk(), live._played_until
            assert chunk in CHUNKS
            clock.now += 0.03 * chunk
            if before is not None and chunk > 1:
                assert clock.now <= before - 0.03 * chunk + 1e-9
            live.decoded(np.zeros((2, chunk * FRAME), np.float32), chunk, 0.0)


def test_pauses_are_part_of_the_lead(tmp_path: Path) -> None:
    clock = Clock()
    with writer(tmp_path / "live.wav") as out:
        live = Live(out, RATE, clock)
        live.decoded(np.zeros((2, FRAME), np.float32), 1, 0.0)
        clock.now += 0.07
        live.decoded(np.zeros((2, FRAME), np.float32), 1, 0.0)
        assert live.chunk() == 1
        live.silence(np.zeros((2, RATE), np.float32))
        assert live.chunk() == 4


def test_a_growing_wav_can_be_read_at_any_time_and_has_its_length_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "live.wav"
    tone = 0.5 * np.ones((2, 1000), np.float32)
    with writer(path) as out:
        out.write(tone)
        header = path.read_bytes()[:44]
        assert struct.unpack("<I", header[40:]) == (0xFFFFFFFF,)
        samples, rate = soundfile.read(path)
        assert (rate, samples.shape) == (RATE, (1000, 2))
        out.write(tone)
    assert struct.unpack("<I", path.read_bytes()[40:44]) == (2 * 2 * 2000,)
    assert soundfile.info(path).frames == 2000


def test_samples_for_standard_output_are_raw_and_a_reader_that_left_is_one_line() -> None:
    read, write = os.pipe()
    kept = os.dup(1)
    os.dup2(write, 1)
    try:
        with writer(Path("-")) as out:
            out.write(np.array([[0.0, 1.0], [-1.0, 2.0]], np.float32))
            assert struct.unpack("<4h", os.read(read, 100)) == (0, -32767, 32767, 32767)  # left, right, left, right
            os.close(read)
            with pytest.raises(AudioError, match=r"standard output: writing failed \(Broken pipe\)"):
                out.write(np.zeros((2, 10), np.float32))
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(write)


@pytest.mark.parametrize("name", ["speech.flac", "speech", "missing/speech.wav"])
def test_a_place_that_cannot_be_streamed_to_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AudioError, match=r"ends in .wav|does not exist"):
        writer(tmp_path / name)
