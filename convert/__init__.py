"""From a published checkpoint to ONNX graphs and .om files; runs on a host, once."""
