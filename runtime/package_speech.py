"""A published package as something that speaks: `run-om say --artifacts PACKAGE --as-published`.

The loop, tokenizer, text rules and audio files are ours; every graph is the package's. The manifest that the
synthesizer reads is made here, from what the package says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.config import CodecConfig, ModelConfig
from runtime.errors import ManifestError
from runtime.manifest import Manifest, sha256_of
from runtime.onnx_package import OnnxPackage, open_package
from runtime.package_codec import PublishedCodec
from runtime.package_graphs import CODEC_FILES
from runtime.package_model import MAX_ROWS, PublishedFrameModel
from runtime.prompt import Template
from runtime.sampling import TOP_K_MAX
from runtime.synthesizer import TOKENIZER_NAME, Synthesizer
from runtime.voices import Voice, VoiceStore, check_name, codec_id


@dataclass(frozen=True, slots=True)
class CodecFormat(CodecConfig):
    """What a package says of its codec: the format of codes and sound. Its layers are not said: there are no stages."""

    def __post_init__(self) -> None:
        """Nothing to compare: sizes of layers are unknown."""


class PackageVoices(VoiceStore):
    """The built-in voices of a package first, then the stored ones."""

    def __init__(self, package: OnnxPackage, codec: str) -> None:
        super().__init__()
        self._built_in = {v.name: v for v in package_voices(package, codec)}

    def load(self, name: str) -> Voice:
        return self._built_in.get(check_name(name)) or super().load(name)

    def names(self) -> list[str]:
        return sorted({*self._built_in, *super().names()})


def package_voices(package: OnnxPackage, codec: str, samples_per_frame: int | None = None) -> list[Voice]:
    """The built-in voices as voices of ours; `codec` is the identity that they are stored with."""
    samples_per_frame = samples_per_frame or package.codec_value("downsample_rate", "samples_per_frame")
    frame_seconds = samples_per_frame / package.codec_value("sample_rate", "sampling_rate")
    notes = (f"built-in voice of {package.directory.name}",)

    def voice(name: str, codes: npt.NDArray[np.int32]) -> Voice:
        seconds = round(len(codes) * frame_seconds, 3)
        return Voice(check_name(name), codes, f"{name} (built in)", "", codec, seconds, None, notes)

    return [voice(name, codes) for name, codes in package.voices().items()]


def open_published(
    directory: Path, threads: int | None = None, template: Template = Template.ONNX
) -> tuple[Synthesizer, PackageVoices]:
    """A synthesizer over the package's own graphs, and its voices."""
    package = open_package(directory)
    if package.tokenizer is None or package.tokenizer.name != TOKENIZER_NAME:
        raise ManifestError(f"{package.directory}: {TOKENIZER_NAME} is missing; without it no text can be read")
    model = PublishedFrameModel(package, threads)
    try:
        manifest = describe_package(package, model)
        codec = PublishedCodec(package, manifest.codec, threads)
    except BaseException:
        model.close()
        raise
    return Synthesizer(manifest, model, codec, template), PackageVoices(package, codec_id(manifest))


def describe_package(package: OnnxPackage, model: PublishedFrameModel) -> Manifest:
    """The package as a manifest without graphs of ours. Numbers that neither JSON nor interfaces tell are 0."""
    num_heads, head_size = model.cache_shape
    sizes = package.codebook_sizes or (model.codebook_size,) * model.n_vq
    config = ModelConfig(
        num_layers=model.num_layers,
        local_layers=model.local_layers,
        hidden_size=num_heads * head_size,
        num_heads=num_heads,
        inner_size=0,
        layer_norm_eps=0.0,
        rope_base=0.0,
        max_positions=MAX_ROWS,
        vocab_size=model.vocab_size,
        n_vq=model.n_vq,
        codebook_sizes=sizes,
        sample_rate_hz=package.codec_value("sample_rate", "sampling_rate"),
        **package.special_ids,
    )
    codec = CodecFormat(
        sample_rate_hz=config.sample_rate_hz,
        num_channels=package.codec_value("channels", "number_channels"),
        samples_per_frame=package.codec_value("downsample_rate", "samples_per_frame"),
        encoder=(),
        encoder_last_patch=0,
        decoder=(),
        decoder_last_patch=0,
        latent_size=0,
        rvq_size=0,
        n_vq=package.codec_value("num_quantizers"),
        codebook_size=max(sizes),
        codebook_dim=0,
    )
    assert package.tokenizer is not None
    return Manifest(
        directory=package.tokenizer.parent,
        name=package.directory.name,
        made_up=package.made_up,
        source={
            "package": str(package.directory),
            "codec": {"files": package.hashes(CODEC_FILES)},
            "defaults": package.speak_defaults(),
        },
        model=config,
        codec=codec,
        limits={"max_positions": MAX_ROWS, "top_k_max": TOP_K_MAX},
        graphs={},
        data_files={TOKENIZER_NAME: sha256_of(package.tokenizer)} | package.hashes(),
        weights={},
        versions={},
    )
