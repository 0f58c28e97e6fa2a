"""run-om batch: many utterances from a JSONL file."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.backends.select import BackendOptions
from runtime.commands.backend_options import backend_options, open_chosen
from runtime.commands.say import narration_figures, voice_codes
from runtime.commands.speak_options import settings, speak_options, text_plan

if TYPE_CHECKING:
    from runtime.batch import BatchItem
    from runtime.narration import NarrationSettings
    from runtime.synthesizer import Synthesizer


@click.command()
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--artifacts", required=True, type=click.Path(path_type=Path, file_okay=False), help="artifacts/<name>")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Directory of the results."
)
@click.option("--voice", help="Voice of lines that name none: a clip or a stored voice.")
@speak_options
@backend_options
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def batch(
    source: Path,
    artifacts: Path,
    out: Path,
    voice: str | None,
    as_json: bool,
    speak: dict[str, Any],
    backend: BackendOptions,
) -> None:
    """Speak every line of SOURCE (JSONL: id, text, and optionally voice, reference_text, seed) into OUT/<id>.wav.

    OUT/results.jsonl has one line per line of SOURCE. Exit code 1 when a line failed; the others are spoken.

    Example: run-om batch in.jsonl --artifacts artifacts/demo --voice clip.wav --out spoken
    """
    from runtime.batch import RESULTS_NAME, run_batch
    from runtime.manifest import Manifest
    from runtime.synthesizer import open_synthesizer

    chosen = settings(speak)
    manifest = Manifest.load(artifacts)
    opened = open_chosen(manifest, backend)
    with open_synthesizer(manifest, opened, fused=not backend.split) as synthesizer:
        speaker = _Speaker(synthesizer, voice, chosen, speak)
        summary = run_batch(source, out, ".wav", speaker.speak, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(
            json.dumps({**dataclasses.asdict(summary), "results": str(out / RESULTS_NAME), "note": manifest.notice})
        )
    else:
        click.echo(f"{out / RESULTS_NAME}: {summary.spoken} spoken, {summary.failed} failed")
        if manifest.notice:
            click.echo(f"note: {manifest.notice}")
    if summary.failed:
        sys.exit(1)


class _Speaker:
    """Speaks one line; a voice that several lines name is encoded once."""

    def __init__(
        self, synthesizer: Synthesizer, voice: str | None, chosen: NarrationSettings, speak: dict[str, Any]
    ) -> None:
        self._synthesizer, self._voice, self._settings, self._speak = synthesizer, voice, chosen, speak
        self._codes: dict[str | None, Any] = {}

    def speak(self, item: BatchItem, out: Path) -> dict[str, Any]:
        """Write one utterance; return its figures."""
        from runtime.audio_writer import SampleFormat
        from runtime.errors import GenerationError
        from runtime.narration import Narrator
        from runtime.narration_file import AudioFormat, narrate_to_file
        from runtime.progress import NarrationProgress

        name = item.voice or self._voice
        if name not in self._codes:
            self._codes[name] = voice_codes(self._synthesizer, name)
        chosen = dataclasses.replace(
            self._settings,
            seed=self._settings.seed if item.seed is None else item.seed,
            reference_text=item.reference_text,
        )
        manifest = self._synthesizer.manifest
        plan = text_plan(item.text, self._synthesizer.tokenizer, self._speak, name is None or bool(item.reference_text))
        codec = manifest.codec
        audio = AudioFormat(
            codec.sample_rate_hz, codec.num_channels, SampleFormat(self._speak["sample_format"]), self._speak["mono"]
        )
        progress = NarrationProgress(
            [len(s.token_ids) for s in plan.segments], codec.samples_per_frame / codec.sample_rate_hz
        )
        narrator = Narrator(self._synthesizer, self._codes[name], chosen)
        narration = narrate_to_file(narrator, plan, out, audio, False, progress)
        if narration.interrupted:
            raise KeyboardInterrupt
        if self._speak["strict"] and any(s.finish_reason == "length" for s in narration.segments):
            raise GenerationError(f"reached --max-frames; {out} holds what was spoken until then")
        return narration_figures(narration, self._synthesizer.frame_model.backend_name, manifest)
