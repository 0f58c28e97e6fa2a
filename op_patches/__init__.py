"""Lowerings that make an ONNX graph acceptable to ATC, and the check that says whether it is. Needs onnx only."""
