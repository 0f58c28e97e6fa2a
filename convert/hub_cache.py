"""Turn a source, a directory or a hub id, into a directory on this disk. Nothing is downloaded here."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.errors import CheckpointError

DEFAULT_MODEL_ID = "OpenMOSS-Team/MOSS-TTS-Nano"
DEFAULT_CODEC_ID = "OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def resolve_source(source: str | Path) -> Path:
    """The directory itself, or the snapshot of a hub id in the local cache; CheckpointError when it is neither."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; expected the directory that holds config.json and the weights")
    name = str(source)
    if isinstance(source, Path) or not is_hub_id(name):
        raise CheckpointError(f"{name}: no such directory, and not a hub id of the form owner/name")
    import huggingface_hub
    from huggingface_hub import constants

    found = huggingface_hub.try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise CheckpointError(
            f"{name}: neither a directory nor in the Hugging Face cache {constants.HF_HUB_CACHE}; "
            f"run: convert-moss fetch"
        )
    return Path(found).parent


def is_hub_id(name: str) -> bool:
    """Whether a string has the form owner/name of a hub repository."""
    return _HUB_ID.fullmatch(name) is not None
