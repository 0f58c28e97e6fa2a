"""What runtime/codec.py does around the graphs: sizes, rings, refusals. The sessions here only record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.assembly import open_codec
from runtime.backends.cann_provider import CannBackend
from runtime.backends.ort import OrtBackend
from runtime.codec import Codec
from runtime.codec_rings import MAX_TOKENS, Chunk, Span, spans
from runtime.config import CodecConfig, CodecStage, read_config_json
from runtime.errors import AudioError, CapacityError, CheckpointError, GenerationError
from runtime.graphs import NO_FRAME, codec_encode_spec, codec_stream_spec, derived_axes, ring_axes
from runtime.manifest import Manifest
from runtime.spec import Array, GraphSpec

RAW = read_config_json(Path(__file__).parents[1] / "data" / "nano" / "tiny_codec")
CONFIG = CodecConfig.from_dict(RAW)


class RecordingSession:
    """Answers zeros, except that every new row holds the frame that it belongs to."""

    def __init__(self, spec: GraphSpec) -> None:
        self.spec, self.feeds, self.closed = spec, [], False

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.spec.check_feeds(feeds)
        self.feeds.append(dict(feeds))
        positions = feeds["positions"][0]
        bound = self.spec.bind(**axes_of(self.spec, len(positions)))
        outputs: dict[str, Array] = {t.name: np.zeros(t.bound_shape, t.dtype) for t in bound.outputs}
        for name, value in outputs.items():
            if name.startswith("new_"):
                value[:] = np.repeat(positions, value.shape[2] // len(positions))[:, None]
        return outputs

    def close(self) -> None:
        self.closed = True


def axes_of(spec: GraphSpec, num_frames: int) -> dict[str, int]:
    axes = {"B": 1} | derived_axes(CONFIG, num_frames)
    return {name: axes[name] for name in spec.dynamic_axes()}


def sessions(spec: GraphSpec, sizes: tuple[int | None, ...]) -> list[RecordingSession]:
    return [RecordingSession(spec if n is None else spec.bind(**axes_of(spec, n))) for n in sizes]


class Setup:
    def __init__(self, encode: tuple[int | None, ...] = (None,), stream: tuple[int | None, ...] = (None,)) -> None:
        self.encode = sessions(codec_encode_spec(CONFIG), encode)
        self.stream = sessions(codec_stream_spec(CONFIG), stream)
        self.codec = Codec(CONFIG, self.encode, self.stream)

    def launches(self) -> list[int]:
        return [f["codes"].shape[2] for s in self.stream for f in s.feeds]


def codes(num_frames: int, value: int = 0) -> np.ndarray:
    return np.full((num_frames, 16), value, np.int32)


def test_a_long_decode_is_many_launches_of_one_size() -> None:
    """Work and memory per launch are constant, so both targets of long audio follow: linear time, bounded memory."""
    setup = Setup()
    waveform = setup.codec.decode(codes(3750))  # five minutes
    assert waveform.shape == (2, 3750 * 384)
    assert setup.launches() == [8] * 468 + [6]


def test_rings_are_fed_where_they_lie() -> None:
    setup = Setup()
    setup.codec.decode(codes(40))
    first, *later = setup.stream[0].feeds
    for feeds in later:
        assert all(np.shares_memory(feeds[name], first[name]) for name in first if name.startswith("past_"))
    assert all(array.flags["C_CONTIGUOUS"] for feeds in setup.stream[0].feeds for array in feeds.values())


def test_a_graph_is_shown_the_slots_in_use_and_not_the_empty_ones() -> None:
    setup = Setup()
    with setup.codec.stream() as stream:
        for n in (1, 1, 6, 8, 200):
            stream.push(codes(n))
    with setup.codec.stream() as stream:  # the next one begins small again
        stream.push(codes(1))
    for number, stage in enumerate(CONFIG.decoder):
        shown = [feeds[f"past_positions_{number}"].shape[1] for feeds in setup.stream[0].feeds]
        expected = [8, 8, 8, 8, *range(16, 216, 8), 8]
        assert shown == [min(slots, stage.ring_frames) for slots in expected]


def test_a_graph_with_bound_rings_gets_whole_ones() -> None:
    setup = Setup(stream=(8,))
    setup.codec.decode(codes(8))
    for number, stage in enumerate(CONFIG.decoder):
        assert setup.stream[0].feeds[0][f"past_positions_{number}"].shape == (1, stage.ring_frames)


def test_the_cann_provider_gets_whole_rings(tiny_artifacts: Path, monkeypatch) -> None:
    opened: list[GraphSpec] = []

    class Provider(CannBackend):
        def __init__(self) -> None:
            self.name = "ort cann"

        def open(self, spec: GraphSpec, path: Path) -> Any:
            opened.append(spec)
            return OrtBackend().open(spec, path)

    manifest = Manifest.load(tiny_artifacts)
    open_codec(manifest, Provider()).close()
    assert [spec.name for spec in opened] == ["codec_encode", "codec_stream"]
    assert all(axis not in spec.dynamic_axes() for spec in opened for axis in ring_axes(manifest.codec))
    assert all("F" in spec.dynamic_axes() for spec in opened)


@pytest.mark.parametrize(
    ("sizes", "num_frames", "expected"),
    [((1, 8), 3, [8]), ((1, 8), 1, [1]), ((8,), 17, [8, 8, 8]), ((1, 8), 17, [1, 8, 8]), ((4, 2), 3, [4])],
)
def test_the_smallest_session_that_holds_the_rest_runs_it(
    sizes: tuple[int, ...], num_frames: int, expected: list[int]
) -> None:
    setup = Setup(stream=sizes)
    setup.codec.decode(codes(num_frames))
    assert sorted(setup.launches()) == expected


@pytest.mark.parametrize("chunks", [[1] * 40, [5, 9, 2, 20], [40]])
def test_after_any_chunking_each_slot_holds_the_newest_frame_of_its_residue(chunks: list[int]) -> None:
    setup = Setup(stream=(8,))  # chunks that are no multiple of 8 are padded; padding must stay out of the rings
    stream = setup.codec.stream()
    for n in chunks:
        stream.push(codes(n))
    rings, total = stream._open_rings(), sum(chunks)
    layers = [number for number, stage in enumerate(CONFIG.decoder) for _ in range(stage.num_layers)]
    for layer, number in enumerate(layers):
        stage = CONFIG.decoder[number]
        slots = np.arange(stage.ring_frames)
        newest = total - 1 - (total - 1 - slots) % stage.ring_frames
        np.testing.assert_array_equal(rings.past_positions[f"past_positions_{number}"][0], newest)
        for kind in ("key", "value"):
            rows = rings.feeds()[f"past_{kind}_{layer}"][0, :, :, 0]
            np.testing.assert_array_equal(rows, np.repeat(newest, stage.tokens_per_frame)[None].repeat(4, 0))


def test_more_frames_than_slots_leave_the_last_ones() -> None:
    stage = CONFIG.decoder[0]  # a window of 25 tokens, 4 per frame: 7 slots
    assert spans(stage, Chunk(8, 0, 3)) == [Span(0, 0, 3)]
    assert spans(stage, Chunk(8, 5, 4)) == [Span(5, 5, 2), Span(0, 7, 2)]
    assert spans(stage, Chunk(20, 3, 20)) == [Span(2, 16, 5), Span(0, 21, 2)]


def test_rings_go_to_the_next_stream_and_hide_what_they_held() -> None:
    setup = Setup()
    with setup.codec.stream() as stream:
        stream.push(codes(9))
        rings = stream._open_rings()
    again = setup.codec.stream()
    assert again._open_rings() is rings
    assert all((positions == NO_FRAME).all() for positions in rings.past_positions.values())
    other = setup.codec.stream()
    assert other._open_rings() is not rings


def test_codebooks_that_are_not_given_are_marked_absent() -> None:
    setup = Setup()
    setup.codec.decode(codes(2)[:, :5])
    fed = setup.stream[0].feeds[0]["codes"][0]
    assert (fed[:5] == 0).all()
    assert (fed[5:] == CONFIG.codebook_size).all()


def test_a_clip_is_encoded_frame_by_frame_and_its_partial_frame_dropped() -> None:
    setup = Setup()
    samples = np.arange(2 * (384 * 10 + 200), dtype=np.float32).reshape(2, -1)
    assert setup.codec.encode(samples).shape == (10, 16)
    fed = [f["waveform"][0] for f in setup.encode[0].feeds]
    np.testing.assert_array_equal(np.concatenate(fed, axis=1), samples[:, : 384 * 10])
    assert [f["positions"][0].tolist() for f in setup.encode[0].feeds] == [list(range(8)), [8, 9]]


def test_a_long_clip_is_encoded_over_the_same_rings() -> None:
    setup = Setup(encode=(4, 32))
    setup.codec.encode(np.ones((2, 384 * 70), np.float32))
    setup.codec.encode(np.ones((2, 384 * 3), np.float32))
    small, large = setup.encode
    assert [len(s.feeds) for s in setup.encode] == [1, 3]  # 32 + 32 + 6 padded to 32; then 3 padded to 4
    past = [name for name in small.feeds[0] if name.startswith("past_")]
    assert all(np.shares_memory(small.feeds[0][name], large.feeds[0][name]) for name in past)
    fed = small.feeds[0]["waveform"][0]
    assert (fed[:, : 384 * 3] == 1).all()
    assert (fed[:, 384 * 3 :] == 0).all()


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (np.zeros((1, 4000), np.float32), r"expected \[2, samples\], got \[1, 4000\]"),
        (np.zeros(4000, np.float32), r"expected \[2, samples\], got \[4000\]"),
        (np.zeros((2, 383), np.float32), "383 samples are shorter than one frame of 384"),
        (np.full((2, 400), np.nan, np.float32), "NaN or infinite"),
    ],
)
def test_a_clip_that_cannot_be_encoded_is_refused(clip: np.ndarray, message: str) -> None:
    with pytest.raises(AudioError, match=message):
        Setup().codec.encode(clip)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (codes(4).T[:, :, None], r"expected whole numbers \[frames, 1 to 16\], got int32\[16, 4, 1\]"),
        (np.zeros((3, 17), np.int32), r"got int32\[3, 17\]"),
        (codes(0), r"got int32\[0, 16\]"),
        (np.zeros((3, 16), np.float32), r"got float32\[3, 16\]"),
        (codes(2, 65), "expected 0 to 63"),
        (codes(2, -1), "got -1 to -1"),
    ],
)
def test_codes_that_cannot_be_decoded_are_refused(wrong: np.ndarray, message: str) -> None:
    setup = Setup()
    with pytest.raises(GenerationError, match=message):
        setup.codec.decode(wrong)
    assert setup.launches() == []


def test_a_stream_ends_where_the_position_tables_end() -> None:
    stream = Setup().codec.stream()
    stream.num_frames = MAX_TOKENS // 32 - 1
    stream.push(codes(1))
    with pytest.raises(CapacityError, match=r"32769 frames: .* end at 32768"):
        stream.push(codes(1))
    padded = Setup(stream=(8,)).codec.stream()
    padded.num_frames = MAX_TOKENS // 32 - 7
    with pytest.raises(CapacityError):  # the padding would read beyond the tables
        padded.push(codes(1))


def test_a_closed_stream_says_so() -> None:
    stream = Setup().codec.stream()
    stream.close()
    with pytest.raises(GenerationError, match="closed"):
        stream.push(codes(1))


def test_upstream_chunks_need_windows_of_whole_frames() -> None:
    with pytest.raises(GenerationError, match="stage 1 sees 25 tokens"):
        Setup().codec.decode(codes(20), upstream_chunk_frames=10)


def test_closing_the_codec_closes_every_session() -> None:
    setup = Setup(encode=(8, 16), stream=(1, 8))
    with setup.codec:
        pass
    assert all(s.closed for s in (*setup.encode, *setup.stream))


def test_a_codec_without_an_encoder_only_decodes() -> None:
    codec = Codec(CONFIG, [], sessions(codec_stream_spec(CONFIG), (None,)))
    assert codec.decode(codes(3)).shape == (2, 3 * 384)
    with pytest.raises(GenerationError, match="only decodes"):
        codec.encode(np.zeros((2, 400), np.float32))
    with pytest.raises(GenerationError, match="at least one session of codec_stream"):
        Codec(CONFIG, sessions(codec_encode_spec(CONFIG), (None,)), [])


def edited(**changes: Any) -> CodecConfig:
    return CodecConfig.from_dict(RAW | changes)


def test_a_config_whose_parts_do_not_fit_is_refused() -> None:
    encoder, decoder = RAW["encoder_kwargs"], RAW["decoder_kwargs"]
    with pytest.raises(CheckpointError, match="ends with 4 tokens per frame"):
        edited(encoder_kwargs=encoder[:-1])
    with pytest.raises(CheckpointError, match="codec stage 3: input_dimension 49, but it gets 48"):
        edited(encoder_kwargs=[*encoder[:3], encoder[3] | {"input_dimension": 49}, *encoder[4:]])
    with pytest.raises(CheckpointError, match="codec stage 1: input_dimension 13, but it gets 12"):
        edited(decoder_kwargs=[decoder[0], decoder[1] | {"input_dimension": 13}, *decoder[2:]])
    with pytest.raises(CheckpointError, match="the decoder's patches do not give 384 samples per frame"):
        edited(decoder_kwargs=[*decoder[:-1], decoder[-1] | {"patch_size": 12}])
    with pytest.raises(CheckpointError, match="the decoder ends with 23 values per token, expected 24"):
        edited(decoder_kwargs=[*decoder[:-2], decoder[-2] | {"output_dimension": 23}, decoder[-1]])
    with pytest.raises(CheckpointError, match="two patchers in a row"):
        edited(decoder_kwargs=[decoder[0], *decoder])
    with pytest.raises(CheckpointError, match="enable_channel_interleave"):
        edited(enable_channel_interleave=False)


def test_a_stage_without_a_patcher_and_mono_are_read() -> None:
    stage = CodecStage(0, 1, 1, 8, 8, 8, 2, 16, 5, 2, 10_000.0)
    assert (stage.head_size, stage.ring_frames) == (4, 3)
    with pytest.raises(CheckpointError, match="even heads"):
        CodecStage(0, 1, 1, 9, 9, 9, 3, 16, 5, 2, 10_000.0)


def test_a_window_is_rounded_to_tokens_and_not_cut() -> None:
    decoder = RAW["decoder_kwargs"]
    stage = edited(decoder_kwargs=[*decoder[:3], decoder[3] | {"context_duration": 0.29}, *decoder[4:]]).decoder[1]
    assert 100 * 0.29 < 29  # in floating point
    assert (stage.tokens_per_frame, stage.context) == (8, 29)
