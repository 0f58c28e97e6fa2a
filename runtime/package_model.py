"""The graphs of a published package behind the FrameModel protocol, with the semantics of the official runtime.

    prefill      -> the cache as the graph returns it, [1, T, H, D] per layer
    next_frame   settings that the fixed graph holds as constants: local_fixed_sampled_frame with the uniforms given
                 any other settings (greedy): 1 + n_vq calls of local_cached_step, chosen by runtime/sampling.py
    next step    decode_step: every call returns the whole cache, one row longer

Nothing is padded: decode_step is right only when the past holds exactly `past_valid_lengths` rows (MODEL.md 5.6).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from runtime.errors import CapacityError, ManifestError
from runtime.frame_model import Frame, check_prompt_fits
from runtime.onnx_package import OnnxPackage
from runtime.package_graphs import LLM_FILES, cache_names, llm_names
from runtime.package_session import PackageSession
from runtime.sampling import SamplingParams, choose_code, decide_slot
from runtime.spec import Array

FIXED_SETTINGS = SamplingParams()  # what the fixed graph holds as constants (MODEL.md 5.4)
MAX_ROWS = 32768  # published max_position_embeddings; the graphs hold no table, so nothing else limits them
_HIDDEN, _TEXT, _AUDIO = 0, 1, 2  # step_type of local_cached_step

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class PublishedFrameModel:
    """A FrameModel over the package's own graphs; one utterance at a time."""

    backend_name = "ort (as published)"

    def __init__(
        self, package: OnnxPackage, threads: int | None = None, capacity: int = MAX_ROWS, spinning: bool = False
    ) -> None:
        self.capacity = capacity
        self._sessions: dict[str, PackageSession] = {}
        try:
            for graph in LLM_FILES:
                if graph in package.graphs:
                    self._sessions[graph] = PackageSession(package.path(graph), threads, spinning)
            for graph in ("prefill", "decode_step"):
                package.path(graph)
            if not {"local_fixed_sampled_frame", "local_cached_step"} & set(self._sessions):
                raise ManifestError(f"{package.directory}: no graph that samples a frame")
            self.num_layers = len(self._session("decode_step").input_shapes) // 2 - 1
            self.local_layers = self._count_local_layers()
            for graph, names in llm_names(self.num_layers, self.local_layers).items():
                if graph in self._sessions:
                    self._sessions[graph].check_names(names)
        except BaseException:
            self.close()
            raise
        self._ids = package.special_ids
        self.vocab_size, self.n_vq, self.codebook_size = self._head_sizes()
        self._past: list[Floats] = []
        self._length = 0
        self._hidden: Floats | None = None  # of a row that was read and not sampled from yet
        self._codes = np.zeros(self.n_vq, np.int32)
        self._seen = np.zeros((1, self.n_vq, self.codebook_size), np.int32)
        self._seen_before = self._seen

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Heads and head size of the global transformer."""
        shape = self._session("decode_step").input_shapes["past_key_0"]
        return int(shape[2] or 0), int(shape[3] or 0)

    def prefill(self, rows: Ints) -> None:
        check_prompt_fits(len(rows), self.capacity)
        outputs = self.run("prefill", {"input_ids": rows[None], "attention_mask": np.ones((1, len(rows)), np.int32)})
        self._past = [outputs[name] for name in cache_names("present", self.num_layers)]
        self._length = len(rows)
        self._hidden = outputs["global_hidden"][:, -1]
        self._seen = np.zeros_like(self._seen)

    def next_frame(self, uniforms: Floats, sampling: SamplingParams, keep_logits: bool = False) -> Frame:
        if self._hidden is None:
            self._hidden = self._step()
        hidden, self._hidden = self._hidden, None
        if sampling == FIXED_SETTINGS and "local_fixed_sampled_frame" in self._sessions:
            frame = self._fixed_frame(hidden, uniforms, keep_logits)
        else:
            frame = self._cached_frame(hidden, uniforms[0], sampling, keep_logits)
        self._seen_before = self._seen
        self._remember(frame.codes)
        return frame

    def force_frame(self, codes: Ints) -> None:
        self._seen = self._seen_before
        self._remember(np.asarray(codes, np.int32))

    def cache_rows(self) -> Floats:
        """As of our graphs: their keys hold the pairs that RoPE rotates as halves, published ones as neighbours."""
        rows = np.stack([past[0].transpose(1, 0, 2) for past in self._past])
        rows[::2] = np.concatenate([rows[::2, ..., 0::2], rows[::2, ..., 1::2]], axis=-1)
        return rows

    def run(self, graph: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One of the package's graphs, as it is."""
        return self._session(graph).run(feeds)

    def local_logits(self, hidden: Floats, codes: Ints) -> tuple[Floats, Floats]:
        """Logits [slot, end] and [n_vq, V] of a frame whose codes are known, by local_decoder in one pass."""
        outputs = self.run("local_decoder", {
            "global_hidden": hidden, "text_token_id": np.array([self._ids["audio_assistant_slot_id"]], np.int32),
            "audio_prefix_token_ids": codes[None, : self.n_vq - 1],
        })  # fmt: skip
        return self._slot_logits(outputs["text_logits"]), outputs["audio_logits"][0]

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def _step(self) -> Floats:
        if self._length >= self.capacity:
            raise CapacityError(f"row {self._length + 1} does not fit into {self.capacity} rows; shorten the text")
        row = np.concatenate([[self._ids["audio_assistant_slot_id"]], self._codes]).astype(np.int32)
        outputs = self.run("decode_step", {
            "input_ids": row[None, None], "past_valid_lengths": np.array([self._length], np.int32),
            **dict(zip(cache_names("past", self.num_layers), self._past, strict=True)),
        })  # fmt: skip
        self._past = [outputs[name] for name in cache_names("present", self.num_layers)]
        self._length += 1
        hidden: Floats = outputs["global_hidden"][:, -1]
        return hidden

    def _fixed_frame(self, hidden: Floats, uniforms: Floats, keep_logits: bool) -> Frame:
        outputs = self.run("local_fixed_sampled_frame", {
            "global_hidden": hidden, "repetition_seen_mask": self._seen,
            "assistant_random_u": uniforms[:, 0], "audio_random_u": uniforms[:, 1:],
        })  # fmt: skip
        codes = outputs["frame_token_ids"][0].astype(np.int32)
        go_on = bool(outputs["should_continue"][0, 0])
        if not keep_logits:
            return Frame(go_on, codes)
        if "local_decoder" not in self._sessions:  # the fixed graph itself shows no logits
            return Frame(go_on, codes, hidden[0])
        return Frame(go_on, codes, hidden[0], *self.local_logits(hidden, codes))

    def _cached_frame(self, hidden: Floats, uniforms: Floats, sampling: SamplingParams, keep_logits: bool) -> Frame:
        past: list[Floats] = [np.zeros((1, 0, *self._local_cache_shape()), np.float32)] * (2 * self.local_layers)
        text, _, past = self._local_step(hidden, _HIDDEN, 0, 0, past, 0)
        slot_logits = self._slot_logits(text)
        go_on = decide_slot(slot_logits, float(uniforms[0]), sampling)
        codes, kept = np.zeros(self.n_vq, np.int32), []
        kind, token = _TEXT, self._ids["audio_assistant_slot_id"]
        for channel in range(self.n_vq):
            _, audio, past = self._local_step(hidden, kind, token, channel - 1, past, channel + 1)
            kept.append(audio[0, channel])
            seen = self._seen[0, channel].astype(np.float32)
            codes[channel] = choose_code(kept[-1], seen, float(uniforms[1 + channel]), sampling)
            kind, token = _AUDIO, int(codes[channel])
        if not keep_logits:
            return Frame(go_on, codes)
        return Frame(go_on, codes, hidden[0], slot_logits, np.stack(kept))

    def _local_step(
        self, hidden: Floats, kind: int, token: int, channel: int, past: list[Floats], position: int
    ) -> tuple[Floats, Floats, list[Floats]]:
        """`channel` is the codebook that an audio token belongs to."""
        is_audio = kind == _AUDIO
        outputs = self.run("local_cached_step", {
            "global_hidden": hidden,
            "text_token_id": np.array([token if kind == _TEXT else 0], np.int32),
            "audio_token_id": np.array([token if is_audio else 0], np.int32),
            "channel_index": np.array([channel if is_audio else 0], np.int32),
            "step_type": np.array([kind], np.int32),
            "past_valid_lengths": np.array([position], np.int32),
            **dict(zip(cache_names("local_past", self.local_layers), past, strict=True)),
        })  # fmt: skip
        past = [outputs[name] for name in cache_names("local_present", self.local_layers)]
        return outputs["text_logits"], outputs["audio_logits"], past

    def _remember(self, codes: Ints) -> None:
        self._codes = codes
        self._seen = self._seen.copy()
        used = np.flatnonzero(codes < self.codebook_size)
        self._seen[0, used, codes[used]] = 1

    def _slot_logits(self, text_logits: Floats) -> Floats:
        ids = self._ids
        return np.asarray(text_logits[0, [ids["audio_assistant_slot_id"], ids["audio_end_id"]]], np.float32)

    def _session(self, graph: str) -> PackageSession:
        if graph not in self._sessions:
            raise ManifestError(
                f"the package has no {LLM_FILES[graph]}, which these settings need; the fixed graph alone runs only "
                f"with its own settings: temperature 0.8, top-k 25, top-p 0.95, repetition penalty 1.2"
            )
        return self._sessions[graph]

    def _count_local_layers(self) -> int:
        """From the caches of local_cached_step; a package without it never needs the number."""
        if "local_cached_step" not in self._sessions:
            return 0
        return (len(self._sessions["local_cached_step"].input_shapes) - 6) // 2

    def _local_cache_shape(self) -> tuple[int, int]:
        shape = self._session("local_cached_step").input_shapes["local_past_key_0"]
        return int(shape[2] or 0), int(shape[3] or 0)

    def _head_sizes(self) -> tuple[int, int, int]:
        """Vocabulary, codebooks, codes per codebook. The fixed graph does not show the vocabulary: 2**31 - 1 then."""
        for graph in ("local_cached_step", "local_decoder"):
            if graph in self._sessions:
                shapes = self._sessions[graph].output_shapes
                vocab, (n_vq, codes) = shapes["text_logits"][-1], shapes["audio_logits"][-2:]
                if all(isinstance(size, int) for size in (vocab, n_vq, codes)):
                    return int(vocab), int(n_vq), int(codes)
        shape = self._session("local_fixed_sampled_frame").input_shapes["repetition_seen_mask"]
        return 2**31 - 1, int(shape[1] or 0), int(shape[2] or 0)
