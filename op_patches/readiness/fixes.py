"""What to do about a node that has no AICore kernel: the change, and the lowering that makes it."""

from __future__ import annotations

Fix = tuple[str, str | None]

_NO_KERNEL: dict[str, Fix] = {
    "Cast": ("no engine holds one of the two types: choose float32, float16 or an integer type", None),
    "CastLike": ("use Cast with the known type", "cast_like"),
    "ConcatFromSequence": ("export without sequences: Concat the tensors", None),
    "CumSum": ("Cast to int32 or float32 first", None),
    "Einsum": ("write the equation with Transpose, Reshape and MatMul", "einsum"),
    "LayerNormalization": ("give it a bias of the input's type", "layer_norm"),
    "MatMul": ("Cast to float32 around it", "matmul"),
    "Trilu": ("multiply by a constant mask, or select with one", "trilu"),
    "Where": ("select between int32 or float32 and Cast back, or use And/Or/Not", "where_bool"),
}
_AICPU: dict[str, Fix] = {
    "Cast": ("keep to float32, float16, int32, int64 and bool", None),
    "CumSum": ("narrow to int32 when the range allows it", "narrow_int64"),
    "Div": ("narrow to int32 when the range allows it", "narrow_int64"),
    "Expand": ("add zeros of the wanted shape instead", "int64_kernels"),
    "GatherElements": ("Cast the bool data to int32 around it", "bool_data"),
    "MatMul": ("Cast to float32 (float16 on 310P) around it", "matmul"),
    "Mod": ("narrow to int32 when the range allows it", "narrow_int64"),
    "Pad": ("narrow to int32, or Concat constants", "narrow_int64"),
    "IsNaN": ("compare the number with itself", "is_nan"),
    "Pow": ("multiply, or narrow to int32 when the range allows it", "int64_kernels"),
    "ScatterElements": ("write it as Where with a one-hot mask", "scatter"),
    "ScatterND": ("write the rows outside the graph (delta KV), or use Where with a constant mask", "scatter"),
    "Slice": ("make starts, ends, axes and steps constants", "fold_constants"),
    "TopK": ("Cast to float32, or rank by counting", "top_k"),
    "NonZero": ("its output shape depends on data: use a mask of fixed shape", None),
    "Multinomial": ("sample on the host", None),
    "RandomUniform": ("feed random numbers as a graph input", None),
    "RandomUniformLike": ("feed random numbers as a graph input", None),
    "RandomNormal": ("feed random numbers as a graph input", None),
    "RandomNormalLike": ("feed random numbers as a graph input", None),
}


def missing_kernel_fix(op_type: str, dtype: str) -> Fix:
    if op_type.startswith("Sequence") or op_type in ("SplitToSequence", "ConcatFromSequence"):
        return "export without sequences: tensors and Concat, Split or Slice", None
    return _NO_KERNEL.get(op_type, (_cast_advice(dtype), None))


def aicpu_fix(op_type: str, dtype: str) -> Fix:
    if dtype == "float64":
        return "compute in float32", None
    if op_type == "MatMul" and dtype == "float32":
        return (
            "patch with the input shapes bound (rank 3, equal batch axes), or compile with precision=fp16",
            "matmul_310p",
        )
    if op_type == "Pad" and dtype == "bool":
        return "Cast the bool data to int32 around it", "bool_data"
    return _AICPU.get(op_type, (_cast_advice(dtype), None))


def _cast_advice(dtype: str) -> str:
    if dtype in ("int32", "int16", "uint16", "int8", "uint8", "bool"):
        return f"Cast {dtype} to float32 around it (exact below 2^24)"
    return f"Cast {dtype} to float32 or int32 around it"
