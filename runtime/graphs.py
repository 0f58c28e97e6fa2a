"""THE table of graphs: from the model configs to the interface of every exported network.

Axes that stay names until they are bound: B batch, T prompt rows, C cache capacity, F codec frames, N samples; F32 the
tokens of F frames at 32 per frame, R50 the shown slots of a ring of 50 frames, R50x32 their tokens.
L, H, D, E, Q, V are numbers of the checkpoint: layers, heads, head size, hidden size, codebooks, codes per codebook.

A step returns only its new key and value rows ("delta"): the owner of the cache writes them at `position`.
`positions` count from 0 and only grow; they drive RoPE, causality and attention windows, so no graph holds Shape logic.
"""

from __future__ import annotations

from runtime.config import CodecConfig, CodecStage, ModelConfig
from runtime.spec import GraphSpec, TensorSpec

LLM_GRAPHS = ("prefill", "step", "frame", "step_frame", "extend")
CODEC_GRAPHS = ("codec_encode", "codec_decode", "codec_stream")
GRAPH_NAMES = LLM_GRAPHS + CODEC_GRAPHS
HOST_GRAPHS = ("extend",)  # for ONNX Runtime on a CPU (runtime/shared_sessions.py); never compiled
DEVICE_GRAPHS = tuple(name for name in GRAPH_NAMES if name not in HOST_GRAPHS)

BLOCK_FRAMES = 8  # codec_decode attends block by block; measured in docs/codec.md
NO_FRAME = -(2**20)  # the position of a frame that no query sees: farther back than every window


def graph_specs(model: ModelConfig, codec: CodecConfig) -> dict[str, GraphSpec]:
    """Every graph of one model, by name."""
    specs = (
        prefill_spec(model),
        step_spec(model),
        frame_spec(model),
        step_frame_spec(model),
        extend_spec(model),
        codec_encode_spec(codec),
        codec_decode_spec(codec),
        codec_stream_spec(codec),
    )
    return {spec.name: spec for spec in specs}


def prefill_spec(model: ModelConfig) -> GraphSpec:
    """Read the prompt. `last` is the position of its last row: rows behind it are padding, which causality keeps away
    from the rows before."""
    cache = (model.num_heads, "T", model.head_size)
    return GraphSpec(
        "prefill",
        (
            TensorSpec("rows", "int32", ("B", "T", 1 + model.n_vq)),
            TensorSpec("positions", "int32", ("B", "T")),
            TensorSpec("last", "int32", ("B",)),
        ),
        (
            TensorSpec("hidden", "float32", ("B", model.hidden_size)),
            *(
                TensorSpec(f"{kind}_{layer}", "float32", ("B", *cache))
                for layer in range(model.num_layers)
                for kind in ("key", "value")
            ),
        ),
    )


def step_spec(model: ModelConfig) -> GraphSpec:
    """Read one row against the cache. `cache_mask` is added to the scores: 0 where a row counts, MASKED elsewhere."""
    return GraphSpec("step", _step_inputs(model), (_hidden(model), *_new_rows(model)))


def frame_spec(model: ModelConfig) -> GraphSpec:
    """Sample one frame from the hidden state of the last row."""
    return GraphSpec("frame", (_hidden(model), *_frame_inputs(model)), _frame_outputs(model))


def step_frame_spec(model: ModelConfig) -> GraphSpec:
    """`step` and `frame` in one launch: row of the frame before in, next frame out."""
    return GraphSpec(
        "step_frame",
        (*_step_inputs(model), *_frame_inputs(model)),
        (_hidden(model), *_new_rows(model), *_frame_outputs(model)),
    )


def extend_spec(model: ModelConfig) -> GraphSpec:
    """Read T rows against the cache: `prefill` when nothing is visible in the cache, `step` when T is 1."""
    return GraphSpec(
        "extend",
        (
            TensorSpec("rows", "int32", ("B", "T", 1 + model.n_vq)),
            TensorSpec("positions", "int32", ("B", "T")),
            TensorSpec("last", "int32", ("B",)),
            *_cache_inputs(model),
        ),
        (_hidden(model), *_new_rows(model, "T")),
    )


def _hidden(model: ModelConfig) -> TensorSpec:
    return TensorSpec("hidden", "float32", ("B", model.hidden_size))


def _step_inputs(model: ModelConfig) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("row", "int32", ("B", 1, 1 + model.n_vq)),
        TensorSpec("position", "int32", ("B",)),
        *_cache_inputs(model),
    )


def _cache_inputs(model: ModelConfig) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("cache_mask", "float32", ("B", 1, 1, "C")),
        *(
            TensorSpec(f"past_{kind}_{layer}", "float32", ("B", model.num_heads, "C", model.head_size))
            for layer in range(model.num_layers)
            for kind in ("key", "value")
        ),
    )


def _new_rows(model: ModelConfig, rows: int | str = 1) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"new_{kind}_{layer}", "float32", ("B", model.num_heads, rows, model.head_size))
        for layer in range(model.num_layers)
        for kind in ("key", "value")
    )


def _frame_inputs(model: ModelConfig) -> tuple[TensorSpec, ...]:
    """Index 0 of temperature, top_k and top_p rules the slot decision, index 1 the codes."""
    return (
        TensorSpec("seen", "float32", ("B", model.n_vq, model.codebook_size)),  # 1 where a code was used before
        TensorSpec("uniforms", "float32", ("B", 1 + model.n_vq)),  # [0, 1): the decision first, then one per codebook
        TensorSpec("temperature", "float32", ("B", 2)),
        TensorSpec("top_k", "int32", ("B", 2)),
        TensorSpec("top_p", "float32", ("B", 2)),
        TensorSpec("penalty", "float32", ("B",)),
    )


def _frame_outputs(model: ModelConfig) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("go_on", "int32", ("B",)),  # 1: a frame follows and `codes` is it; 0: the utterance is over
        TensorSpec("codes", "int32", ("B", model.n_vq)),
        TensorSpec("seen_next", "float32", ("B", model.n_vq, model.codebook_size)),
        TensorSpec("slot_logits", "float32", ("B", 2)),  # [slot, end]
        TensorSpec("code_logits", "float32", ("B", model.n_vq, model.codebook_size)),  # before the penalty
    )


def codec_encode_spec(codec: CodecConfig) -> GraphSpec:
    """The next F frames of a clip to codes; rings as in codec_stream, those of the encoder."""
    return GraphSpec(
        "codec_encode",
        (
            TensorSpec("waveform", "float32", ("B", codec.num_channels, "N")),
            TensorSpec("positions", "int32", ("B", "F")),
            *_past_rings(codec.encoder),
        ),
        (TensorSpec("codes", "int32", ("B", codec.n_vq, "F")), *_new_ring_rows(codec.encoder)),
    )


def codec_decode_spec(codec: CodecConfig) -> GraphSpec:
    """All codes to a waveform at once. F is a multiple of BLOCK_FRAMES, padded on the right with any code."""
    return GraphSpec(
        "codec_decode",
        (
            TensorSpec("codes", "int32", ("B", codec.n_vq, "F")),
            TensorSpec("positions", "int32", ("B", "F")),
        ),
        (TensorSpec("waveform", "float32", ("B", codec.num_channels, "N")),),
    )


def codec_stream_spec(codec: CodecConfig) -> GraphSpec:
    """The next F frames to a waveform; rings hold the window of keys and values of each attention layer.

    Frame p lies in the slot p mod ring_frames of its stage. `past_positions_s` says which frame each slot of stage s
    holds; NO_FRAME hides a slot, and slots at the end that never held a frame need not be shown. Only the new rows come
    out; the owner writes them into the rings.
    """
    return GraphSpec(
        "codec_stream",
        (
            TensorSpec("codes", "int32", ("B", codec.n_vq, "F")),
            TensorSpec("positions", "int32", ("B", "F")),
            *_past_rings(codec.decoder),
        ),
        (TensorSpec("waveform", "float32", ("B", codec.num_channels, "N")), *_new_ring_rows(codec.decoder)),
    )


def _past_rings(stages: tuple[CodecStage, ...]) -> tuple[TensorSpec, ...]:
    return (
        *(TensorSpec(f"past_positions_{i}", "int32", ("B", f"R{s.ring_frames}")) for i, s in enumerate(stages)),
        *(
            TensorSpec(f"past_{kind}_{i}", "float32", ("B", s.num_heads, _ring_tokens(s), s.head_size))
            for i, s in enumerate(attention_layers(stages))
            for kind in ("key", "value")
        ),
    )


def _new_ring_rows(stages: tuple[CodecStage, ...]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"new_{kind}_{i}", "float32", ("B", s.num_heads, f"F{s.tokens_per_frame}", s.head_size))
        for i, s in enumerate(attention_layers(stages))
        for kind in ("key", "value")
    )


def attention_layers(stages: tuple[CodecStage, ...]) -> tuple[CodecStage, ...]:
    """The stage of each attention layer of an encoder or a decoder, in order."""
    return tuple(stage for stage in stages for _ in range(stage.num_layers))


def ring_capacity(stage: CodecStage) -> int:
    """Tokens that the cache ring of one layer of a stage holds."""
    return stage.ring_frames * stage.tokens_per_frame


def _ring_tokens(stage: CodecStage) -> str:
    """The axis of the rows of a ring: tokens_per_frame for each slot that is shown."""
    return f"R{stage.ring_frames}x{stage.tokens_per_frame}"


def ring_axes(codec: CodecConfig) -> dict[str, int]:
    """The axes of the rings when every slot is shown, which is how they are compiled."""
    stages = (*codec.encoder, *codec.decoder)
    return {f"R{s.ring_frames}": s.ring_frames for s in stages} | {_ring_tokens(s): ring_capacity(s) for s in stages}


def whole_blocks(num_frames: int) -> int:
    """The frames that codec_decode takes for `num_frames`: the next multiple of BLOCK_FRAMES."""
    return -(-num_frames // BLOCK_FRAMES) * BLOCK_FRAMES


def derived_axes(codec: CodecConfig, num_frames: int) -> dict[str, int]:
    """The axes of the codec graphs for this number of frames and whole rings."""
    per_frame = {f"F{s.tokens_per_frame}": s.tokens_per_frame * num_frames for s in (*codec.encoder, *codec.decoder)}
    return {"F": num_frames, "N": codec.samples_per_frame * num_frames, **per_frame, **ring_axes(codec)}
