"""run-om: speech and measurements from exported or compiled graphs. One file per command in runtime/commands/."""

from __future__ import annotations

import click

from runtime.lazy_group import LazyGroup

COMMANDS = {
    "say": ("runtime.commands.say:say", "Speak a text with the voice of a reference clip."),
    "batch": ("runtime.commands.batch:batch", "Speak the lines of a JSONL file."),
    "sfx": ("runtime.commands.sfx:sfx", "Generate a sound effect from a description (MOSS-SoundEffect)."),
    "sfx-bench": ("runtime.commands.sfx_bench:sfx_bench", "Measure MOSS-SoundEffect: seconds, RTF, memory."),
    "sfx-accuracy": ("runtime.commands.sfx_accuracy:sfx_accuracy", "Compare two backends of MOSS-SoundEffect."),
    "text": ("runtime.commands.text:text", "Show what will be spoken for a text."),
    "voice": ("runtime.commands.voice:voice", "Store reference voices under names."),
    "parity": ("runtime.commands.parity:parity", "Compare two backends stage by stage; reports, exit 0, 1 or 2."),
    "bench": ("runtime.commands.bench:bench", "Measure speed and memory; compare; predict a device."),
    "serve": ("runtime.commands.serve:serve", "Serve speech over HTTP, as OpenAI's clients expect it."),
    "precision": ("runtime.commands.precision:precision", "Show what a reduced precision can reach, and what to keep."),
    "accuracy": ("runtime.commands.accuracy:accuracy", "Compare two backends over a list of texts."),
    "load-test": ("runtime.commands.load_test:load_test", "Ask a speech server with several clients at once."),
    "inspect": ("runtime.commands.inspect:inspect", "Show interface, target, hashes and sizes of graphs."),
    "selftest": ("runtime.commands.selftest:selftest", "Run the checklist of the first device and write a report."),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moss-tts-nano-ascend")
def cli() -> None:
    """Run MOSS-TTS-Nano graphs: .om on Ascend, ONNX Runtime, or PyTorch."""
