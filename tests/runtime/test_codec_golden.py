"""The codec against upstream's own outputs (tests/data/README.md says where they come from)."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from convert.checkpoint import open_codec
from runtime.backends.torch import TorchSession
from runtime.codec import Codec
from runtime.config import CodecConfig, CodecStage, read_config_json
from runtime.graphs import codec_decode_spec, codec_encode_spec, codec_stream_spec, derived_axes, whole_blocks
from runtime.modules.codec import CodecDecode, CodecEncode, build_codec_module
from runtime.modules.codec_state import derive_codec_state, patch_order

DATA = Path(__file__).parents[1] / "data"
NANO, SFX = DATA / "nano", DATA / "sfx"
ATOL = 2e-5  # golden README
SPECS = {"codec_encode": codec_encode_spec, "codec_decode": codec_decode_spec, "codec_stream": codec_stream_spec}


class Model:
    """A codec with its modules, and sessions of any size."""

    def __init__(self, config: CodecConfig, tensors: dict[str, torch.Tensor]) -> None:
        self.config = config
        state = derive_codec_state(config, tensors)
        self.modules = {name: build_codec_module(name, config, state) for name in SPECS}

    def session(self, name: str, num_frames: int | None = None) -> TorchSession:
        spec = SPECS[name](self.config)
        if num_frames is not None:
            axes = {"B": 1} | derived_axes(self.config, num_frames)
            spec = spec.bind(**{a: n for a, n in axes.items() if a in spec.dynamic_axes()})
        return TorchSession(spec, self.modules[name], torch.device("cpu"))

    def codec(self, encode: tuple[int | None, ...] = (None,), stream: tuple[int | None, ...] = (None,)) -> Codec:
        return Codec(
            self.config,
            [self.session("codec_encode", n) for n in encode],
            [self.session("codec_stream", n) for n in stream],
        )

    def decode_at_once(self, codes: np.ndarray, first_position: int = 0) -> np.ndarray:
        """Codes [B, F, Q] through codec_decode: the windows are blocks of one graph, no ring takes part."""
        size = whole_blocks(codes.shape[1])
        padded = np.zeros((len(codes), codes.shape[2], size), np.int32)
        padded[:, :, : codes.shape[1]] = codes.transpose(0, 2, 1)
        positions = np.repeat(first_position + np.arange(size, dtype=np.int32)[None], len(codes), 0)
        waveform = self.session("codec_decode").run({"codes": padded, "positions": positions})["waveform"]
        return waveform[:, :, : codes.shape[1] * self.config.samples_per_frame]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(NANO / "tiny_codec.npz"))


@pytest.fixture(scope="module")
def model() -> Model:
    checkpoint = open_codec(NANO / "tiny_codec")
    return Model(checkpoint.config, checkpoint.tensors)


def test_encoding_gives_the_codes_of_upstream(model: Model, golden: dict[str, np.ndarray]) -> None:
    for clip in ("exact", "ragged"):
        num_frames = int(golden[f"code_len_{clip}"])
        codes = model.codec().encode(golden[f"wav_{clip}"])
        np.testing.assert_array_equal(codes, golden[f"codes_{clip}"][:num_frames])


def test_the_latents_of_the_encoder_are_those_of_upstream(model: Model, golden: dict[str, np.ndarray]) -> None:
    module = model.modules["codec_encode"]
    assert isinstance(module, CodecEncode)
    for clip in ("exact", "ragged"):
        chunks: list[torch.Tensor] = []
        hook = module.codec_encoder.register_forward_hook(lambda _m, _a, out, to=chunks: to.append(out[0]))
        model.codec().encode(golden[f"wav_{clip}"])
        hook.remove()
        latents = in_order_of_upstream(torch.cat(chunks), model.config.encoder_last_patch)
        num_frames = int(golden[f"code_len_{clip}"])  # upstream computes a partial frame behind; callers drop it
        np.testing.assert_allclose(latents.T, golden[f"encoder_hidden_{clip}"][:, :num_frames], atol=ATOL, rtol=0)


def test_decoding_at_once_gives_every_stage_of_upstream(model: Model, golden: dict[str, np.ndarray]) -> None:
    module = model.modules["codec_decode"]
    assert isinstance(module, CodecDecode)
    stages: list[torch.Tensor] = []
    hooks = [m.register_forward_hook(lambda _m, _a, out: stages.append(out)) for m in module.codec_decoder.stages]
    waveform = model.decode_at_once(golden["decode_codes"][None])[0]
    for hook in hooks:
        hook.remove()
    codes = torch.from_numpy(golden["decode_codes"].T.astype(np.int32))[None]
    latents = in_order_of_upstream(module.latents(codes)[0], model.config.decoder[0].patch_size)
    np.testing.assert_allclose(latents.T, golden["decode_latent"], atol=ATOL, rtol=0)
    patches = [2, 2, 2, 24]
    for out, stage, patch in zip(stages, model.config.decoder, patches, strict=True):
        first64 = in_order_of_upstream(out.flatten(1, 2)[0, :64], patch)
        np.testing.assert_allclose(first64.T, golden[f"decode_after_stage{stage.index}_first64"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(waveform, golden["decode_wav"], atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "chunks", [(1, 2, 4, 8, 1, 16, 28), (60,), (7, 7, 7, 7, 7, 7, 7, 11), (1,) * 20 + (40,), (59, 1)]
)
def test_any_chunking_gives_the_waveform_of_upstream(
    model: Model, golden: dict[str, np.ndarray], chunks: tuple[int, ...]
) -> None:
    ends = np.cumsum(chunks)
    with model.codec().stream() as stream:
        pieces = [stream.push(golden["decode_codes"][end - n : end]) for n, end in zip(chunks, ends, strict=True)]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), golden["decode_wav"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("sizes", [(1,), (8,), (1, 8), (3, 25), (64,)])
def test_sessions_of_fixed_sizes_give_the_same_waveform(
    model: Model, golden: dict[str, np.ndarray], sizes: tuple[int, ...]
) -> None:
    waveform = model.codec(stream=sizes).decode(golden["decode_codes"])
    np.testing.assert_allclose(waveform, golden["decode_wav"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("sizes", [(1,), (16, 32), (3,), (48,)])
def test_encoders_of_fixed_sizes_give_the_same_codes(
    model: Model, golden: dict[str, np.ndarray], sizes: tuple[int, ...]
) -> None:
    codes = model.codec(encode=sizes).encode(golden["wav_exact"])
    np.testing.assert_array_equal(codes, golden["codes_exact"])


def test_fewer_codebooks_decode_as_upstream_decodes_them(model: Model, golden: dict[str, np.ndarray]) -> None:
    waveform = model.codec().decode(golden["decode_codes"][:4, :8])
    np.testing.assert_allclose(waveform, golden["decode_wav_nq8"], atol=ATOL, rtol=0)


def test_the_ring_holds_the_keys_of_upstream(model: Model, golden: dict[str, np.ndarray]) -> None:
    """The golden positions are those after 15 frames; the golden keys turned out to be those after all 60 (upstream
    shifted its cache in place after it was recorded): tokens 215 to 239."""
    stage, stream = model.config.decoder[0], model.codec().stream()
    stream.push(golden["decode_codes"][:15])
    feeds = stream._open_rings().feeds()
    frames = np.unique(golden["stream_state_after15_pos_layer0"] // stage.tokens_per_frame)
    np.testing.assert_array_equal(feeds["past_positions_0"][0, frames % stage.ring_frames], frames)
    stream.push(golden["decode_codes"][15:])
    feeds = stream._open_rings().feeds()
    frames, within = np.divmod(np.arange(215, 240), stage.tokens_per_frame)
    rows = (frames % stage.ring_frames) * stage.tokens_per_frame + within
    keys = pairs_from_halves(feeds["past_key_0"][0][:, rows], stage)
    np.testing.assert_allclose(keys, golden["stream_state_after15_k_layer0"], atol=ATOL, rtol=0)


def test_rows_of_a_batch_do_not_touch_each_other(model: Model, golden: dict[str, np.ndarray]) -> None:
    """Upstream decoded rows of 20 and 7 frames together; row 1 holds the golden codes from frame 20 on."""
    codes = np.stack([golden["decode_codes"][:20], np.roll(golden["decode_codes"], -20, 0)[:20]])
    together = model.decode_at_once(codes)
    for row in (0, 1):
        alone = model.decode_at_once(codes[row : row + 1])
        np.testing.assert_allclose(together[row], alone[0], atol=1e-6, rtol=0)
    np.testing.assert_allclose(together[1, :, : 7 * 384], golden["batch_decode_row1"], atol=ATOL, rtol=0)


def test_the_waveform_does_not_depend_on_where_the_positions_start(model: Model, golden: dict[str, np.ndarray]) -> None:
    """RoPE is relative and its tables are exact: half an hour into a stream nothing has drifted."""
    waveform = model.decode_at_once(golden["decode_codes"][None], first_position=2**15 - 64)[0]
    np.testing.assert_allclose(waveform, golden["decode_wav"], atol=ATOL, rtol=0)


def test_real_codes_through_the_real_quantizer_give_the_published_latents() -> None:
    """The first 64 of 768 latents, of 24 real frames; only the codebook rows that they use are stored."""
    real = dict(np.load(NANO / "codec_real_quantizer.npz"))
    directory = NANO / "tiny_codec"
    raw = read_config_json(directory)
    raw["quantizer_kwargs"] |= {"codebook_size": 24, "rvq_dim": 512, "input_dim": 48, "output_dim": 48}
    config = CodecConfig.from_dict(raw)
    tensors = load_file(directory / "model-00001-of-00001.safetensors")
    for q in range(16):
        name = f"quantizer.quantizers.{q}"
        tensors[f"{name}.codebook.weight"] = torch.from_numpy(real[f"rows_{q}"])
        put_plain(tensors, f"{name}.out_proj", real[f"out_proj_w_{q}"].T, real[f"out_proj_b_{q}"])
        put_plain(tensors, f"{name}.in_proj", np.ones((8, 512)), np.zeros(8))
    put_plain(tensors, "quantizer.input_proj", np.ones((512, 48)), np.zeros(512))
    put_plain(tensors, "quantizer.output_proj", real["output_proj_w"].T[:48], real["output_proj_b"][:48])
    module = build_codec_module("codec_decode", config, derive_codec_state(config, tensors))
    assert isinstance(module, CodecDecode)
    codes = torch.arange(24, dtype=torch.int32).repeat(1, 16, 1)  # frame t uses row t of the stored rows
    latents = in_order_of_upstream(module.latents(codes)[0], config.decoder[0].patch_size)
    np.testing.assert_allclose(latents.T, real["latent"][:48], atol=2e-6, rtol=0)
    codes[:, 8:] = config.codebook_size
    latents = in_order_of_upstream(module.latents(codes)[0], config.decoder[0].patch_size)
    np.testing.assert_allclose(latents[:10].T, real["latent_nq8"][:48], atol=2e-6, rtol=0)


@pytest.fixture(scope="module")
def golden_24khz() -> dict[str, np.ndarray]:
    return dict(np.load(SFX / "golden_codec.npz"))


@pytest.fixture(scope="module")
def model_24khz(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The codec of MOSS-SoundEffect: mono, older tensor names, projections only where sizes differ, 32 codebooks."""
    directory = tmp_path_factory.mktemp("codec_24khz")
    runpy.run_path(str(Path(__file__).parents[1] / "sfx" / "tiny.py"))["write_codec"](directory)
    checkpoint = open_codec(directory)
    return Model(checkpoint.config, checkpoint.tensors)


def test_the_24_khz_codec_decodes_as_upstream(model_24khz: Model, golden_24khz: dict[str, np.ndarray]) -> None:
    codec = model_24khz.codec()
    waveform = codec.decode(golden_24khz["codes_a"].T.astype(np.int32))
    np.testing.assert_allclose(waveform[0, ::7], golden_24khz["wav_a_every7"], atol=ATOL, rtol=0)
    whole = codec.decode(golden_24khz["codes_long"].T.astype(np.int32))
    np.testing.assert_allclose(whole[0, ::97], golden_24khz["wav_long_whole_every97"], atol=ATOL, rtol=0)


def test_the_24_khz_codec_decodes_in_the_chunks_of_upstream(
    model_24khz: Model, golden_24khz: dict[str, np.ndarray]
) -> None:
    codec = model_24khz.codec()
    waveform = codec.decode(golden_24khz["codes_a"].T.astype(np.int32), upstream_chunk_frames=10)
    np.testing.assert_allclose(waveform[0, ::7], golden_24khz["wav_a_chunk_0p8_every7"], atol=ATOL, rtol=0)
    codes = golden_24khz["codes_long"].T.astype(np.int32)
    chunked = codec.decode(codes, upstream_chunk_frames=100)
    np.testing.assert_allclose(chunked[0, ::97], golden_24khz["wav_long_chunk8_every97"], atol=ATOL, rtol=0)
    assert np.abs(chunked - codec.decode(codes)).max() > 1e-3  # upstream's chunks are audibly not the whole window


def test_the_24_khz_codec_encodes_as_upstream(model_24khz: Model, golden_24khz: dict[str, np.ndarray]) -> None:
    codes = model_24khz.codec().encode(golden_24khz["enc_wav"][None])
    np.testing.assert_array_equal(codes, golden_24khz["enc_codes"].T[:6])


def in_order_of_upstream(x: torch.Tensor, patch_size: int) -> np.ndarray:
    """Values [n, size] before a patch: upstream has (value, token) where the modules have (token, value)."""
    result = np.empty(x.shape, np.float32)
    result[:, patch_order(patch_size, x.shape[1]).numpy()] = x.detach().numpy()
    return result


def pairs_from_halves(keys: np.ndarray, stage: CodecStage) -> np.ndarray:
    halves = keys.reshape(*keys.shape[:-1], 2, stage.head_size // 2)
    return halves.swapaxes(-1, -2).reshape(keys.shape)


def put_plain(tensors: dict[str, torch.Tensor], name: str, weight: np.ndarray, bias: np.ndarray) -> None:
    """Store a 1x1 convolution so that its weight norm gives back `weight`."""
    direction = torch.from_numpy(np.ascontiguousarray(weight, dtype=np.float32))[:, :, None]
    tensors[f"{name}.parametrizations.weight.original1"] = direction
    tensors[f"{name}.parametrizations.weight.original0"] = direction.norm(dim=(1, 2), keepdim=True)
    tensors[f"{name}.bias"] = torch.from_numpy(np.ascontiguousarray(bias, dtype=np.float32))
