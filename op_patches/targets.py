"""What a graph is compiled for: CANN release x SoC x precision, and what that combination knows.

    Target.parse("cann=8.5,soc=Ascend910B4,precision=origin")     Target.parse("910B4")     Target.parse("npu.toml")

The tables behind the look-ups are data/onnx_ops.json (which operators the ONNX parser knows) and data/ge_kernels.json
(which engine has a kernel for a GE operator and dtype); data/README.md says where they come from and what they omit.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any

from runtime.errors import ReadinessError


class Engine(Enum):
    """Where GE runs an operator. LOCAL means that GE itself handles it (Reshape, Const …) and no kernel is launched."""

    AICORE = "aicore"
    AICPU = "aicpu"
    HOST = "host"
    LOCAL = "local"
    NONE = "none"  # the tables cover the operator and no engine takes this dtype
    UNKNOWN = "unknown"  # the tables do not cover the operator


class Certainty(Enum):
    """How a fact is known. Nothing was measured on a device."""

    PARSER = "checked with CANN's own parser"
    SOURCE = "read in source"
    DOCUMENTED = "documented"
    REPORTED = "reported in public"
    INFERRED = "inferred"


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """A CANN release, ordered: 8.0.RC3 < 8.0 = 8.0.0 < 8.5.1 < 9.2.0-beta.1 < 9.2."""

    numbers: tuple[int, int, int]
    stage: tuple[int, int]  # (-3, n) alpha, (-2, n) beta, (-1, n) RC, (0, 0) final

    @classmethod
    def parse(cls, text: str) -> Release:
        match = re.fullmatch(
            r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[.-]?(alpha|beta|rc)\.?(\d+))?(?:\..*)?", text.strip().lower()
        )
        if not match:
            raise ReadinessError(f"cann={text}: expected a release such as 8.5, 8.1.RC1 or 9.2.0-beta.1")
        major, minor, patch, stage, n = match.groups()
        rank = {"alpha": -3, "beta": -2, "rc": -1}
        return cls((int(major), int(minor), int(patch or 0)), (rank[stage], int(n)) if stage else (0, 0))


FIRST_RELEASE = Release.parse("8.0.RC1")
LAST_RELEASE = Release.parse("9.2.99")
_OPEN_PLUGINS = Release.parse("8.5.0-beta.1")  # before it, plugin sources were never public
_LAYER_NORM_PLUGIN = Release.parse("8.0.RC3.alpha003")

# --soc_version -> chip family, as in the platform_config of CANN 8.1.RC1 (SoC_version, Short_SoC_version).
SOCS: dict[str, str] = {
    **dict.fromkeys(
        ("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"), "910b"
    ),
    **dict.fromkeys((f"Ascend910_{n}" for n in (9362, 9372, 9381, 9382, 9391, 9392)), "910_93"),
    **dict.fromkeys((f"Ascend310P{n}" for n in (1, 3, 5, 7)), "310p"),
}
# Accepted by ATC, but not what the user means; or not a SoC at all.
_MISREAD = {
    "Ascend910B": "ATC takes it as the FIRST-generation 910 (dav-c100), and the .om will not load on an Atlas A2 card;"
    " an A2 is Ascend910B1 … Ascend910B4: read the chip name with `npu-smi info` and put Ascend before it",
    "Ascend910_93": "it is the short name of the A3 family, not a SoC; an A3 is Ascend910_9362 … Ascend910_9392:"
    " read it with `npu-smi info -t board -i 0 -c 0`",
    "Ascend310P": "it is the short name of the family, not a SoC; write Ascend310P1, P3, P5 or P7",
}
_MISREAD |= dict.fromkeys(
    ("Ascend910A", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA", "Ascend910"),
    "it is the first-generation 910, whose kernels these tables do not cover",
)
_MISREAD |= dict.fromkeys(
    (*(f"Ascend310B{n}" for n in (1, 2, 3, 4)), "Ascend910_95"), "these tables do not cover the kernels of this family"
)

# --precision_mode_v2 and its older twin --precision_mode.
PRECISIONS: dict[str, str] = {
    "origin": "must_keep_origin_dtype",
    "fp16": "force_fp16",
    "cube_fp16in_fp32out": "force_fp32",
    "mixed_float16": "allow_mix_precision_fp16",
    "mixed_bfloat16": "allow_mix_precision_bf16",
}
_PRECISION_TWINS = {v1: v2 for v2, v1 in PRECISIONS.items()} | {
    "allow_mix_precision": "mixed_float16",
    "cube_fp16in_fp32out": "cube_fp16in_fp32out",
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """What the ONNX parser makes of one operator at one opset, the GE operator that does the work first."""

    ge_ops: tuple[str, ...]
    certainty: Certainty
    source: str
    note: str = ""

    @property
    def ge_op(self) -> str:
        return self.ge_ops[0]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernels of one GE operator on one chip family: dtypes of each named input, per engine."""

    ge_op: str
    aicore: Mapping[str, frozenset[str]] | None
    aicpu: tuple[Mapping[str, frozenset[str]], ...]
    host: bool
    local: bool
    static_only: bool
    data: str | None  # the operand whose dtype decides; the first input unless the table says otherwise
    constant_inputs: tuple[str, ...]
    certainty: Certainty
    note: str

    def engine(self, dtype: str, operand: str | None = None) -> Engine:
        """Return the first engine, in GE's order, that takes `dtype` for the operand (default: the data operand)."""
        if self.local:
            return Engine.LOCAL
        if self.aicore is not None and self._takes(self.aicore, dtype, operand):
            return Engine.AICORE
        if any(self._takes(inputs, dtype, operand) for inputs in self.aicpu):
            return Engine.AICPU
        if self.host and self.aicore is None and not self.aicpu:
            return Engine.HOST
        return Engine.NONE

    def _takes(self, inputs: Mapping[str, frozenset[str]], dtype: str, operand: str | None) -> bool:
        if not inputs:
            # TF entries without a list: the fact table has no dtypes for them, so they prove nothing.
            return False
        name = operand or self.data or next(iter(inputs))
        return dtype in inputs.get(name, next(iter(inputs.values())) if operand is None else frozenset())


@dataclass(frozen=True, slots=True)
class Target:
    """A CANN release, a SoC and a precision mode; made by `parse` or from PRESETS."""

    cann: str = "8.5"
    soc: str = "Ascend910B4"
    precision: str = "origin"

    def __post_init__(self) -> None:
        if not FIRST_RELEASE <= self.release <= LAST_RELEASE:
            raise ReadinessError(f"cann={self.cann}: expected 8.0 … 9.2, the releases that the tables cover")
        if self.soc in _MISREAD:
            raise ReadinessError(f"soc={self.soc}: {_MISREAD[self.soc]}")
        if self.soc not in SOCS:
            raise ReadinessError(f"soc={self.soc}: expected one of {', '.join(SOCS)}")
        if self.precision not in PRECISIONS:
            raise ReadinessError(
                f"precision={self.precision}: expected one of {', '.join(PRECISIONS)} (--precision_mode_v2)"
                f" or {', '.join(_PRECISION_TWINS)} (--precision_mode)"
            )
        if self.precision == "mixed_bfloat16" and not self.has_bfloat16:
            raise ReadinessError(f"precision={self.precision}: {self.soc} has no bfloat16; use fp16 or mixed_float16")

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read "cann=…,soc=…,precision=…", a preset, a preset with changes ("310P3,cann=9.1"), or a TOML file."""
        if text.endswith(".toml"):
            return cls._from_pairs(_read_toml(Path(text)), cls())
        target = cls()
        pairs: dict[str, str] = {}
        for part in (p.strip() for p in text.split(",") if p.strip()):
            key, separator, value = part.partition("=")
            if separator:
                if key in pairs:
                    raise ReadinessError(f"--target {text}: {key} is given twice")
                pairs[key] = value
            elif part in PRESETS and not pairs:
                target = PRESETS[part]
            else:
                raise ReadinessError(
                    f"--target {text}: {part!r} is no preset; expected cann=…,soc=…,precision=…, a .toml file,"
                    f" or one of {', '.join(PRESETS)}"
                )
        return cls._from_pairs(pairs, target)

    @classmethod
    def _from_pairs(cls, pairs: Mapping[str, str], base: Target) -> Target:
        unknown = set(pairs) - {"cann", "soc", "precision"}
        if unknown:
            raise ReadinessError(f"target: unknown key {', '.join(sorted(unknown))}; expected cann, soc, precision")
        values = {key: value.strip() for key, value in pairs.items()}
        if "soc" in values and not values["soc"].startswith("Ascend"):
            values["soc"] = "Ascend" + values["soc"]
        if "precision" in values:
            values["precision"] = _PRECISION_TWINS.get(values["precision"], values["precision"])
        return replace(base, **values)

    def __str__(self) -> str:
        return f"cann={self.cann},soc={self.soc},precision={self.precision}"

    @property
    def release(self) -> Release:
        return Release.parse(self.cann)

    @property
    def family(self) -> str:
        """The chip family: 910b (Atlas A2), 910_93 (A3) or 310p."""
        return SOCS[self.soc]

    @property
    def has_bfloat16(self) -> bool:
        return self.family != "310p"

    @property
    def half_precision(self) -> bool:
        """Whether ATC may turn float32 into float16 or bfloat16 for some operators."""
        return self.precision != "origin"

    @property
    def needs_static_batch(self) -> bool:
        """Whether the lowerings need the batch as a number: float32 MatMul on 310P (op_patches.matmul_310p)."""
        return self.family == "310p" and not self.half_precision

    def plugin(self, op_type: str, opset: int, domain: str = "") -> Plugin | None:
        """Return what the parser makes of a node, or None when no plugin is registered (E13010).

        `opset` is the version of the node's domain in the MODEL's opset_import: the parser looks up the exact string
        "<domain or ai.onnx>::<opset>::<op_type>" and never falls back to an older version.
        """
        entry = _onnx_ops().get(op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}")
        if entry is None or not _contains(entry["opsets"], opset):
            return None
        if op_type == "LayerNormalization" and self.release < _LAYER_NORM_PLUGIN:
            return None
        ge_ops = (
            entry["ge_later"] if "ge_later" in entry and self.release > Release.parse("9.2.0-beta.1") else entry["ge"]
        )
        source = entry["source"]
        certainty = Certainty.SOURCE
        if self.release < Release.parse(entry.get("open_since", "8.5.0-beta.1")):
            documented = entry.get("closed") == "documented"
            certainty = Certainty.DOCUMENTED if documented else Certainty.INFERRED
            if "closed" in entry:
                source = f"closed plugin of cann-ops-legacy; open since {entry['open_since']}: {source}"
        return Plugin(tuple(ge_ops), certainty, source, entry.get("note", ""))

    def opsets(self, op_type: str, domain: str = "") -> str:
        """Return the opsets at which the parser knows an operator, such as "8-18"; empty when it never does."""
        entry = _onnx_ops().get(op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}")
        return "" if entry is None else str(entry["opsets"])

    def kernel(self, ge_op: str) -> Kernel | None:
        """Return the kernels of a GE operator on this chip, or None when the tables do not cover it."""
        entry = _kernels().get(ge_op)
        if entry is None:
            return None
        family = "310p" if self.family == "310p" else "910b"  # A3 rows equal the 910B rows for every listed operator
        return Kernel(
            ge_op=ge_op,
            aicore=_dtype_sets(entry[family]) if family in entry else None,
            aicpu=tuple(_dtype_sets(entry[engine]) for engine in ("aicpu", "tf_aicpu") if engine in entry),
            host=entry.get("host_cpu", False),
            local=entry.get("ge_local", False),
            static_only=family in entry.get("static_only", ()),
            data=entry.get("data"),
            constant_inputs=tuple(entry.get("constant_inputs", ())),
            certainty=Certainty.INFERRED if entry.get("certainty") == "inferred" else Certainty.SOURCE,
            note=entry.get("note", ""),
        )

    def engine(self, ge_op: str, dtype: str) -> Engine:
        """Return the engine that runs a GE operator on data of a NumPy-named dtype ("float32", "int64", "bool" …)."""
        kernel = self.kernel(ge_op)
        return Engine.UNKNOWN if kernel is None else kernel.engine(dtype)


# 310P3 compiles in fp16 because its matrix unit has no float32: with `origin` products run on the vector unit at best.
PRESETS: dict[str, Target] = {
    **{f"910B{n}": Target(soc=f"Ascend910B{n}") for n in (1, 2, 3, 4)},
    "A3": Target(soc="Ascend910_9391"),
    "310P3": Target(soc="Ascend310P3", precision="fp16"),
}


def _read_toml(path: Path) -> dict[str, str]:
    try:
        import tomllib
    except ModuleNotFoundError as error:
        raise ReadinessError(
            f"{path}: reading TOML needs Python 3.11; write cann=…,soc=…,precision=… instead"
        ) from error
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReadinessError(f"{path}: cannot read the target file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ReadinessError(f"{path}: not a TOML file ({error})") from error
    table = data.get("target", data)
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ReadinessError(
            f'{path}: expected cann = "8.5", soc = "Ascend910B4", precision = "origin", all of them text'
        )
    return table


def _contains(ranges: str, number: int) -> bool:
    bounds = [part.split("-") for part in ranges.split(",")]
    return any(int(bound[0]) <= number <= int(bound[-1]) for bound in bounds)


def _dtype_sets(inputs: Mapping[str, str]) -> Mapping[str, frozenset[str]]:
    return {name: frozenset(dtypes.split()) for name, dtypes in inputs.items()}


@functools.cache
def _onnx_ops() -> Mapping[str, Any]:
    return _load("onnx_ops.json")


@functools.cache
def _kernels() -> Mapping[str, Any]:
    return _load("ge_kernels.json")


def _load(name: str) -> Mapping[str, Any]:
    table: dict[str, Any] = json.loads(resources.files("op_patches.data").joinpath(name).read_text(encoding="utf-8"))
    del table["_source"]
    return table
