"""The options that say how to speak, the same for `say` and `batch`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from runtime.generate import MAX_FRAMES
from runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from runtime.narration import NarrationSettings
    from runtime.text import TextOptions, TextPlan
    from runtime.tokenizer import Tokenizer

Command = TypeVar("Command", bound=Callable[..., Any])
_DEFAULTS = SamplingParams()

_OPTIONS = (
    click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Same seed, same bytes."),
    click.option("--greedy", is_flag=True, help="The best code every time."),
    click.option("--temperature", default=_DEFAULTS.temperature, show_default=True),
    click.option("--top-k", default=_DEFAULTS.top_k, show_default=True),
    click.option("--top-p", default=_DEFAULTS.top_p, show_default=True),
    click.option("--repetition-penalty", default=_DEFAULTS.repetition_penalty, show_default=True),
    click.option("--max-frames", default=MAX_FRAMES, show_default=True, help="Per segment; 80 ms each."),
    click.option("--max-tokens", default=75, show_default=True, help="Text tokens per segment; 0 for one segment."),
    click.option(
        "--text-style", default="standard", show_default=True, type=click.Choice(["standard", "upstream"]),
        help="upstream: its text rules, faults included.",
    ),
    click.option("--retries", default=2, show_default=True, help="New tries of a segment that got lost."),
    click.option("--loop-frames", default=25, show_default=True, help="Repeated frames that count as a loop; 0: off."),
    click.option("--silence-frames", default=38, show_default=True, help="Silent frames that end a try; 0: off."),
    click.option("--no-runaway", is_flag=True, help="Do not limit the frames per text token."),
    click.option("--mono", is_flag=True, help="Write the mean of the channels."),
    click.option(
        "--sample-format", default="pcm16", show_default=True, type=click.Choice(["pcm16", "pcm24", "float"])
    ),
    click.option("--strict", is_flag=True, help="Reaching --max-frames is an error, not a warning."),
)  # fmt: skip


def speak_options(command: Command) -> Command:
    """Give a command the options; it receives them as one dict, `speak`."""
    names = [option_name(option) for option in _OPTIONS]

    @functools.wraps(command)
    def with_options(*args: Any, **values: Any) -> Any:
        return command(*args, speak={name: values.pop(name) for name in names}, **values)

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options  # type: ignore[return-value]  # a decorated command is called like the command


def option_name(option: Callable[..., Any]) -> str:
    """The parameter name that click gives an option."""
    probe: Any = option(lambda: None)
    return str(probe.__click_params__[0].name)


def settings(speak: dict[str, Any], reference_text: str | None = None) -> NarrationSettings:
    """The settings of a narration; GenerationError names what is impossible."""
    from runtime.errors import GenerationError
    from runtime.narration import NarrationSettings
    from runtime.stop_rules import StopRules

    if speak["retries"] < 0:
        raise GenerationError(f"--retries: expected 0 or more, got {speak['retries']}")
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    sampling = SamplingParams(**{name: speak[name] for name in names})
    if speak["greedy"]:
        sampling = SamplingParams.greedy(speak["repetition_penalty"])
    rules = StopRules(speak["loop_frames"], silence_frames=speak["silence_frames"], runaway=not speak["no_runaway"])
    return NarrationSettings(sampling, speak["seed"], speak["max_frames"], speak["retries"], rules, reference_text)


def text_plan(text: str, tokenizer: Tokenizer, speak: dict[str, Any], one_segment: bool) -> TextPlan:
    """What will be spoken; a continuation is never cut into segments."""
    from runtime.text import TextOptions, TextStyle, plan_text

    options: TextOptions = TextOptions(TextStyle(speak["text_style"]), 0 if one_segment else speak["max_tokens"])
    return plan_text(text, tokenizer, options)
