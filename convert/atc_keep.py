"""A keep list (nodes that stay float32 in a reduced precision build) in the two forms that ATC reads.

The list, one entry a line, `#` for comments: an ONNX node name, or `OpType::X` for every node of an ONNX type.
ATC has `--keep_dtype` (node names; works under fp16 and mixed) and `--modify_mixlist` (GE types; mixed only). What
neither can say becomes a note, because an entry that silently does nothing looks like a precision that was measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import AtcError

OP_TYPE = "OpType::"
# GE makes no kernel with a precision of its own of these: constants, views, names.
_NO_KERNEL = frozenset({"Constant", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Shape", "Size"})


@dataclass(frozen=True, slots=True)
class KeepList:
    """What stays float32, as the precision tool or a person wrote it."""

    names: tuple[str, ...]
    op_types: tuple[str, ...]

    @staticmethod
    def parse(text: str, where: str) -> KeepList:
        """Read the lines; AtcError names the line that is no entry."""
        names: dict[str, None] = {}
        op_types: dict[str, None] = {}
        for number, raw in enumerate(text.splitlines(), start=1):
            entry = raw.split("#", 1)[0].strip()
            if not entry:
                continue
            op_type = entry.removeprefix(OP_TYPE)
            if not op_type or any(c.isspace() for c in entry) or "::" in op_type:
                raise AtcError(f"{where}:{number}: expected an ONNX node name or {OP_TYPE}X, got {raw.strip()!r}")
            (op_types if entry.startswith(OP_TYPE) else names).setdefault(op_type)
        if not names and not op_types:
            raise AtcError(f"{where} keeps nothing; list node names or {OP_TYPE}X lines, or leave --keep-fp32 out")
        return KeepList(tuple(names), tuple(op_types))

    @staticmethod
    def read(path: Path) -> KeepList:
        try:
            return KeepList.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise AtcError(f"{path} is not a readable keep list ({error})") from error


@dataclass(frozen=True, slots=True)
class KeepFiles:
    """One graph's keep list as ATC reads it; an empty text means that the option is left out."""

    keep_dtype: str
    modify_mixlist: str
    notes: tuple[str, ...]  # what ATC cannot express, and what it will do beyond the list


def keep_files(
    keep: KeepList, nodes: Mapping[str, str], ge_types: Mapping[str, tuple[str, ...]], mixed: bool
) -> KeepFiles:
    """Translate a keep list for the graph with `nodes` (name -> ONNX type).

    `ge_types` maps an ONNX type to what ATC's parser makes of it, the type that does the work first. A type of the
    list becomes node names, except under mixed precision, where the black list takes the GE type.
    """
    lines: dict[str, None] = {}
    black: dict[str, None] = {}
    notes: list[str] = []
    for op_type in keep.op_types:
        names = [name for name, node_type in nodes.items() if node_type == op_type]
        if mixed and names and ge_types.get(op_type) and op_type not in _NO_KERNEL:
            black.setdefault(ge_types[op_type][0])
            notes += _shared_type_notes(op_type, ge_types[op_type][0], nodes, ge_types)
        else:
            lines.update(dict.fromkeys(names))
    lines.update(dict.fromkeys(name for name in keep.names if name in nodes))
    useless = [name for name in lines if nodes[name] in _NO_KERNEL]
    if useless:
        notes.append(f"{_some(useless)}: constants and views have no precision of their own; left out")
    split = [name for name in lines if len(ge_types.get(nodes[name], ())) > 1]
    if split:
        notes.append(
            f"{_some(split)}: ATC's parser takes {'these nodes' if len(split) > 1 else 'this node'} apart and names "
            "the parts itself, so the entry may not reach them; patch the graph first"
        )
    kept = [name for name in lines if name not in useless]
    mixlist = {"black-list": {"to-add": list(black), "to-remove": []}}
    return KeepFiles(
        "".join(f"{name}\n" for name in kept), json.dumps(mixlist, indent=1) + "\n" if black else "", tuple(notes)
    )


def unmatched(keep: KeepList, graphs: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Entries that no graph has; a keep list may serve several graphs, so this looks at all of them."""
    names = {name for nodes in graphs.values() for name in nodes}
    types = {op_type for nodes in graphs.values() for op_type in nodes.values()}
    return [n for n in keep.names if n not in names] + [OP_TYPE + t for t in keep.op_types if t not in types]


def _shared_type_notes(
    op_type: str, ge_type: str, nodes: Mapping[str, str], ge_types: Mapping[str, tuple[str, ...]]
) -> list[str]:
    others = Counter(t for t in nodes.values() if t != op_type and ge_type in ge_types.get(t, ()))
    if not others:
        return []
    also = ", ".join(f"{count} {other}" for other, count in sorted(others.items()))
    return [f"{OP_TYPE}{op_type} is {ge_type} to ATC: {also} nodes stay float32 as well"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
