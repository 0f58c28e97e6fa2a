"""The codec's weights and sizes, read off the package's graphs.

    decode_full, decode_step   stages backwards from the waveform, output projection, one codebook and projection per
                               position that a Gather reads in a frame
    encode                     one ArgMax per codebook, the projection before it, the residual that it reads; then the
                               stages backwards to the waveform

Patches follow from the widths beside them, windows from what the masks compare with (and from the caches of
decode_step), heads and RoPE from a run of the graph (convert/import_probe.py): its numbers may be computed inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from convert.import_attention import window
from convert.import_blocks import Block, unknown_structure, walk_blocks
from convert.import_probe import Rope, probe_ropes
from convert.import_recovered import MIXED, Recovered
from convert.import_view import GraphView, Linear
from runtime.errors import CheckpointError
from runtime.modules.codec_transformer import LAYER_NORM_EPS
from runtime.package_graphs import CODEC_FILES

_DECODERS = ("decode_full", "codec_decode_step")


@dataclass(frozen=True, slots=True)
class StageShape:
    """One transformer stage, and the patch beside its input."""

    patch: int
    input_size: int
    model_size: int
    output_size: int
    num_layers: int
    inner_size: int
    rope: Rope
    context: int


@dataclass(frozen=True, slots=True)
class CodecShape:
    """What config.json needs and the graphs tell."""

    encoder: tuple[StageShape, ...]
    encoder_last_patch: int
    decoder: tuple[StageShape, ...]
    decoder_last_patch: int
    latent_size: int
    rvq_size: int
    n_vq: int
    codebook_size: int
    codebook_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """A stage as it stands in a graph."""

    entry: Linear
    blocks: list[Block]
    exit: Linear

    @property
    def widths(self) -> tuple[int, int]:
        return self.entry.weight.shape[0], self.exit.weight.shape[1]


def recover_codec(graphs: Mapping[str, Path], result: Recovered) -> CodecShape:
    """Fill `result` with every tensor of the codec; convolutions as `<name>.weight` and `.bias`."""
    decoders = [name for name in _DECODERS if name in graphs]
    for names in (_DECODERS, ("encode",)):
        if not set(names) & set(graphs):
            raise CheckpointError(
                f"the package has no {' and no '.join(CODEC_FILES[n] for n in names)}: the weights in it cannot be "
                "recovered; download the missing file"
            )
    read = {}
    for name in decoders:
        view = GraphView(graphs[name])
        result.meet(view)
        read[name] = _read_decoder(view, name, result)
    decoder = _one_decoder(read)
    view = GraphView(graphs["encode"])
    result.meet(view)
    encoder = _read_encoder(view, "encode", result)
    codebook_size, codebook_dim = result.tensors["quantizer.quantizers.0.codebook.weight"].shape
    latent_size, rvq_size = result.tensors["quantizer.output_proj.weight"].shape
    last, remainder = divmod(latent_size, encoder[-1].output_size)
    if remainder:
        raise CheckpointError(f"the encoder ends with {encoder[-1].output_size} values, which are no part of the "
                              f"{latent_size} that the quantizer reads")  # fmt: skip
    return CodecShape(
        encoder=encoder,
        encoder_last_patch=last,
        decoder=decoder,
        decoder_last_patch=decoder[-1].output_size,
        latent_size=latent_size,
        rvq_size=rvq_size,
        n_vq=_num_codebooks(result),
        codebook_size=codebook_size,
        codebook_dim=codebook_dim,
    )


def _one_decoder(read: Mapping[str, tuple[StageShape, ...]]) -> tuple[StageShape, ...]:
    """The decoder that both graphs hold."""
    (first, decoder), *others = read.items()
    for other, stages in others:
        if len(decoder) != len(stages):
            raise CheckpointError(f"{len(decoder)} stages in {first}, {len(stages)} in {other}; {MIXED}")
        for number, pair in enumerate(zip(decoder, stages, strict=True)):
            for field in fields(StageShape):
                a, b = (getattr(stage, field.name) for stage in pair)
                if a != b:
                    raise CheckpointError(
                        f"decoder stage {number}: {field.name} is {a} in {first} and {b} in {other}; {MIXED}"
                    )
    return decoder


def _read_decoder(view: GraphView, graph: str, result: Recovered) -> tuple[StageShape, ...]:
    stages, dequantizer = _walk_stages(view, "audio")
    if dequantizer is None:
        raise unknown_structure(view, "audio", [], "the projection of the quantizer before the first stage")
    result.put_linear("quantizer.output_proj", dequantizer.weight, dequantizer.bias, graph)
    codebooks = []
    for linear in view.nearest(dequantizer.source).linears:
        tables = view.nearest(linear.source).tables
        number = view.channel_of(tables[0].index, "audio_codes") if len(tables) == 1 else None
        if number is None:
            raise CheckpointError(f"{view.name}: {linear.output}: which codebook this projects cannot be told")
        result.put(f"quantizer.quantizers.{number}.codebook.weight", tables[0].weight, graph)
        result.put_linear(f"quantizer.quantizers.{number}.out_proj", linear.weight, linear.bias, graph)
        codebooks.append(number)
    if sorted(codebooks) != list(range(len(codebooks))) or not codebooks:
        raise CheckpointError(f"{view.name}: codebooks read the positions {sorted(codebooks)} of a frame")
    return _shapes(view, graph, stages, "decoder", dequantizer.weight.shape[1], result)


def _read_encoder(view: GraphView, graph: str, result: Recovered) -> tuple[StageShape, ...]:
    stages, before = _walk_stages(view, _read_quantizer(view, graph, result))
    if before is not None or not stages:
        raise unknown_structure(view, stages[0].entry.source if stages else "waveform", [], "the waveform")
    return _shapes(view, graph, stages, "encoder", 1, result)


def _read_quantizer(view: GraphView, graph: str, result: Recovered) -> str:
    """Put every projection of the quantizer; return what its first one reads, the output of the last stage."""
    node = view.producer(view.skip_moves("audio_codes"))
    choices = [view.producer(view.skip_moves(v)) for v in node.input] if node and node.op_type == "Concat" else []
    if not choices or any(c is None or c.op_type != "ArgMax" for c in choices):
        raise CheckpointError(f"{view.name}: audio_codes are not joined from one ArgMax per codebook")
    if len(choices) != _num_codebooks(result):
        raise CheckpointError(
            f"{view.name}: {len(choices)} codebooks, the decoder has {_num_codebooks(result)}; {MIXED}"
        )
    number_of = {c.output[0]: q for q, c in enumerate(choices) if c is not None}
    entries: dict[str, Linear] = {}
    for choice, number in number_of.items():
        name = f"quantizer.quantizers.{number}"
        inward = _inward_projection(view, choice, result.tensors[f"{name}.codebook.weight"].shape)
        result.put_linear(f"{name}.in_proj", inward.weight, inward.bias, graph)
        for linear in view.nearest(inward.source).linears:
            tables = view.nearest(linear.source).tables
            if not tables:
                entries[linear.output] = linear
                continue
            earlier = number_of.get(view.skip_moves(tables[0].index))
            if earlier is None or earlier >= number:
                raise CheckpointError(f"{view.name}: {linear.output}: which codebook this subtracts cannot be told")
            name_of = f"quantizer.quantizers.{earlier}"
            result.put(f"{name_of}.codebook.weight", tables[0].weight, graph)
            result.put_linear(f"{name_of}.out_proj", linear.weight, linear.bias, graph)
    if len(entries) != 1:
        raise CheckpointError(f"{view.name}: {len(entries)} projections lead into the quantizer; expected one")
    (entry,) = entries.values()
    result.put_linear("quantizer.input_proj", entry.weight, entry.bias, graph)
    return entry.source


def _inward_projection(view: GraphView, choice: str, codebook: tuple[int, ...]) -> Linear:
    """The projection whose result is compared with the rows of a codebook; the rows are a linear layer of their own."""
    found: dict[str, Linear] = {}
    pending = [view.producers[choice].input[0]]
    while pending:
        for linear in view.nearest(pending.pop()).linears:
            if linear.weight.shape == codebook[::-1]:
                pending.append(linear.source)
            else:
                found[linear.output] = linear
    if len(found) != 1:
        raise CheckpointError(f"{view.name}: {choice}: {len(found)} projections before one ArgMax; expected one")
    (linear,) = found.values()
    return linear


def _walk_stages(view: GraphView, value: str) -> tuple[list[_Stage], Linear | None]:
    """The stages that end in a value, first stage first, and the linear before the first one, if there is one."""
    stages: list[_Stage] = []
    while (end := view.linear_behind(value)) is not None:
        blocks, root = walk_blocks(view, end.source)
        if not blocks:
            return stages, end
        entry = view.linear_behind(root)
        if entry is None:
            raise unknown_structure(view, root, blocks, "the input projection of a stage")
        stages.insert(0, _Stage(entry, blocks, end))
        value = entry.source
    return stages, None


def _shapes(
    view: GraphView, graph: str, stages: list[_Stage], side: str, width: int, result: Recovered
) -> tuple[StageShape, ...]:
    """Put the tensors of all stages; `width` is the size that enters the first patch."""
    ropes = probe_ropes(view, [stage.blocks[0].softmax for stage in stages])
    shapes: list[StageShape] = []
    layer = index = 0
    for stage, rope in zip(stages, ropes, strict=True):
        size_in, size_out = stage.widths
        patch, remainder = divmod(max(width, size_in), min(width, size_in))
        if remainder or (patch > 1 and (side == "encoder") != (size_in > width)):
            raise CheckpointError(f"{view.name}: a stage reads {size_in} values, {width} come: no patch does this")
        index += patch > 1  # a patcher stands before the stage in upstream's list
        contexts = {_context(view, block, layer + i) for i, block in enumerate(stage.blocks)}
        if len(contexts) != 1:
            raise CheckpointError(f"{view.name}: the layers of one stage see {sorted(contexts)} tokens; expected one")
        _put_stage(stage, f"{side}.{index}", graph, result)
        inner = stage.blocks[0].mlp.inner.weight.shape[1]
        model_size = stage.entry.weight.shape[1]
        shapes.append(
            StageShape(patch, size_in, model_size, size_out, len(stage.blocks), inner, rope, contexts.pop())
        )
        layer, index, width = layer + len(stage.blocks), index + 1, size_out
    return tuple(shapes)


def _context(view: GraphView, block: Block, layer: int) -> int:
    """Keys that a query sees: from the mask; from the cache of decode_step too, and both must agree."""
    found = window(view, block.softmax)
    cache = view.inputs.get(f"attn_cached_keys_{layer}")
    if cache is not None and found is not None and cache[2] != found:
        raise CheckpointError(
            f"{view.name}: layer {layer} keeps {cache[2]} tokens and compares with {found}; the window is one number"
        )
    size = found or (cache[2] if cache else None)
    if size is None:
        raise CheckpointError(f"{view.name}: {block.softmax.name}: the window of this attention cannot be told")
    return size


def _put_stage(stage: _Stage, name: str, graph: str, result: Recovered) -> None:
    for part, linear in (("input_proj", stage.entry), ("output_proj", stage.exit)):
        _put_plain(f"{name}.{part}.weight", linear, graph, result)
    for i, block in enumerate(stage.blocks):
        layer = f"{name}.transformer.layers.{i}"
        parts = (
            (1, "self_attn.in_proj", "self_attn.out_proj", block.attention),
            (2, "ffn.0", "ffn.2", block.mlp),
        )
        for number, inner, outer, branch in parts:
            if branch.norm.epsilon != LAYER_NORM_EPS:
                raise CheckpointError(
                    f"{graph}: {layer}: layer norm with epsilon {branch.norm.epsilon}; the codec's is {LAYER_NORM_EPS}"
                )
            result.put(f"{layer}.norm{number}.weight", branch.norm.weight, graph)
            result.put(f"{layer}.norm{number}.bias", branch.norm.bias, graph)
            _put_plain(f"{layer}.{inner}.weight", branch.inner, graph, result)
            _put_plain(f"{layer}.{outer}.weight", branch.outer, graph, result)
            result.put_scale(f"{layer}.layer_scale_{number}.scale", branch, graph)


def _put_plain(name: str, linear: Linear, graph: str, result: Recovered) -> None:
    if linear.bias is not None and linear.bias.any():
        raise CheckpointError(f"{graph}: {name}: the layer has a bias; the codec's layers have none")
    result.put(name, linear.weight.T, graph)


def _num_codebooks(result: Recovered) -> int:
    return sum(name.endswith("codebook.weight") for name in result.tensors)
