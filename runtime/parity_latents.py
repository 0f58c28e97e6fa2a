"""The codec's latents, where a backend can give them: the value between the dequantizer and the first decoder stage.

No graph outputs them. PyTorch has the module; for ONNX Runtime the part of codec_stream that computes them is cut out
(with the onnx package). A compiled .om cannot be opened, a published package (no backend) does not name the value:
there the stage is not measured.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.backends.base import Backend
from runtime.backends.ort import OrtBackend
from runtime.backends.torch import TorchBackend
from runtime.manifest import Manifest

LATENTS = "codec_dequantizer/latents"  # the value's name in codec_stream.onnx, from its label in the module


def codec_latents(
    manifest: Manifest, backend: Backend | None, codes: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32] | None:
    """Latents [F, latent_size] of codes [F, n_vq]; None where the backend cannot give them."""
    if backend is None:
        return None
    padded = np.full((1, manifest.codec.n_vq, len(codes)), manifest.codec.codebook_size, np.int32)
    padded[0, : codes.shape[1]] = codes.T
    if isinstance(backend, TorchBackend):
        return _from_torch(manifest, backend, padded)
    if isinstance(backend, OrtBackend):
        return _from_onnx(manifest.path(manifest.graph("codec_stream").file), padded)
    return None


def _from_torch(manifest: Manifest, backend: TorchBackend, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    import torch

    graph = manifest.graph("codec_stream")
    with backend.open(graph.spec, manifest.path(graph.file)) as session, torch.inference_mode():
        latents = session.module.latents(torch.from_numpy(codes).to(backend.device))  # type: ignore[operator]
    return np.asarray(latents[0].cpu().numpy(), np.float32)


def _from_onnx(path: Path, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.float32] | None:
    try:
        import onnx
        import onnx.utils
    except ImportError:
        return None
    import onnxruntime

    model = onnx.load(str(path), load_external_data=False)
    if not any(LATENTS in node.output for node in model.graph.node):
        return None
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(LATENTS, onnx.TensorProto.FLOAT, None))
    part = onnx.utils.Extractor(model).extract_model(["codes"], [LATENTS])
    for tensor in part.graph.initializer:  # onnx's own loader refuses weights that are links
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            with (path.parent / place["location"]).open("rb") as file:
                file.seek(int(place.get("offset", 0)))
                tensor.raw_data = file.read(int(place["length"]))
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
    session = onnxruntime.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run([LATENTS], {"codes": codes})[0][0], np.float32)
