"""What config.json of an imported checkpoint says of its origin, and what export takes over into its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.config import read_config_json
from runtime.manifest import write_atomically

ORIGIN_KEY, DEFAULTS_KEY = "imported_package", "speak_defaults"


def record_origin(directory: Path, record: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
    """Add the origin of a checkpoint to its config.json, and the defaults of speaking with it."""
    config = read_config_json(directory) | {ORIGIN_KEY: dict(record)}
    if defaults is not None:
        config[DEFAULTS_KEY] = dict(defaults)
    write_atomically(directory / "config.json", json.dumps(config, indent=1) + "\n")


def recorded_origin(directory: Path) -> dict[str, Any]:
    """The same for the `source` of a manifest; nothing for a checkpoint that was not imported."""
    config = read_config_json(directory)
    names = {ORIGIN_KEY: ORIGIN_KEY, DEFAULTS_KEY: "defaults"}  # runtime/commands/speaker.py reads `defaults`
    return {ours: config[theirs] for theirs, ours in names.items() if theirs in config}
