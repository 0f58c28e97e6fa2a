"""Write a package in the form of the published ONNX package, from any checkpoint: dynamic axes, growing cache.

    OUT/MOSS-TTS-Nano-100M-ONNX/          five moss_tts_*.onnx with two shared .data files, tokenizer.model,
                                          tts_browser_onnx_meta.json, browser_poc_manifest.json
    OUT/MOSS-Audio-Tokenizer-Nano-ONNX/   three moss_audio_tokenizer_*.onnx with .data, codec_browser_onnx_meta.json

The layout and the graphs' interfaces are MODEL.md 2.3, 5.6, 6.7; the files are not upstream's. Uses: tests of
`run-om say --as-published` and of `convert-moss check`, and the official loop as the other side of a benchmark.
The graphs come from torch's TorchScript exporter, the tool that made the published ones: it renames and transposes
weights ("onnx::MatMul_123") and writes the Shape logic that ATC stumbles over.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, external_data_helper, numpy_helper
from torch import Tensor, nn

from convert.checkpoint import open_codec, open_model
from convert.published_codec import PublishedCodec, PublishedCodecStep, PublishedDecodeFull, PublishedEncode
from convert.published_llm import (
    PublishedDecodeStep,
    PublishedFixedFrame,
    PublishedLlm,
    PublishedLocalCachedStep,
    PublishedLocalDecoder,
    PublishedPrefill,
)
from runtime.config import CodecConfig, ModelConfig
from runtime.errors import ExportError
from runtime.graphs import attention_layers
from runtime.manifest import write_atomically
from runtime.onnx_package import MADE_UP_KEY
from runtime.package_graphs import CODEC_META_NAME, MANIFEST_NAME, TTS_META_NAME, codec_state_names, published_names
from runtime.prompt import PromptBuilder, Template
from runtime.sampling import SamplingParams
from runtime.spec import Array
from runtime.tokenizer import Tokenizer

TTS_DIRECTORY, CODEC_DIRECTORY = "MOSS-TTS-Nano-100M-ONNX", "MOSS-Audio-Tokenizer-Nano-ONNX"
OPSET = 17
GLOBAL_DATA, LOCAL_DATA = "moss_tts_global_shared.data", "moss_tts_local_shared.data"
DECODE_DATA, ENCODE_DATA = "moss_audio_tokenizer_decode_shared.data", "moss_audio_tokenizer_encode.data"
_DATA_FILE = {
    "prefill": GLOBAL_DATA, "decode_step": GLOBAL_DATA, "local_decoder": LOCAL_DATA, "local_cached_step": LOCAL_DATA,
    "local_fixed_sampled_frame": LOCAL_DATA, "encode": ENCODE_DATA, "decode_full": DECODE_DATA,
    "codec_decode_step": DECODE_DATA,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Example:
    """What the exporter needs: example inputs in order, and the axes that stay open."""

    args: tuple[Tensor, ...]
    axes: dict[str, dict[int, str]]


def write_published_package(
    model_source: str | Path,
    codec_source: str | Path,
    directory: Path,
    voices: Mapping[str, Array] | None = None,
    graphs: Iterable[str] = tuple(_DATA_FILE),
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the package below `directory`; `graphs` leaves some out, as derived packages do. Return the TTS part."""
    model, codec = open_model(model_source), open_codec(codec_source)
    wanted = list(graphs)
    tts, audio = directory / TTS_DIRECTORY, directory / CODEC_DIRECTORY
    for part in (tts, audio):
        part.mkdir(parents=True, exist_ok=True)
    modules = _modules(model.config, model.tensors, codec.config, codec.tensors)
    unknown = set(wanted) - set(modules)
    if unknown:
        raise ExportError(f"no published graph {', '.join(sorted(unknown))}; graphs: {', '.join(modules)}")
    stores = {name: _DataFile((tts if name in (GLOBAL_DATA, LOCAL_DATA) else audio) / name) for name in
              dict.fromkeys(_DATA_FILE[g] for g in wanted)}  # fmt: skip
    names = published_names(model.config, codec.config)
    for graph in wanted:
        example = _example(graph, model.config, codec.config)
        store = stores[_DATA_FILE[graph]]
        proto = _export(modules[graph], example, names[graph].inputs, names[graph].outputs)
        store.take(proto)
        onnx.save(proto, store.path.parent / names[graph].file)
        report(f"{names[graph].file}: {len(proto.graph.node)} nodes")
    for store in stores.values():
        store.close()
    _write_metas(tts, audio, model.config, codec.config, wanted)
    tokenizer = model.directory / "tokenizer.model"
    if tokenizer.is_file():
        (tts / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    templates = _templates(model.config, tts / "tokenizer.model") if tokenizer.is_file() else {}
    manifest = _manifest(model.config, templates, voices or {})
    if model.made_up or codec.made_up:
        manifest[MADE_UP_KEY] = True
    write_atomically(tts / MANIFEST_NAME, _json(manifest))
    return tts


def _modules(
    model: ModelConfig, tensors: Mapping[str, Tensor], codec: CodecConfig, codec_tensors: Mapping[str, Tensor]
) -> dict[str, nn.Module]:
    llm, audio = PublishedLlm(model, tensors), PublishedCodec(codec, codec_tensors)
    return {
        "prefill": PublishedPrefill(llm),
        "decode_step": PublishedDecodeStep(llm),
        "local_decoder": PublishedLocalDecoder(llm),
        "local_cached_step": PublishedLocalCachedStep(llm),
        "local_fixed_sampled_frame": PublishedFixedFrame(llm),
        "encode": PublishedEncode(audio),
        "decode_full": PublishedDecodeFull(audio),
        "codec_decode_step": PublishedCodecStep(audio),
    }


def _export(module: nn.Module, example: _Example, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecated exporter, and traced Python numbers, which are meant
        torch.onnx.export(
            module.eval(), example.args, buffer,  # type: ignore[arg-type]  # files are taken, its stubs leave them out
            dynamo=False, opset_version=OPSET, do_constant_folding=True,
            input_names=list(inputs), output_names=list(outputs), dynamic_axes=example.axes,
        )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


def _example(graph: str, model: ModelConfig, codec: CodecConfig) -> _Example:
    past, batch = 4, {0: "batch"}
    E, cache = model.hidden_size, (1, past, model.num_heads, model.head_size)

    def integers(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.int32)

    def layers(count: int, prefix: str, axis: str) -> dict[str, dict[int, str]]:
        return {f"{prefix}{k}_{i}": {0: "batch", 1: axis} for i in range(count) for k in ("key", "value")}

    if graph == "prefill":
        sequence = {0: "batch", 1: "prefill_seq"}
        axes = {"input_ids": sequence, "attention_mask": sequence, "global_hidden": sequence}
        axes |= layers(model.num_layers, "present_", "prefill_seq")
        return _Example((integers(1, 5, model.n_vq + 1), integers(1, 5)), axes)
    if graph == "decode_step":
        sequence = {0: "batch", 1: "step_seq"}
        axes = {"input_ids": sequence, "past_valid_lengths": batch, "global_hidden": sequence}
        axes |= layers(model.num_layers, "past_", "past_seq") | layers(model.num_layers, "present_", "total_seq")
        kv = tuple(torch.zeros(cache) for _ in range(2 * model.num_layers))
        return _Example((integers(1, 1, model.n_vq + 1), integers(1) * past, *kv), axes)
    if graph == "local_decoder":  # published with fixed axes
        return _Example((torch.zeros(1, E), integers(1), integers(1, model.n_vq - 1)), {})
    if graph == "local_cached_step":
        names = ("global_hidden", "text_token_id", "audio_token_id", "channel_index", "step_type", "past_valid_lengths",
                 "text_logits", "audio_logits")  # fmt: skip
        axes = dict.fromkeys(names, batch) | layers(model.local_layers, "local_past_", "local_past_seq")
        axes |= layers(model.local_layers, "local_present_", "local_total_seq")
        kv = tuple(torch.zeros(cache) for _ in range(2 * model.local_layers))
        return _Example((torch.zeros(1, E), *(integers(1) for _ in range(4)), integers(1) * past, *kv), axes)
    if graph == "local_fixed_sampled_frame":
        seen, uniforms = integers(1, model.n_vq, model.codebook_size), torch.zeros(1, model.n_vq)
        interface = ("global_hidden", "repetition_seen_mask", "assistant_random_u", "audio_random_u", "should_continue",
                     "frame_token_ids")  # fmt: skip
        return _Example((torch.zeros(1, E), seen, torch.zeros(1), uniforms), dict.fromkeys(interface, batch))
    return _codec_example(graph, codec)


def _codec_example(graph: str, codec: CodecConfig) -> _Example:
    lengths = torch.tensor([3], dtype=torch.int32)
    code_axes = {0: "batch", 1: "code_length"}
    codes = torch.ones((1, 3, codec.n_vq), dtype=torch.int32)
    audio_axes = {0: "batch", 2: "audio_length"}
    if graph == "encode":
        samples = 3 * codec.samples_per_frame + 7
        axes = {"waveform": {0: "batch", 2: "waveform_length"}, "audio_codes": code_axes}
        axes |= {"input_lengths": {0: "batch"}, "audio_code_lengths": {0: "batch"}}
        return _Example((torch.zeros(1, codec.num_channels, samples), lengths * 0 + samples), axes)
    if graph == "decode_full":
        axes = {"audio_codes": code_axes, "audio": audio_axes}
        axes |= {"audio_code_lengths": {0: "batch"}, "audio_lengths": {0: "batch"}}
        return _Example((codes, lengths), axes)
    state = [torch.zeros(1, dtype=torch.int32) for _ in codec.decoder]
    for stage in attention_layers(codec.decoder):
        cache = (1, stage.num_heads, stage.context, stage.head_size)
        state += [torch.zeros(1, dtype=torch.int32), torch.zeros(cache), torch.zeros(cache)]
        state.append(torch.full((1, stage.context), -1, dtype=torch.int32))
    return _Example((codes, lengths, *state), {"audio_codes": {1: "code_length"}, "audio": {2: "audio_length"}})


class _DataFile:
    """One shared .data file: equal tensors of all its graphs are stored once."""

    def __init__(self, path: Path) -> None:
        self.path, self._file, self._end = path, path.open("wb"), 0
        self._known: dict[tuple[bytes, str], tuple[int, int]] = {}

    def take(self, proto: onnx.ModelProto) -> None:
        """Move the float initializers of a graph into the file; shapes stay in the graph, where ORT reads them."""
        for tensor in proto.graph.initializer:
            if tensor.data_type != TensorProto.FLOAT:
                continue
            raw = numpy_helper.to_array(tensor).tobytes()
            key = (sha256(raw).digest(), f"{tensor.data_type}{list(tensor.dims)}")
            if key not in self._known:
                self._known[key] = (self._end, len(raw))
                self._end += self._file.write(raw)
            offset, length = self._known[key]
            tensor.raw_data = raw
            external_data_helper.set_external_data(tensor, self.path.name, offset, length)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL

    def close(self) -> None:
        self._file.close()


def _write_metas(tts: Path, audio: Path, model: ModelConfig, codec: CodecConfig, wanted: Sequence[str]) -> None:
    names = published_names(model, codec)
    llm = [g for g in wanted if _DATA_FILE[g] in (GLOBAL_DATA, LOCAL_DATA)]
    constants = {"text_temperature": 1.0, "audio_temperature": 0.8, "audio_top_k": 25, "audio_top_p": 0.95,
                 "audio_repetition_penalty": 1.2}  # fmt: skip
    tts_meta = {
        "format_version": 1,
        "files": {g: names[g].file for g in llm},
        "external_data_files": {g: [_DATA_FILE[g]] for g in llm},
        "model_config": {
            "n_vq": model.n_vq, "row_width": model.n_vq + 1, "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size, "global_layers": model.num_layers, "local_layers": model.local_layers,
            "num_heads": model.num_heads, "head_dim": model.head_size,
            "audio_codebook_sizes": list(model.codebook_sizes),
        },
        "onnx": {"opset": OPSET, "fixed_sampled_frame_constants": constants},
    }  # fmt: skip
    write_atomically(tts / TTS_META_NAME, _json(tts_meta))
    codec_graphs = [g for g in wanted if g not in llm]
    codec_meta = {
        "format_version": 1,
        "files": {g.removeprefix("codec_"): names[g].file for g in codec_graphs},
        "external_data_files": {g.removeprefix("codec_"): [_DATA_FILE[g]] for g in codec_graphs},
        "codec_config": {
            "sample_rate": codec.sample_rate_hz, "channels": codec.num_channels, "num_quantizers": codec.n_vq,
            "downsample_rate": codec.samples_per_frame, "codebook_size": codec.codebook_size,
        },
        "streaming_decode": _streaming(codec),
    }  # fmt: skip
    write_atomically(audio / CODEC_META_NAME, _json(codec_meta))


def _streaming(codec: CodecConfig) -> dict[str, Any]:
    """The section that names the caches of decode_step."""
    caches = []
    layer_in_stage = [(s, i) for s in codec.decoder for i in range(s.num_layers)]
    for index, (stage, layer) in enumerate(layer_in_stage):
        entry: dict[str, Any] = {"index": index, "decoder_index": stage.index, "layer_index": layer}
        entry |= {"context": stage.context, "num_heads": stage.num_heads, "head_dim": stage.head_size}
        for kind, (name_in, name_out) in codec_state_names(index).items():
            entry |= {f"{kind}_input_name": name_in, f"{kind}_output_name": name_out}
        entry |= {"offset_shape": [1], "cache_shape": [1, stage.num_heads, stage.context, stage.head_size]}
        caches.append(entry | {"positions_shape": [1, stage.context]})
    stem = "transformer_offset"
    offsets = [
        {"index": i, "input_name": f"{stem}_{i}", "output_name": f"{stem}_out_{i}", "shape": [1]}
        for i in range(len(codec.decoder))
    ]
    return {"transformer_offsets": offsets, "attention_caches": caches}


def _templates(model: ModelConfig, tokenizer: Path) -> dict[str, list[int]]:
    """The three arrays of the published manifest: before the reference, before the text, behind the text."""
    parts = PromptBuilder(model, Tokenizer(tokenizer), Template.ONNX).template_ids()
    return {
        "user_prompt_prefix_token_ids": parts.before_reference,
        "user_prompt_after_reference_token_ids": parts.after_reference,
        "assistant_prompt_prefix_token_ids": parts.after_text,
    }


def _manifest(model: ModelConfig, templates: Mapping[str, Any], voices: Mapping[str, Array]) -> dict[str, Any]:
    s = SamplingParams()
    return {
        "format_version": 1,
        "model_files": {
            "tts_meta": TTS_META_NAME,
            "codec_meta": f"../{CODEC_DIRECTORY}/{CODEC_META_NAME}",
            "tokenizer_model": "tokenizer.model",
        },
        "tts_config": {
            "n_vq": model.n_vq, "audio_pad_token_id": model.audio_pad_id, "pad_token_id": model.pad_id,
            "im_start_token_id": model.im_start_id, "im_end_token_id": model.im_end_id,
            "audio_start_token_id": model.audio_start_id, "audio_end_token_id": model.audio_end_id,
            "audio_user_slot_token_id": model.audio_user_slot_id,
            "audio_assistant_slot_token_id": model.audio_assistant_slot_id,
            "audio_codebook_sizes": list(model.codebook_sizes),
        },
        "prompt_templates": dict(templates),
        "generation_defaults": {
            "max_new_frames": 375, "do_sample": True, "sample_mode": "fixed", "text_temperature": s.slot_temperature,
            "text_top_k": s.slot_top_k, "text_top_p": s.slot_top_p, "audio_temperature": s.temperature,
            "audio_top_k": s.top_k, "audio_top_p": s.top_p, "audio_repetition_penalty": s.repetition_penalty,
        },
        "builtin_voices": [
            {"voice": name, "display_name": name, "group": "made by a test", "audio_file": f"{name}.wav",
             "prompt_audio_codes": np.asarray(codes).tolist()}
            for name, codes in voices.items()
        ],
        "text_samples": [],
    }  # fmt: skip


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
