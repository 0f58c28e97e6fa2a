"""Read the weight files of a checkpoint directory: which files, are they whole, what tensors do they hold.

Layouts, the first that is present counts: model.safetensors, model.safetensors.index.json with shards,
pytorch_model.bin, pytorch_model.bin.index.json with shards. Pickles are read with weights_only: no code runs.
Everything that is wrong becomes a Finding; nothing is repaired here.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import torch

from convert.findings import Finding, fault, notice
from runtime.manifest import sha256_of

LAYOUTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
DOWNLOAD_AGAIN = "download it again (convert-moss fetch resumes)"
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LFS_START = b"version https://git-lfs.github.com/spec"


@dataclass(slots=True)
class WeightFiles:
    """What was read: tensors as stored, the file each one came from, sha256 per file, and findings."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def read_weight_files(directory: Path) -> WeightFiles:
    """Read every weight file of `directory`; faults are findings, so that all of them are known at once."""
    read = WeightFiles()
    present = [name for name in LAYOUTS if (directory / name).exists()]
    adapters = sorted(p.name for p in directory.glob("adapter_model.*"))
    if adapters:
        make = notice if present else fault
        read.findings.append(
            make("adapter", adapters[0], "a PEFT adapter is not a checkpoint and is not applied",
                 "merge it into the weights (peft: merge_and_unload, then save_pretrained)")
        )  # fmt: skip
    if not present:
        if not adapters:
            read.findings.append(_no_weights(directory))
        return read
    layout = present[0]
    if len(present) > 1:
        read.findings.append(
            notice("two-layouts", layout, f"weights are here twice: {', '.join(present)}", f"{layout} was read")
        )
    shards = _shards(directory, layout, read)
    for shard, listed in shards.items():
        _read_file(directory, shard, listed, read)
    return read


def damage(path: Path) -> Finding | None:
    """A fault that the first bytes of a file give away: missing, empty, a Git LFS pointer, a web page."""
    if not path.is_file():
        return fault("missing-file", path.name, "the file does not exist", DOWNLOAD_AGAIN)
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        return fault("empty-file", path.name, "expected data, got a file of 0 bytes", DOWNLOAD_AGAIN)
    if start.startswith(LFS_START):
        return fault("lfs-pointer", path.name, "this is a Git LFS pointer, not the data it points to",
                     "run git lfs pull, or convert-moss fetch")  # fmt: skip
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return fault("html", path.name, "this is a web page, not data: the download got an error page", DOWNLOAD_AGAIN)
    return None


def _no_weights(directory: Path) -> Finding:
    there = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    return fault("no-weights", str(directory), f"expected {' or '.join(LAYOUTS)}, got {', '.join(there) or 'nothing'}",
                 "run convert-moss fetch, or point to the directory that holds the weights")  # fmt: skip


def _shards(directory: Path, layout: str, read: WeightFiles) -> dict[str, list[str] | None]:
    """File name -> the tensors an index lists for it; None without an index."""
    if not layout.endswith(".index.json"):
        return {layout: None}
    found = damage(directory / layout)
    if found:
        read.findings.append(found)
        return {}
    try:
        weight_map = json.loads((directory / layout).read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(tensor), str(shard)) for tensor, shard in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        read.findings.append(
            fault("bad-index", layout, f"expected JSON with a weight_map, got {type(error).__name__}: {error}",
                  DOWNLOAD_AGAIN)
        )  # fmt: skip
        return {}
    read.files[layout] = sha256_of(directory / layout)
    shards: dict[str, list[str] | None] = {}
    for tensor, shard in pairs:
        if Path(shard).name != shard or shard in ("", ".", ".."):
            read.findings.append(
                fault("bad-index", layout, f"shard {shard!r} is not a file beside the index", DOWNLOAD_AGAIN, tensor)
            )
            continue
        listed = shards.setdefault(shard, [])
        assert listed is not None
        listed.append(tensor)
    if not pairs:
        read.findings.append(fault("bad-index", layout, "the weight_map is empty", DOWNLOAD_AGAIN))
    return shards


def _read_file(directory: Path, name: str, listed: list[str] | None, read: WeightFiles) -> None:
    """Read one weight file and hold it against what the index says about it."""
    path = directory / name
    found = damage(path)
    if found:
        if found.rule == "missing-file" and listed:
            found = fault("missing-shard", name, f"the index names this file for {len(listed)} tensors, "
                          f"{listed[0]} the first, and it does not exist", DOWNLOAD_AGAIN)  # fmt: skip
        read.findings.append(found)
        return
    read.files[name] = sha256_of(path)
    tensors = _read_safetensors(path, read.findings) if name.endswith(".safetensors") else _read_pickle(path, read)
    for tensor_name, tensor in tensors.items():
        if tensor_name in read.tensors:
            read.findings.append(
                fault("duplicate", name, f"{read.file_of[tensor_name]} holds the same tensor",
                      "save the checkpoint again with each tensor in one shard", tensor_name)
            )  # fmt: skip
        read.tensors[tensor_name] = tensor
        read.file_of[tensor_name] = name
    if listed is None or not tensors:
        return
    for tensor_name in sorted(set(listed) - set(tensors)):
        read.findings.append(
            fault("missing-in-shard", name, "the index lists this tensor here and the file lacks it", DOWNLOAD_AGAIN,
                  tensor_name)
        )  # fmt: skip
    for tensor_name in sorted(set(tensors) - set(listed)):
        read.findings.append(
            notice("not-in-index", name, "the index does not list this tensor", "it was read all the same", tensor_name)
        )


def _read_safetensors(path: Path, findings: list[Finding]) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file; its header is compared with the file size first."""
    import safetensors
    import safetensors.torch

    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(min(header_size, size))
    if size < 8 + header_size:
        findings.append(
            fault("truncated", path.name, f"expected a header of {header_size} bytes, got {max(size - 8, 0)}: cut off, "
                  "or not a safetensors file", DOWNLOAD_AGAIN)
        )  # fmt: skip
        return {}
    try:
        entries = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        end = 8 + header_size + max((int(v["data_offsets"][1]) for v in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        findings.append(fault("unreadable", path.name, "the safetensors header is not valid JSON", DOWNLOAD_AGAIN))
        return {}
    if size < end:
        cut = [k for k, v in entries.items() if 8 + header_size + int(v["data_offsets"][1]) > size]
        findings.append(
            fault("truncated", path.name, f"expected {end} bytes, got {size}: {len(cut)} tensors are cut off",
                  DOWNLOAD_AGAIN, cut[0])
        )  # fmt: skip
        return {}
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        findings.append(fault("unreadable", path.name, f"safetensors refuses it: {_line(error)}", DOWNLOAD_AGAIN))
        return {}


def _read_pickle(path: Path, read: WeightFiles) -> dict[str, torch.Tensor]:
    """The tensors of one .bin file: a zip (or an older plain pickle) of a flat dict, read with weights_only."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        read.findings.append(
            fault("unsafe-pickle", path.name, f"it holds more than tensors or is cut off: {_line(error)}",
                  "save model.state_dict() alone, or download it again; code in a checkpoint is never run")
        )  # fmt: skip
        return {}
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        read.findings.append(
            fault("truncated", path.name, f"expected a whole torch file, got {path.stat().st_size} bytes that torch "
                  f"cannot read: {_line(error)}", DOWNLOAD_AGAIN)
        )  # fmt: skip
        return {}
    if not isinstance(content, dict) or not content:
        read.findings.append(
            fault("not-a-state-dict", path.name, f"expected a dict of tensors, got {type(content).__name__}",
                  "save model.state_dict()")
        )  # fmt: skip
        return {}
    wrong = [str(k) for k, v in content.items() if not (isinstance(k, str) and isinstance(v, torch.Tensor))]
    for key in wrong:
        read.findings.append(
            fault("not-a-tensor", path.name, f"expected a tensor, got {type(content.get(key)).__name__}",
                  "save model.state_dict() alone, without optimizer or trainer state", key)
        )  # fmt: skip
    return {k: v for k, v in content.items() if str(k) not in wrong}


def _line(error: BaseException) -> str:
    """The first line of another library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
