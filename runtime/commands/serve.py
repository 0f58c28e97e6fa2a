"""run-om serve: an OpenAI-compatible speech server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from runtime.backends.select import BackendOptions
from runtime.commands.backend_options import backend_options
from runtime.errors import BackendUnavailableError


@click.command()
@click.argument("artifacts", type=click.Path(path_type=Path, file_okay=False))
@backend_options
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 for every interface.")
@click.option("--port", default=8091, show_default=True, type=click.IntRange(0, 65535))
@click.option("--api-key", "api_keys", multiple=True, help="Repeatable; better: MOSS_TTS_API_KEYS='[\"…\"]'.")
@click.option("--batch", "slots", type=click.IntRange(1, 64), help="Requests that are spoken together.  [default: 4]")
@click.option("--max-queue", type=click.IntRange(0, 10_000), help="Requests that may wait; more get 429.  [32]")
@click.option("--deadline", "deadline_seconds", type=float, help="Seconds that one request may take.  [300]")
@click.option("--model-name", "model_names", multiple=True, help="Names that `model` may have; repeatable.")
@click.option("--sfx-checkpoint", type=click.Path(path_type=Path, file_okay=False),
              help="Serve MOSS-SoundEffect too: the language model, as published; with --sfx-codec.")
@click.option("--sfx-codec", type=click.Path(path_type=Path, file_okay=False),
              help="The 24 kHz MOSS-Audio-Tokenizer, as published.")  # fmt: skip
@click.option("--sfx-device", help="Of MOSS-SoundEffect: cpu, npu or npu:N.  [cpu]")
@click.option("--sfx-dtype", type=click.Choice(("float32", "bfloat16", "float16")), help="The stored one unless given.")
@click.option("--sfx-codec-device", help="cpu, npu or npu:N.  [cpu]")
@click.option("--default-voice", help="Stored voice for requests that name none.")
@click.option("--voices", "voice_directory", type=click.Path(path_type=Path), help="Where voices are stored.")
@click.option("--allowed-local-media-path", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Serve file:// clips from below this directory.")  # fmt: skip
@click.option("--allow-media-urls", is_flag=True, default=None, help="Fetch http(s) clips from public addresses.")
@click.option("--log-text", is_flag=True, default=None, help="Write the words of requests to the log.")
def serve(artifacts: Path, backend: BackendOptions, host: str, port: int, **options: Any) -> None:
    """Serve POST /v1/audio/speech, and a page to try it at /. Every setting also comes from MOSS_TTS_… variables.

    Example: run-om serve artifacts/demo --backend ort --batch 4
    """
    try:
        from runtime.server.run import run_server
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"run-om serve needs the package {error.name}: pip install 'moss-tts-nano-ascend[serve]'"
        ) from error

    given = {name: value for name, value in options.items() if value not in (None, ())}
    run_server(artifacts, backend, host, port, given)
