"""A published ONNX package -> CHECKPOINT/model and CHECKPOINT/codec, for `convert-moss export` and `build`.

    open_package  ->  recover_llm, recover_codec (structure)  ->  write beside, read back  ->  prove  ->  move
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.checkpoint import Checkpoint, open_codec, open_model
from convert.import_checkpoint import write_codec, write_model
from convert.import_codec import recover_codec
from convert.import_llm import recover_llm
from convert.import_origin import record_origin
from convert.import_proof import prove
from convert.import_recovered import Recovered
from runtime.config import CodecConfig
from runtime.errors import CheckpointError
from runtime.onnx_package import OnnxPackage, open_package
from runtime.package_graphs import CODEC_FILES, LLM_FILES, PACKAGE_FILES
from runtime.package_speech import package_voices
from runtime.voices import Voice, VoiceStore, codec_files_id

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made."""

    model: Path
    codec: Path
    record: dict[str, Any]  # as config.json has it: directory, files, notices, counts, proof
    voices: tuple[Voice, ...]  # the built-in ones, with the identity of the recovered codec


def import_package(source: Path, directory: Path, report: Report = lambda line: None) -> Imported:
    """Recover, write, prove; nothing appears under `directory` unless all of it held."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not empty; choose another directory, or remove it")
    package = open_package(source)
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        record, voices = _recover(package, scratch, report)
        scratch.chmod(0o755)
        scratch.replace(directory)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return Imported(directory / "model", directory / "codec", record, voices)


def store_voices(voices: tuple[Voice, ...], store: VoiceStore, report: Report) -> int:
    """Store built-in voices for `run-om say --voice NAME`; a name that is taken by another voice is left as it is."""
    stored = 0
    known = set(store.names())
    for voice in voices:
        if voice.name not in known:
            store.add(voice)
            stored += 1
        elif store.load(voice.name).codec_id != voice.codec_id:
            report(f"notice: voice {voice.name} exists for another codec and stays; run-om voice remove {voice.name}")
    return stored


def _recover(package: OnnxPackage, scratch: Path, report: Report) -> tuple[dict[str, Any], tuple[Voice, ...]]:
    """Fill `scratch`; return the record and the built-in voices."""
    llm, audio = Recovered(), Recovered()
    shape = recover_llm({g: p for g, p in package.graphs.items() if g in LLM_FILES}, llm)
    report(f"language model: {len(llm.tensors)} tensors, {llm.num_compared} of them equal in two graphs or more")
    codec_shape = recover_codec({g: p for g, p in package.graphs.items() if g in CODEC_FILES}, audio)
    report(f"codec: {len(audio.tensors)} tensors, {audio.num_compared} of them equal in two graphs or more")
    missing = [file for graph, file in PACKAGE_FILES.items() if graph not in package.graphs]
    notices = [*llm.notices, *audio.notices, *(f"{file} is not there: nothing is checked by it" for file in missing)]
    for line in notices:
        report(f"notice: {line}")
    write_model(scratch / "model", package, shape, llm.tensors)
    write_codec(scratch / "codec", package, codec_shape, audio.tensors)
    tensors = {"model": (len(llm.tensors), llm.num_compared), "codec": (len(audio.tensors), audio.num_compared)}
    tolerances = llm.tolerance, audio.tolerance
    llm.tensors.clear()
    audio.tensors.clear()
    model, codec = open_model(scratch / "model"), open_codec(scratch / "codec")
    voices = _voices(package, codec)
    proof = prove(package, model, codec, *tolerances)
    for name, worst in proof.items():
        report(f"proved: {name}: largest difference {worst:.2g}")
    origin = {"directory": str(package.directory.resolve()), "files": package.hashes()}
    counts = {kind: {"tensors": total, "in_two_graphs": twice} for kind, (total, twice) in tensors.items()}
    record = {**origin, "notices": notices, "recovered": counts, "proof": proof}
    record_origin(scratch / "model", record, package.speak_defaults())
    record_origin(scratch / "codec", origin)
    return record, voices


def _voices(package: OnnxPackage, codec: Checkpoint[CodecConfig]) -> tuple[Voice, ...]:
    """The built-in voices, as voices that the recovered codec encoded."""
    n_vq, size = codec.config.n_vq, codec.config.codebook_size
    voices = tuple(package_voices(package, codec_files_id(codec.files), codec.config.samples_per_frame))
    for voice in voices:
        if voice.codes.shape[1] != n_vq or voice.codes.min() < 0 or voice.codes.max() >= size:
            raise CheckpointError(
                f"built-in voice {voice.name}: codes {list(voice.codes.shape)} from {voice.codes.min()} to "
                f"{voice.codes.max()}; the codec has {n_vq} codebooks of {size} codes: download the manifest again"
            )
    return voices
