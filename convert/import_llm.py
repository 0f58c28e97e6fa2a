"""The language model's weights and sizes, read off the package's graphs.

    prefill, decode_step              embeddings by the position they read in a row, blocks, ln_f
    local_decoder, local_cached_step  text head, audio heads in order, local blocks, ln_f, embeddings by position
    local_fixed_sampled_frame         every matrix in it must be one of those (its 1 + n_vq passes share them)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.import_blocks import Block, unknown_structure, walk_blocks
from convert.import_constants import Array
from convert.import_recovered import Recovered
from convert.import_view import GraphView, Linear
from runtime.errors import CheckpointError
from runtime.package_graphs import LLM_FILES

_GLOBAL, _LOCAL = ("prefill", "decode_step"), ("local_decoder", "local_cached_step")


@dataclass(frozen=True, slots=True)
class LlmShape:
    """What config.json needs and the graphs tell."""

    num_layers: int
    local_layers: int
    num_heads: int
    hidden_size: int
    inner_size: int
    epsilon: float
    vocab_size: int
    codebook_sizes: tuple[int, ...]
    rope_base: float


@dataclass(frozen=True, slots=True)
class _Part:
    """What one graph tells besides its tensors."""

    blocks: list[Block]
    epsilons: set[float]
    heads: tuple[int, int] | None  # heads and head size, from the interface
    rope_base: float | None


def recover_llm(graphs: Mapping[str, Path], result: Recovered) -> LlmShape:
    """Fill `result` with every tensor of the language model. One graph after the other is in memory."""
    parts: dict[str, _Part] = {}
    for names, read in ((_GLOBAL, _read_global), (_LOCAL, _read_local)):
        present = [name for name in names if name in graphs]
        if not present:
            raise CheckpointError(
                f"the package has neither {' nor '.join(LLM_FILES[n] for n in names)}: the weights in them cannot be "
                "recovered; download the missing file"
            )
        for name in present:
            view = GraphView(graphs[name])
            result.meet(view)
            parts[name] = read(view, name, result)
    if "local_fixed_sampled_frame" in graphs:
        view = GraphView(graphs["local_fixed_sampled_frame"])
        result.meet(view)
        result.check_coverage(view, "local_fixed_sampled_frame")
    return _shape(parts, result)


def _shape(parts: Mapping[str, _Part], result: Recovered) -> LlmShape:
    first = {name: next(p for n, p in parts.items() if n in names) for name, names in
             (("global", _GLOBAL), ("local", _LOCAL))}  # fmt: skip
    epsilons = {e for part in parts.values() for e in part.epsilons}
    bases = {part.rope_base for part in parts.values()} - {None}
    heads = {part.heads for part in parts.values()} - {None}
    for what, found in (("epsilon of the layer norms", epsilons), ("base of RoPE", bases), ("split into heads", heads)):
        if len(found) != 1:
            seen = ", ".join(map(str, found)) or "none"
            raise CheckpointError(f"{what}: expected one value in all language-model graphs, found {seen}")
    tables = result.tensors
    n_vq = sum(name.startswith("audio_embeddings.") for name in tables)
    vocab, hidden = tables["transformer.wte.weight"].shape
    blocks = first["global"].blocks
    ((num_heads, _),) = [pair for pair in heads if pair is not None]
    (base,) = [value for value in bases if value is not None]
    return LlmShape(
        num_layers=len(blocks),
        local_layers=len(first["local"].blocks),
        num_heads=num_heads,
        hidden_size=hidden,
        inner_size=blocks[0].mlp.inner.weight.shape[1],
        epsilon=epsilons.pop(),
        vocab_size=vocab,
        codebook_sizes=tuple(len(tables[f"audio_embeddings.{i}.weight"]) for i in range(n_vq)),
        rope_base=base,
    )


def _read_global(view: GraphView, graph: str, result: Recovered) -> _Part:
    norm_value = view.go_back("global_hidden")[0]
    blocks, root, epsilons = _read_transformer(view, norm_value, "transformer", "present_key_", graph, result)
    near = view.nearest(root)
    if near.linears or not near.tables:
        raise unknown_structure(view, root, blocks, "the sum of the embeddings")
    channels = []
    for table in near.tables:
        channel = view.channel_of(table.index, "input_ids")
        if channel is None:
            raise CheckpointError(f"{view.name}: table {table.output}: which position of a row it reads cannot be told")
        name = "transformer.wte.weight" if channel == 0 else f"audio_embeddings.{channel - 1}.weight"
        result.put(name, table.weight, graph)
        channels.append(channel)
    if sorted(channels) != list(range(len(channels))) or len(channels) < 2:
        raise CheckpointError(f"{view.name}: tables read the positions {sorted(channels)} of a row; expected 0, 1, 2 …")
    return _Part(blocks, epsilons, _cache_heads(view), _rope_base(view, _cache_heads(view)))


def _read_local(view: GraphView, graph: str, result: Recovered) -> _Part:
    text = view.linear_behind("text_logits")
    if text is None:
        raise CheckpointError(f"{view.name}: text_logits do not come from a linear layer")
    result.put("text_lm_head.weight", text.weight.T, graph)
    for i, head in enumerate(_audio_heads(view)):
        result.put(f"audio_lm_heads.{i}.weight", head.weight.T, graph)
    norm_value = view.go_back(text.source)[0]
    blocks, root, epsilons = _read_transformer(
        view, norm_value, "local_transformer", "local_present_key_", graph, result
    )
    if view.nearest(root).linears:
        raise unknown_structure(view, root, blocks, "hidden state and embeddings")
    for table in view.tables():
        channel = view.channel_of(table.index, "audio_prefix_token_ids")
        if view.reads(table.index, "text_token_id"):
            result.put("transformer.wte.weight", table.weight, graph)
        elif channel is not None:
            result.put(f"audio_embeddings.{channel}.weight", table.weight, graph)
    result.check_coverage(view, graph)
    return _Part(blocks, epsilons, _cache_heads(view), _rope_base(view, _cache_heads(view)))


def _read_transformer(
    view: GraphView, norm_value: str, prefix: str, cache: str, graph: str, result: Recovered
) -> tuple[list[Block], str, set[float]]:
    """Blocks and last norm of one transformer; also the value that enters it, and the epsilons of its norms."""
    norm = view.norm(norm_value)
    if norm is None:
        raise CheckpointError(f"{view.name}: expected a layer norm before the result, found none at {norm_value}")
    result.put(f"{prefix}.ln_f.weight", norm.weight, graph)
    result.put(f"{prefix}.ln_f.bias", norm.bias, graph)
    blocks, root = walk_blocks(view, norm.source)
    caches = sum(name.startswith(cache) for name in view.outputs)
    if not blocks or (caches and caches != len(blocks)):
        raise unknown_structure(view, root, blocks, f"{caches or 'more'} blocks")
    epsilons = {norm.epsilon}
    for i, block in enumerate(blocks):
        _put_block(block, f"{prefix}.h.{i}", graph, result)
        epsilons |= {block.attention.norm.epsilon, block.mlp.norm.epsilon}
    return blocks, root, epsilons


def _put_block(block: Block, name: str, graph: str, result: Recovered) -> None:
    parts = (("ln_1", "attn.c_attn", "attn.c_proj", block.attention), ("ln_2", "mlp.fc_in", "mlp.fc_out", block.mlp))
    for norm, inner, outer, branch in parts:
        result.put(f"{name}.{norm}.weight", branch.norm.weight, graph)
        result.put(f"{name}.{norm}.bias", branch.norm.bias, graph)
        result.put_linear(f"{name}.{inner}", branch.inner.weight, branch.inner.bias, graph)
        weight, bias = branch.outer.weight, branch.outer.bias
        if branch.scale is not None:
            weight, bias = weight * branch.scale, None if bias is None else bias * branch.scale
        result.put_linear(f"{name}.{outer}", weight, bias, graph)


def _audio_heads(view: GraphView) -> list[Linear]:
    """The audio heads in the order in which their logits are joined."""
    node = view.producer(view.skip_moves("audio_logits"))
    if node is None or node.op_type != "Concat":
        raise CheckpointError(f"{view.name}: audio_logits are not joined from one result per codebook")
    heads = [view.linear_behind(operand) for operand in node.input]
    if any(head is None for head in heads):
        raise CheckpointError(f"{view.name}: audio_logits: a codebook's logits do not come from a linear layer")
    return [head for head in heads if head is not None]


def _cache_heads(view: GraphView) -> tuple[int, int] | None:
    """Heads and head size, from the last two axes of a cache in the interface; None when the graph has none."""
    for name, dims in {**view.inputs, **view.outputs}.items():
        if "_value_" in name and len(dims) == 4 and dims[2] and dims[3]:
            return dims[2], dims[3]
    return None


def _rope_base(view: GraphView, heads: tuple[int, int] | None) -> float | None:
    """The base of RoPE from the frequencies that a graph stores; None when it stores none."""
    if heads is None:
        return None
    found = (base_of_frequencies(values, heads[1]) for values in view.constants())
    return next((base for base in found if base is not None), None)


def base_of_frequencies(values: Array, head_size: int) -> float | None:
    """b of the frequencies 1, b^(-2/D), b^(-4/D) …: the value with the fewest digits that explains them.

    float16 frequencies are exact to 5e-4, float32 ones to about 1e-6.
    """
    flat = np.asarray(values, np.float64).reshape(-1)
    if values.dtype != np.float32 or flat.size != head_size // 2 or flat.size < 2:
        return None
    if abs(flat[0] - 1) > 1e-6 or not 0 < flat[-1] < flat[0]:
        return None
    exponents = np.arange(0, head_size, 2) / head_size
    estimate = float(flat[-1] ** (-1 / exponents[-1]))
    for limit, digits in ((5e-6, range(1, 8)), (2e-3, range(1, 3))):
        for count in digits:
            base = float(f"{estimate:.{count - 1}e}")
            if np.allclose(flat, base**-exponents, rtol=limit, atol=0):
                return base
    return None
