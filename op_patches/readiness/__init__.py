"""Readiness: what ATC will say about an ONNX graph, before there is an ATC to ask.

    report = check_model("step.onnx", Target.parse("910B4"), parse_input_shapes("row:1,1,17;position:1"))
    print(summary_line(report))

Needs onnx and NumPy; neither torch nor CANN. docs/readiness.md says how far each rule was checked.
"""

from op_patches.readiness.check import check_directory, check_model, first_refusal
from op_patches.readiness.interface import parse_input_shapes
from op_patches.readiness.report import Finding, ReadinessReport, Severity, summary_line

__all__ = [
    "Finding",
    "ReadinessReport",
    "Severity",
    "check_directory",
    "check_model",
    "first_refusal",
    "parse_input_shapes",
    "summary_line",
]
