"""Build onnx_ops.json and ge_kernels.json, the compact tables next to this file, from the long fact tables.

    python -m op_patches.data.build_tables FACTS_DIR [--check]

FACTS_DIR holds atc_onnx_ops.json and ge_kernels.json as they were read from the public sources (README.md says which).
`--check` compares instead of writing and exits 1 when a table is stale. The result has one operator per line, so that a
change of one fact is a change of one line.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# Table names -> NumPy names, which the rest of the project uses.
_FLOATS = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}

# The operand whose dtype decides the kernel, where it is not the first input.
_DATA_OPERAND = {
    "Concat": "x", "ConcatV2": "x", "Conv2DTranspose": "x", "Fill": "value", "OneHot": "on_value",
    "Select": "x1", "SelectV2": "then", "Split": "x", "ScatterNd": "x",
}  # fmt: skip

# Dtypes that the ops-info leaves to `op_select_format` at compile time: taken from the notes of the fact table (which
# quote the Python of 8.1.RC1), else from the prebuilt 910B binaries. 310P has no bfloat16.
_INTS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_ARITHMETIC = "bfloat16 bool float16 float32 int8 int32 int64 uint8"
_ANY = f"bfloat16 bool float16 float32 {_INTS}"
_SELECTED = {
    "MatMul": "bfloat16 float16 float32",
    "MatMulV2": "bfloat16 float16 float32",
    "BatchMatMul": "bfloat16 float16 float32",
    "BatchMatMulV2": "bfloat16 float16 float32",
    "LayerNorm": "bfloat16 float16 float32",
    "LayerNormV3": "bfloat16 float16 float32",
    "SoftmaxV2": "bfloat16 float16 float32",
    "Add": _ARITHMETIC,
    "Mul": _ARITHMETIC,
    "RealDiv": "bfloat16 bool float16 float32 int32",
    "Reciprocal": "bfloat16 float16 float32",
    "ConcatD": _ANY,
    "ConcatV2D": _ANY,
    "SplitD": _ANY,
    "SplitVD": _ANY,
    "StridedSliceD": _ARITHMETIC,
    "Slice": _ANY,
    "GatherV2D": f"bool float16 float32 {_INTS}",
    "TileD": "bfloat16 float16 float32 int32",
    "Select": "bfloat16 float16 float32 int8 int32 int64 uint8",
    "Cos": "bfloat16 float16 float32",
    "PadV3": "bfloat16 float16 float32 int8 int32",
    "Conv2D": "bfloat16 float16 float32",
    "GroupNorm": "float16 float32",
    "Sort": "bfloat16 float16 float32",
}
# 310P has no float32 matrix unit: its float32 MatMul is a static-shape vector form with conditions of its own, which
# op_patches/readiness knows.
_SELECTED_310P = dict.fromkeys(("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2", "Conv2D"), "float16")
_NOT_IN_A_NOTE = ("BatchMatMul", "LayerNormV3", "RealDiv", "TileD", "Conv2D")  # our inference, not a quoted list


# In the registration strings, but refused by the parser itself (golden verdicts of v8.5.0).
_REFUSED = {"TfIdfVectorizer"}
# Operators that plugins add around the one that does the work.
_HELPERS = {
    *(
        "Add",
        "Adds",
        "BroadcastTo",
        "Cast",
        "Concat",
        "Empty",
        "ExpandDims",
        "Fill",
        "Flatten",
        "Identity",
        "Mod",
        "Mul",
    ),
    *("Muls", "OnesLike", "Reshape", "Rsqrt", "Shape", "Split", "Squeeze", "StridedSlice", "Sub", "Transpose"),
    *("TransposeD", "Unsqueeze", "ZerosLike"),
}


def _rank(ge_op: str, onnx_op: str) -> int:
    """Sort the operator that does the work to the front: its dtypes decide the engine."""
    return 0 if ge_op == onnx_op.rpartition("::")[2] else 2 if ge_op in _HELPERS else 1


def build_onnx_ops(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Which (domain, op, opset) the ONNX parser knows, and the GE operators it makes of it."""
    ops: dict[str, Any] = {}
    for name, fact in sorted(facts.items()):
        if name.startswith(("_", "<")) or fact["opsets"] == "any" or name in _REFUSED:
            continue
        domain = fact["domain"] if fact["domain"] != "ai.onnx" else ""
        key = f"{domain}::{name.split('::')[-1]}" if domain else name
        entry: dict[str, Any] = {
            "opsets": fact["in_v8_5_0_open"] or _ranges(fact["opsets"]),
            "ge": sorted(fact.get("expands_to") or [fact["ge_op"]], key=lambda ge_op: _rank(ge_op, name)),
            "source": fact.get("source_v8_5_0", fact["source"]).replace("hicann/", ""),
        }
        at_8_5 = next(iter(fact.get("ge_op_v8_5_0", {})), fact["ge_op"])
        if at_8_5 != "PartitionedCall":
            if at_8_5 != fact["ge_op"] == "PartitionedCall":
                entry["ge_later"] = entry["ge"]  # the expansion on the master branch after 9.2.0-beta.1
            entry["ge"] = [at_8_5]
        elif fact["ge_op"] != "PartitionedCall":
            entry["ge"] = [fact["ge_op"]]
        if fact["in_v8_5_0_open"] is None:
            # Not in the open plugins of 8.5: closed package cann-ops-legacy until the open tag named here.
            entry["open_since"] = fact["first_open_tag"].removeprefix("v")
            entry["closed"] = "documented" if fact["in_8_5_x_closed_plugin"] == "documented" else "inferred"
        if len(fact.get("ge_op_by_opset", {})) > 1:
            entry["ge_by_opset"] = fact["ge_op_by_opset"]
        if fact["notes"]:
            entry["note"] = fact["notes"]
        ops[key] = entry
    return ops


def build_kernels(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Which engine has a kernel of a GE operator, per chip family and input dtype."""
    return {name: _kernel(name, fact) for name, fact in sorted(facts.items()) if not name.startswith("_")}


def _kernel(name: str, fact: Mapping[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    on_910b = fact["ascend910b"]
    on_310p = on_910b if fact["ascend310p"] == "same_as_910b" else fact["ascend310p"]
    for family, section in (("910b", on_910b), ("310p", on_310p)):
        if section:
            entry[family] = _inputs(name, section["inputs"], family)
            if not section["dynamic_shape"]:
                entry.setdefault("static_only", []).append(family)
    for engine in ("aicpu", "tf_aicpu"):
        if fact[engine]:
            entry[engine] = {i["name"]: _dtypes(i["dtypes"]) for i in fact[engine]["inputs"]}
    entry |= {flag: True for flag in ("host_cpu", "ge_local") if fact[flag]}
    if name in _DATA_OPERAND:
        entry["data"] = _DATA_OPERAND[name]
    constants = [i["name"] for i in (on_910b or {"inputs": []})["inputs"] if i.get("valueDepend") == "required"]
    if constants:
        entry["constant_inputs"] = constants
    if name in _NOT_IN_A_NOTE:
        entry["certainty"] = "inferred"
    if fact.get("notes"):
        entry["note"] = fact["notes"]
    return entry


def _inputs(op: str, inputs: list[dict[str, Any]], family: str) -> dict[str, str]:
    without = ("bfloat16",) if family == "310p" else ()
    if op in _SELECTED:
        chosen = _SELECTED_310P.get(op, _SELECTED[op]) if family == "310p" else _SELECTED[op]
        operand = _DATA_OPERAND.get(op, inputs[0]["name"])
        return {i["name"]: _dtypes(i["dtypes"], without) for i in inputs if i["dtypes"]} | {
            operand: _dtypes(chosen.split(), without)
        }
    result = {}
    for item in inputs:
        if item["dtypes"] is None:
            raise SystemExit(f"{op}.{item['name']}: dtypes chosen at compile time; add the operator to _SELECTED")
        result[item["name"]] = _dtypes(item["dtypes"], without)
    return result


def _dtypes(names: list[str], without: tuple[str, ...] = ()) -> str:
    return " ".join(sorted({_FLOATS.get(n, n) for n in names} - set(without)))


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n])
    return ",".join("-".join(str(n) for n in part) for part in parts)


def dump(table: Mapping[str, Any], source: str) -> str:
    """Write one operator per line."""
    lines = [f'"_source": {json.dumps(source)}']
    lines += [f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    onnx_facts = json.loads((args.facts / "atc_onnx_ops.json").read_text(encoding="utf-8"))
    kernel_facts = json.loads((args.facts / "ge_kernels.json").read_text(encoding="utf-8"))
    commits = {name: repo["commits"]["v8.5.0"] for name, repo in onnx_facts["_meta"]["repos"].items()}
    snapshot = re.sub(r"@(\w{8})\w*", r"@\1", kernel_facts["_meta"]["snapshot"])
    made = {
        "onnx_ops.json": dump(build_onnx_ops(onnx_facts), f"ONNX plugins of CANN v8.5.0: {commits}"),
        "ge_kernels.json": dump(build_kernels(kernel_facts), f"ops-info of {snapshot}"),
    }
    stale = [name for name, text in made.items() if not (HERE / name).exists() or (HERE / name).read_text() != text]
    if not args.check:
        for name in stale:
            (HERE / name).write_text(made[name], encoding="utf-8")
    sys.stdout.write(f"{'stale' if args.check else 'written'}: {', '.join(stale) or 'none'}\n")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
