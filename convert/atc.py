"""The ATC command as data: which static graphs to compile, with which bound shapes, files and options.

Nothing here touches the disk or runs anything. Option names and legal values: docs/atc.md says where each was read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from op_patches.targets import Target
from runtime.config import CodecConfig
from runtime.errors import AtcError
from runtime.graphs import BLOCK_FRAMES, derived_axes, whole_blocks
from runtime.spec import GraphSpec

# float32 Conv runs in HF32 unless told otherwise, MatMul does not by default; both are said, so that a default that
# changes cannot change the numbers. The names are those of CANN 8.1's all_ops_impl_mode.ini.
FLOAT32_OP_TYPES = ("Conv2D", "Conv2DTransposeD", "DepthwiseConv2D", "MatMulV2", "BatchMatMulV2")
OP_PRECISION_INI = "[ByOpType]\n" + "".join(f"{name}=enable_float_32_execution\n" for name in FLOAT32_OP_TYPES)

_PATH_OPTIONS = ("--model=", "--output=", "--op_precision_mode=", "--keep_dtype=", "--modify_mixlist=")
_PATH_CHARACTER = re.compile(r"[A-Za-z0-9_./\-\u4e00-\u9fff]")
_PATH_MAX = 4096


@dataclass(frozen=True, slots=True)
class Buckets:
    """The numbers that static graphs are compiled for. Frames are 80 ms of audio each."""

    batch: int = 1
    capacity: int = 1024  # rows of the KV cache: prompt plus generated frames
    prefill: tuple[int, ...] = (128, 256, 512)  # prompt rows
    encode_frames: tuple[int, ...] = (32,)  # of a reference clip per launch
    decode_frames: tuple[int, ...] = (128,)  # 10 s at once, whole blocks; longer speech is decoded as a stream
    stream_frames: tuple[int, ...] = (1, 8)  # the first chunk, and a steady one

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            sizes = value if isinstance(value, tuple) else (value,)
            if not sizes or any(size < 1 for size in sizes) or len(set(sizes)) < len(sizes):
                raise AtcError(f"{name} {value}: expected different sizes of at least 1")
            if name == "decode_frames" and any(whole_blocks(size) != size for size in sizes):
                raise AtcError(
                    f"{name} {value}: the graph works in blocks; expected multiples of {BLOCK_FRAMES} frames"
                )
        if max(self.prefill) > self.capacity:
            raise AtcError(
                f"prefill bucket {max(self.prefill)} is longer than the cache of {self.capacity} rows; "
                "raise --capacity or drop the bucket"
            )

    def bindings(self, spec: GraphSpec, codec: CodecConfig) -> list[dict[str, int]]:
        """Every set of axes that `spec` is compiled for; the axes are exactly those the spec leaves open."""
        axes = spec.dynamic_axes()
        frames = {
            "codec_encode": self.encode_frames,
            "codec_decode": self.decode_frames,
            "codec_stream": self.stream_frames,
        }
        if "F" in axes:
            if spec.name not in frames:
                raise AtcError(f"{spec.name} has a frame axis F, but no bucket list is defined for it")
            choices = [derived_axes(codec, count) for count in sorted(frames[spec.name])]
        elif "T" in axes:
            choices = [{"T": length} for length in sorted(self.prefill)]
        else:
            choices = [{}]
        known = {"B": self.batch, "C": self.capacity}
        return [{axis: (known | choice)[axis] for axis in axes if axis in known | choice} for choice in choices]


def build_name(graph: str, axes: Mapping[str, int]) -> str:
    """File name of a compiled graph, without suffix; axes that follow from F are left out."""
    return "-".join([graph, *(f"{axis}{axes[axis]}" for axis in ("B", "T", "C", "F") if axis in axes)])


def is_mixed(target: Target) -> bool:
    return target.precision.startswith("mixed_")


def build_directory(target: Target) -> str:
    """Where the .om files of a target are, beside the manifest."""
    return f"om/{target.soc}-{target.precision}"


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that an ATC option points to."""

    option: str  # --op_precision_mode
    path: Path  # absolute
    content: str


def side_files(target: Target, directory: Path, name: str, keep_dtype: str, modify_mixlist: str) -> list[SideFile]:
    """The files that fix the precision of one build."""
    files = [SideFile("--op_precision_mode", directory / "op_precision.ini", OP_PRECISION_INI)]
    if keep_dtype:
        files.append(SideFile("--keep_dtype", directory / f"{name}.keep_dtype.txt", keep_dtype))
    if modify_mixlist:
        if not is_mixed(target):
            raise AtcError(f"--modify_mixlist works with mixed precision only, not {target.precision}")
        files.append(SideFile("--modify_mixlist", directory / f"{name}.mixlist.json", modify_mixlist))
    return files


def atc_command(
    spec: GraphSpec, model: Path, output: Path, target: Target, files: Iterable[SideFile], atc: str = "atc"
) -> tuple[str, ...]:
    """The argv that compiles `model`, bound as `spec` says, to `output` (without .om); never meant for a shell."""
    files = list(files)
    for path in (model, output, *(file.path for file in files)):
        check_path(path)
    options = {
        "--framework": "5",
        "--model": str(model),
        "--output": str(output),
        "--soc_version": target.soc,
        "--input_format": "ND",
        "--input_shape": spec.atc_input_shape(),
        "--precision_mode_v2": target.precision,  # never left out: ATC's own default is fp16 for everything
        **{file.option: str(file.path) for file in files},
        "--deterministic": "1",
        "--log": "error",
    }
    return (atc, *(f"{option}={value}" for option, value in options.items()))


def check_path(path: Path) -> None:
    """AtcError when ATC would refuse the path (E10021): report it before anything runs."""
    if not path.is_absolute():
        raise AtcError(f"{path}: ATC runs in a scratch directory and needs absolute paths")
    bad = sorted({c for c in str(path) if not _PATH_CHARACTER.fullmatch(c)})
    if bad:
        raise AtcError(
            f"{path}: ATC refuses {' '.join(map(repr, bad))} in a path (letters, digits, _ - . / only). "
            "Move the artifacts directory"
        )
    if len(str(path)) > _PATH_MAX:
        raise AtcError(f"{str(path)[:80]}…: {len(str(path))} characters; ATC takes {_PATH_MAX} at most")


def recipe(spec: GraphSpec, inputs: Mapping[str, str], argv: Iterable[str]) -> str:
    """One hash of all that decides the content of an .om but the compiler: shapes, input hashes, settings.

    Paths are left out, so that a moved directory is not compiled again; what is in the files is in `inputs`.
    """
    settings = [option for option in list(argv)[1:] if not option.startswith(_PATH_OPTIONS)]
    data = {"spec": spec.to_dict(), "inputs": dict(sorted(inputs.items())), "settings": settings}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
