"""Targets: what the text forms mean, what is refused, and that the tables say what the documentation says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from op_patches.targets import PRESETS, SOCS, Certainty, Engine, Release, Target
from runtime.errors import ReadinessError

DATA = Path(__file__).parents[2] / "op_patches" / "data"
A2 = Target.parse("910B4")
P3 = Target.parse("310P3")


def test_a_target_is_read_from_text_presets_and_presets_with_changes() -> None:
    assert Target.parse("cann=8.5,soc=Ascend910B4,precision=origin") == A2
    assert Target.parse("soc=910B4") == A2
    assert Target.parse("310P3,cann=9.1") == Target("9.1", "Ascend310P3", "fp16")
    assert Target.parse("A3").family == "910_93"
    assert Target.parse(str(P3)) == P3


def test_the_older_names_of_precision_modes_mean_the_same() -> None:
    assert Target.parse("precision=must_keep_origin_dtype").precision == "origin"
    assert Target.parse("precision=force_fp16").precision == "fp16"
    assert Target.parse("precision=allow_mix_precision").precision == "mixed_float16"


def test_a_toml_file_is_a_target(tmp_path: Path) -> None:
    file = tmp_path / "npu.toml"
    file.write_text('[target]\ncann = "9.2.0-beta.1"\nsoc = "Ascend910B2"\nprecision = "mixed_float16"\n')
    assert Target.parse(str(file)) == Target("9.2.0-beta.1", "Ascend910B2", "mixed_float16")
    file.write_text("cann = 8.5\n")
    with pytest.raises(ReadinessError, match="all of them text"):
        Target.parse(str(file))
    file.write_text("cann = \n")
    with pytest.raises(ReadinessError, match="not a TOML file"):
        Target.parse(str(file))
    with pytest.raises(ReadinessError, match="cannot read"):
        Target.parse(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("soc=Ascend910B", "FIRST-generation 910"),
        ("soc=910B", "FIRST-generation 910"),
        ("soc=Ascend910_93", "not a SoC"),
        ("soc=Ascend310P", "not a SoC"),
        ("soc=Ascend910A", "first-generation"),
        ("soc=Ascend310B1", "do not cover"),
        ("soc=Ascend910C", "expected one of"),
        ("cann=7.0", "8.0 … 9.2"),
        ("cann=9.3", "8.0 … 9.2"),
        ("cann=latest", "expected a release"),
        ("precision=fp32", "expected one of origin"),
        ("soc=310P3,precision=mixed_bfloat16", "no bfloat16"),
        ("chip=910B4", "unknown key"),
        ("910B5", "is no preset"),
        ("soc=910B4,soc=910B3", "given twice"),
        ("cann=8.5,910B4", "is no preset"),
    ],
)
def test_a_target_that_would_be_misread_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ReadinessError, match=reason):
        Target.parse(text)


def test_releases_are_ordered_with_their_stages() -> None:
    names = [
        "8.0.RC1",
        "8.0.RC3.alpha003",
        "8.0",
        "8.1.RC1",
        "8.5.0-beta.1",
        "8.5",
        "8.5.1",
        "9.1.0",
        "9.2.0-beta.2",
        "9.2",
    ]
    releases = [Release.parse(name) for name in names]
    assert releases == sorted(releases)
    assert len(set(releases)) == len(releases)
    assert Release.parse("8.5") == Release.parse("8.5.0") == Release.parse("v8.5.0")


def test_every_release_from_8_0_to_9_2_and_every_soc_makes_a_target() -> None:
    for cann in ("8.0", "8.1.RC1", "8.2", "8.3", "8.5", "8.5.1", "9.0", "9.1", "9.2.0-beta.1", "9.2"):
        for soc in SOCS:
            Target(cann, soc, "fp16")
    assert set(PRESETS) == {"910B1", "910B2", "910B3", "910B4", "A3", "310P3"}


# Facts of the documentation and of the plugin sources, written down here by hand.
@pytest.mark.parametrize(
    ("op", "opset", "ge_op"),
    [
        ("LayerNormalization", 17, "LayerNorm"),
        ("MatMul", 17, "BatchMatMulV2"),
        ("Gemm", 17, "MatMulV2"),
        ("Softmax", 13, "SoftmaxV2"),
        ("Where", 17, "SelectV2"),
        ("Div", 17, "RealDiv"),
        ("Gather", 17, "GatherV2"),
        ("ScatterND", 17, "TensorScatterUpdate"),
        ("Slice", 17, "StridedSliceV2"),
        ("Concat", 17, "ConcatD"),
        ("Unsqueeze", 17, "UnsqueezeV3"),
        ("ReduceL2", 17, "LpNormV2"),
        ("Constant", 17, None),
        ("LayerNormalization", 16, None),
        ("Gelu", 20, None),
        ("Add", 19, None),
        ("Add", 7, None),
        ("ReduceL2", 18, None),
        ("GreaterOrEqual", 11, None),
        ("Loop", 17, None),
        ("TfIdfVectorizer", 17, None),
        ("Attention", 23, None),
    ],
)
def test_the_parser_knows_what_the_sources_register(op: str, opset: int, ge_op: str | None) -> None:
    plugin = A2.plugin(op, opset)
    assert (plugin.ge_op if plugin else None) == ge_op


def test_custom_operators_live_in_the_domain_npu() -> None:
    plugin = A2.plugin("NPUFastGelu", 1, "npu")
    assert plugin is not None
    assert plugin.ge_op == "FastGelu"
    assert A2.plugin("Gelu", 1, "com.microsoft") is None
    assert A2.opsets("ReduceL2") == "8-17"
    assert A2.opsets("Gelu") == ""


def test_a_closed_plugin_is_marked_until_its_source_is_open() -> None:
    def certainty(cann: str, op: str) -> Certainty:
        plugin = Target(cann).plugin(op, 17)
        assert plugin is not None
        return plugin.certainty

    assert certainty("8.5", "LayerNormalization") is Certainty.DOCUMENTED
    assert certainty("8.5", "Conv") is Certainty.INFERRED
    assert certainty("8.5", "MatMul") is Certainty.SOURCE
    assert certainty("9.2", "LayerNormalization") is Certainty.SOURCE
    assert certainty("8.1.RC1", "MatMul") is Certainty.INFERRED  # plugin sources before 8.5 are not public


def test_releases_before_8_0_rc3_do_not_know_layer_normalization() -> None:
    assert Target("8.0.RC2").plugin("LayerNormalization", 17) is None
    assert Target("8.0.RC3").plugin("LayerNormalization", 17) is not None


def test_scatter_nd_leaves_aicpu_after_9_2_beta_1() -> None:
    old, new = Target("9.2.0-beta.1").plugin("ScatterND", 17), Target("9.2").plugin("ScatterND", 17)
    assert old is not None
    assert new is not None
    assert (old.ge_op, "ScatterNdUpdate" in new.ge_ops) == ("TensorScatterUpdate", True)


@pytest.mark.parametrize(
    ("ge_op", "dtype", "on_910b", "on_310p"),
    [
        ("BatchMatMulV2", "float16", Engine.AICORE, Engine.AICORE),
        ("BatchMatMulV2", "float32", Engine.AICORE, Engine.AICPU),
        ("BatchMatMulV2", "bool", Engine.NONE, Engine.NONE),
        ("MatMulV2", "int64", Engine.NONE, Engine.NONE),
        ("LayerNorm", "float32", Engine.AICORE, Engine.AICORE),
        ("LayerNorm", "bfloat16", Engine.AICORE, Engine.NONE),
        ("SoftmaxV2", "float64", Engine.AICPU, Engine.AICPU),
        ("SelectV2", "bool", Engine.NONE, Engine.NONE),
        ("SelectV2", "int64", Engine.AICORE, Engine.AICORE),
        ("Expand", "int64", Engine.AICPU, Engine.AICPU),
        ("Cumsum", "int64", Engine.AICPU, Engine.AICPU),
        ("Cumsum", "bool", Engine.NONE, Engine.NONE),
        ("Pow", "int64", Engine.AICPU, Engine.AICPU),
        ("RealDiv", "int64", Engine.AICPU, Engine.AICPU),
        ("Add", "int64", Engine.AICORE, Engine.AICORE),
        ("PadV3", "int64", Engine.AICPU, Engine.AICPU),
        ("ScatterElements", "float32", Engine.AICORE, Engine.AICPU),
        ("TensorScatterUpdate", "float32", Engine.AICPU, Engine.AICPU),
        ("ReduceSum", "int32", Engine.AICORE, Engine.AICPU),
        ("GatherElements", "bool", Engine.AICPU, Engine.AICPU),
        ("IsNan", "float32", Engine.AICORE, Engine.AICPU),
        ("Einsum", "float32", Engine.NONE, Engine.NONE),
        ("Trilu", "float32", Engine.NONE, Engine.NONE),
        ("CastLike", "float32", Engine.NONE, Engine.NONE),
        ("Reshape", "float32", Engine.LOCAL, Engine.LOCAL),
        ("SequenceAt", "float32", Engine.HOST, Engine.HOST),
        ("Elu", "float32", Engine.UNKNOWN, Engine.UNKNOWN),
    ],
)
def test_the_kernel_tables_say_what_the_ops_info_says(ge_op: str, dtype: str, on_910b: Engine, on_310p: Engine) -> None:
    assert A2.engine(ge_op, dtype) is on_910b
    assert P3.engine(ge_op, dtype) is on_310p
    assert Target.parse("A3").engine(ge_op, dtype) is on_910b


def _table(name: str) -> dict[str, dict[str, object]]:
    table = json.loads((DATA / name).read_text(encoding="utf-8"))
    assert table.pop("_source")
    return table  # type: ignore[no-any-return]


def test_the_operator_table_is_well_formed() -> None:
    table = _table("onnx_ops.json")
    assert list(table) == sorted(table)
    for op, entry in table.items():
        assert entry["ge"], op
        assert entry["source"], op
        bounds = [int(n) for part in str(entry["opsets"]).split(",") for n in part.split("-")]
        assert bounds == sorted(bounds), op
        assert ("closed" in entry) == ("open_since" in entry), op


def test_152_standard_operators_of_opset_17_have_a_plugin() -> None:
    """The number that the registration strings give, TfIdfVectorizer and the built-in Constant left out."""
    schemas = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == "" and s.since_version <= 17}
    assert sum(A2.plugin(op, 17) is not None for op in schemas) == 152


def test_the_kernel_table_is_well_formed_and_310p_has_no_bfloat16() -> None:
    table = _table("ge_kernels.json")
    assert list(table) == sorted(table)
    known = {"bool", "bfloat16", "float16", "float32", "float64", "string", "complex32", "complex64", "complex128"}
    known |= {
        "uint1",
        "int4",
        "variant",
        "resource",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    }
    known |= {f"q{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32)}
    for op, entry in table.items():
        for engine in ("910b", "310p", "aicpu", "tf_aicpu"):
            inputs = entry.get(engine, {})
            assert isinstance(inputs, dict)
            for dtypes in inputs.values():
                assert set(dtypes.split()) <= known, op
                assert engine != "310p" or "bfloat16" not in dtypes, op


def test_the_checking_script_finds_a_changed_table(tmp_path: Path) -> None:
    """build_tables --check on small fact tables: one GE operator, one ONNX operator."""
    commits = {"commits": {"v8.5.0": "abc"}}
    onnx_facts = {
        "_meta": {"repos": {"ops-nn": commits}},
        "Abs": {
            "domain": "ai.onnx", "opsets": [8, 9], "ge_op": "Abs", "source": "s", "in_v8_5_0_open": "8-9",
            "first_open_tag": "v8.5.0", "notes": "",
        },
    }  # fmt: skip
    (tmp_path / "atc_onnx_ops.json").write_text(json.dumps(onnx_facts))
    (tmp_path / "ge_kernels.json").write_text(json.dumps({"_meta": {"snapshot": "x@1"}}))
    command = [sys.executable, "-m", "op_patches.data.build_tables", str(tmp_path), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=DATA.parents[1], check=False)
    assert done.returncode == 1
    assert "stale: onnx_ops.json, ge_kernels.json" in done.stdout
