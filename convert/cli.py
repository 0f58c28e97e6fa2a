"""convert-moss: checkpoint -> ONNX graphs -> .om files. One file per command in convert/commands/."""

from __future__ import annotations

import click

from runtime.lazy_group import LazyGroup

COMMANDS = {
    "demo": ("convert.commands.demo:demo", "The main job once: convert, speak, compare, one page."),
    "doctor": (
        "convert.commands.doctor:doctor",
        "Examine a checkpoint or the CANN installation.",
    ),
    "fetch": ("convert.commands.fetch:fetch", "Download the published checkpoints."),
    "fixture": ("convert.commands.fixture:fixture", "Write a made-up checkpoint in the published layout."),
    "import-onnx": ("convert.commands.import_onnx:import_onnx", "Make a checkpoint of a published ONNX package."),
    "write-package": (
        "convert.commands.write_package:write_package",
        "Write a checkpoint in the form of the published ONNX package.",
    ),
    "export": ("convert.commands.export:export", "Export a checkpoint to ONNX graphs with a manifest."),
    "check": ("convert.commands.check:check", "Say what ATC will say about an ONNX graph."),
    "patch": ("convert.commands.patch:patch", "Lower what a target does not take."),
    "simplify": ("convert.commands.simplify:simplify", "onnxsim on a foreign graph, checked."),
    "atc": ("convert.commands.atc:atc", "Plan, script or run the ATC compilation."),
    "build": ("convert.commands.build:build", "Export, patch, check and compile, skipping what is unchanged."),
    "sfx-export": ("convert.commands.sfx_export:sfx_export", "Export MOSS-SoundEffect to ONNX graphs in parts."),
    "sfx-plan": ("convert.commands.sfx_plan:sfx_plan", "Device memory of MOSS-SoundEffect's parts, and its ATC runs."),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moss-tts-nano-ascend")
def cli() -> None:
    """Convert MOSS-TTS-Nano checkpoints to ONNX graphs and Ascend .om files."""
