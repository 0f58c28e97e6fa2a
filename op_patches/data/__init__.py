"""Tables of what CANN's ONNX parser and kernels take."""
