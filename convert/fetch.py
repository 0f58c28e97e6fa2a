"""Download a published checkpoint into the Hugging Face cache: the files that are needed, no code, nothing twice.

Offline (HF_HUB_OFFLINE=1) nothing is asked of the hub; the cache must hold every needed file, and those that it lacks
are named. A download that was cut off goes on where it stopped; huggingface_hub does that.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from convert.checkpoint_files import LAYOUTS
from convert.hub_cache import DEFAULT_CODEC_ID, DEFAULT_MODEL_ID, is_hub_id
from runtime.errors import CheckpointError

CONFIG = "config.json"
TOKENIZER_FILES = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
PUBLISHED_WEIGHTS = {
    DEFAULT_MODEL_ID: ("pytorch_model.bin",),
    DEFAULT_CODEC_ID: ("model.safetensors.index.json", "model-00001-of-00001.safetensors"),
}
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where a checkpoint lies now."""

    repository: str
    directory: Path
    files: tuple[str, ...]


def fetch(repository: str, needs_tokenizer: bool, report: Report) -> Fetched:
    """Bring every needed file of `repository` into the local cache."""
    from huggingface_hub import constants

    if not is_hub_id(repository):
        raise CheckpointError(f"{repository}: expected a hub id of the form owner/name")
    if constants.HF_HUB_OFFLINE:
        return _from_cache(repository, needs_tokenizer)
    return _download(repository, needs_tokenizer, report)


def copy_out(fetched: Fetched, target: Path) -> Path:
    """Copy the files to a directory of their own; a file is written aside, then moved."""
    target.mkdir(parents=True, exist_ok=True)
    for name in fetched.files:
        scratch = target / f".{name}.part"
        shutil.copyfile(fetched.directory / name, scratch)
        os.replace(scratch, target / name)  # noqa: PTH105
    return target


def needed_files(
    present: Iterable[str], needs_tokenizer: bool, read_index: Callable[[str], bytes], weights_name: tuple[str, ...]
) -> tuple[str, ...]:
    """The files to take out of those that a repository has: config, tokenizer, and the first weight layout there is.

    Without any weights `weights_name` stands for them, so that a message can say what is missing.
    """
    there = set(present)
    needed = [
        CONFIG,
        *([TOKENIZER_FILES[0], *(n for n in TOKENIZER_FILES[1:] if n in there)] if needs_tokenizer else []),
    ]
    layout = next((name for name in LAYOUTS if name in there), None)
    if layout is None:
        return (*needed, *weights_name)
    needed.append(layout)
    if layout.endswith(".index.json"):
        needed += _shards(layout, read_index(layout))
    return tuple(needed)


def _shards(layout: str, index: bytes) -> list[str]:
    try:
        shards = sorted(set(json.loads(index)["weight_map"].values()))
        if all(isinstance(s, str) and Path(s).name == s for s in shards):
            return shards
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{layout}: expected JSON with a weight_map of file names; the index is damaged")


def _weights_name(repository: str) -> tuple[str, ...]:
    return PUBLISHED_WEIGHTS.get(repository, (" or ".join(LAYOUTS),))


def _from_cache(repository: str, needs_tokenizer: bool) -> Fetched:
    """The snapshot in the cache, if it is complete."""
    import huggingface_hub
    from huggingface_hub import constants

    def cached(name: str) -> Path | None:
        found = huggingface_hub.try_to_load_from_cache(repository, name)
        return Path(found) if isinstance(found, str) else None

    candidates = (CONFIG, *TOKENIZER_FILES, *LAYOUTS)
    present = [name for name in candidates if cached(name)]

    def read_index(name: str) -> bytes:
        path = cached(name)
        assert path is not None
        return path.read_bytes()

    needed = needed_files(present, needs_tokenizer, read_index, _weights_name(repository))
    missing = [name for name in needed if cached(name) is None]
    if missing:
        raise CheckpointError(
            f"{repository}: offline, and the cache {constants.HF_HUB_CACHE} lacks {', '.join(missing)}; "
            f"unset HF_HUB_OFFLINE and run convert-moss fetch where there is a network"
        )
    config = cached(CONFIG)
    assert config is not None
    return Fetched(repository, config.parent, needed)


def _download(repository: str, needs_tokenizer: bool, report: Report) -> Fetched:
    """Download what is needed, all from one commit."""
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().model_info(repository)
        there = [sibling.rfilename for sibling in info.siblings or []]

        def get(name: str) -> Path:
            return Path(huggingface_hub.hf_hub_download(repository, name, revision=info.sha))

        needed = needed_files(there, needs_tokenizer, lambda name: get(name).read_bytes(), _weights_name(repository))
        missing = [name for name in needed if name not in there]
        if missing:
            raise CheckpointError(f"{repository}: the repository lacks {', '.join(missing)}; is it the right one?")
        for name in needed:
            report(f"{repository}: {name}")
            path = get(name)
        _mark_main(path.parent, repository, info.sha)
        return Fetched(repository, path.parent, needed)
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        raise CheckpointError(f"{repository}: no such repository on the hub, or not open to everyone") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx.HTTPError,
            OSError) as error:  # fmt: skip
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(
            f"{repository}: the download did not finish ({reason}); run the command again, it goes on where it stopped"
        ) from error


def _mark_main(snapshot: Path, repository: str, commit: str | None) -> None:
    """Let the cache's `main` point to this commit, so that the hub id finds it offline."""
    if commit and snapshot.parent.name == "snapshots":
        from runtime.manifest import write_atomically

        write_atomically(snapshot.parent.parent / "refs" / "main", commit)
