"""The options that run-om sfx, sfx-bench and sfx-accuracy share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from runtime.errors import CheckpointError, TextError
from runtime.sfx.config import seconds_to_tokens
from runtime.sfx.prompt import SoundPrompt
from runtime.sfx.sampling import PenaltyScope, SfxSampling
from runtime.sfx.sound_effects import MAX_NEW_TOKENS, SoundEffects

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = ("float32", "bfloat16", "float16")
SAMPLING_NAMES = (
    "temperature", "top_p", "top_k", "repetition_penalty", "text_temperature", "text_top_p", "text_top_k",
)  # fmt: skip
_DEFAULTS = SfxSampling()

limit_option = click.option(
    "--max-new-tokens",
    type=int,
    help=f"Hard limit of generated rows: 12.5 per second and 18 around them; {MAX_NEW_TOKENS} or what the cache holds.",
)


def model_options(command: F) -> F:
    """What to run, and where: the fields of `Opening`."""
    directory = click.Path(path_type=Path, file_okay=False)
    return _apply(
        command,
        click.option("--checkpoint", type=directory, help="The language model, as published."),
        click.option("--codec", type=directory, help="The 24 kHz MOSS-Audio-Tokenizer, as published."),
        click.option("--artifacts", type=directory, help="Exported graphs instead, run by --backend."),
        click.option("--backend", type=click.Choice(("ort", "om")), help="Of --artifacts  [default: ort]"),
        click.option("--simulate", is_flag=True, help="om on the pyACL simulator: runs what the fake atc compiled."),
        click.option("--device", help="Of the language model: cpu, npu or npu:N; of om: 0, 1, …  [default: cpu; 0]"),
        click.option("--dtype", type=click.Choice(DTYPES), help="Of the matrices; the stored one unless given."),
        click.option("--codec-device", help="cpu, npu or npu:N  [default: cpu]"),
    )


def open_effects(options: Mapping[str, Any]) -> SoundEffects:
    """Open the checkpoints with PyTorch, or the artifacts with ONNX Runtime."""
    checkpoint, codec, device = options["checkpoint"], options["codec"], options["device"]
    if options["artifacts"] is not None:
        return _open_artifacts(options)
    if checkpoint is None or codec is None:
        raise CheckpointError("expected --checkpoint and --codec (directories as published), or --artifacts")
    if options["backend"] is not None or options["simulate"]:
        raise CheckpointError("--backend and --simulate belong to --artifacts; checkpoints run with PyTorch")
    return SoundEffects.open(checkpoint, codec, device or "cpu", options["dtype"], options["codec_device"] or "cpu")


def _open_artifacts(options: Mapping[str, Any]) -> SoundEffects:
    from runtime.backends.select import device_number
    from runtime.sfx.artifacts import open_artifacts

    backend = options["backend"] or "ort"
    unused = ["checkpoint", "codec", "dtype", "codec_device", *([] if backend == "om" else ["device", "simulate"])]
    for name in unused:
        if options[name]:
            raise CheckpointError(f"--artifacts with {backend} runs as exported; leave out --{name.replace('_', '-')}")
    return open_artifacts(
        options["artifacts"],
        backend,
        device_number(options["device"]),
        options["simulate"],
        lambda line: click.echo(line, err=True),
    )


def text_options(command: F) -> F:
    """The fields of the prompt beside the description."""
    return _apply(
        command,
        click.option("--tokens", type=int, help="Length hint for the model: 12.5 tokens are one second."),
        click.option("--seconds", type=float, help="The same hint in seconds."),
        click.option("--sound-event", help="The prompt field Sound Event."),
        click.option("--quality", help="The prompt field Quality."),
    )


def sampling_options(command: F) -> F:
    """The recommended decoding as defaults."""
    names = [(f"--{name.replace('_', '-')}", name) for name in SAMPLING_NAMES]
    options = [click.option(flag, default=getattr(_DEFAULTS, name), show_default=True) for flag, name in names]
    scope = click.option(
        "--penalty-scope",
        type=click.Choice([s.value for s in PenaltyScope]),
        default=_DEFAULTS.penalty_scope.value,
        show_default=True,
        help="What counts as used before: upstream's union of codebooks 1 to 15; the same shared by a batch; or each "
        "codebook alone.",
    )
    greedy = click.option("--greedy", is_flag=True, help="The best id every time; the temperatures become 0.")
    return _apply(command, *options, scope, greedy)


def prompts_from(descriptions: Sequence[str], options: Mapping[str, Any]) -> list[SoundPrompt]:
    """Prompts from the options of text_options."""
    tokens, seconds = options["tokens"], options["seconds"]
    if tokens is not None and seconds is not None:
        raise TextError("expected --tokens or --seconds, got both; 12.5 tokens are one second")
    if seconds is not None:
        if not 0 < seconds < float("inf"):
            raise TextError(f"--seconds: expected a number above 0, got {seconds}")
        tokens = seconds_to_tokens(seconds)
    return [
        SoundPrompt(text, tokens, sound_event=options["sound_event"], quality=options["quality"])
        for text in descriptions
    ]


def sampling_from(options: Mapping[str, Any]) -> SfxSampling:
    """SfxSampling from the options of sampling_options."""
    values = {name: options[name] for name in SAMPLING_NAMES}
    if options["greedy"]:
        values |= {"temperature": 0.0, "text_temperature": 0.0}
    return SfxSampling(**values, penalty_scope=PenaltyScope(options["penalty_scope"]))


def _apply(command: F, *decorators: Callable[[F], F]) -> F:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
