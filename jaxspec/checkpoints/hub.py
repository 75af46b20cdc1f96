"""Downloads repositories of the Hugging Face Hub, with the `huggingface_hub` package and its cache.

The package keeps completed files, shows progress, and is configured by the environment: `HF_TOKEN` for private
repositories, `HF_HUB_OFFLINE=1` to use only the cache, `HF_HOME` for the cache's location.
"""

import contextlib
import pathlib
from collections.abc import Sequence

from jaxspec.errors import FetchError
from jaxspec.storage import scratch, writing

# The files that the readers of models open: no code, and no pickles.
_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
]
STALLED = 600
"""Seconds without progress after which an unlocked partial file counts as abandoned; some disks do not lock."""


def fetch_repository(repo_id: str, revision: str | None = None, more: Sequence[str] = ()) -> pathlib.Path:
    """Returns the directory of a Hub repository, after downloading the files that are not in the Hub's cache.

    Removes partial files of killed downloads, which the package itself keeps forever.

    Args:
        repo_id: `organization/name`.
        revision: branch, tag or commit; None for the default branch.
        more: patterns of files to download besides a model's.

    Raises:
        FetchError: the download failed, or the disk is full.
    """
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    cache, settings = pathlib.Path(HF_HUB_CACHE), {"revision": revision, "allow_patterns": [*_PATTERNS, *more]}
    try:
        _remove_abandoned(cache, repo_id)
        return pathlib.Path(huggingface_hub.snapshot_download(repo_id, **settings))
    except Exception as error:  # the errors of the package and of its HTTP library share no base class
        if writing.is_full(error):
            why = writing.full(cache, _missing(repo_id, settings))
            raise FetchError(
                f"{repo_id} cannot be stored: {why}; free some space, or set HF_HOME to a directory on another disk"
            ) from error
        raise FetchError(
            f"{repo_id}: neither a preset nor an existing path, and the download from the Hugging Face Hub failed: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from error


def _missing(repo_id: str, settings: dict) -> int | None:
    """Returns the number of bytes still to download; None if the Hub does not say."""
    import huggingface_hub

    with contextlib.suppress(Exception):
        files = huggingface_hub.snapshot_download(repo_id, **settings, dry_run=True)
        return sum(file.file_size or 0 for file in files if file.will_download)
    return None


def _remove_abandoned(cache: pathlib.Path, repo_id: str) -> None:
    """Removes partial files that no process is downloading. Their names are random, so none would be resumed."""
    name = f"models--{repo_id.replace('/', '--')}"
    for part in (cache / name / "blobs").glob("*.????????.incomplete"):
        lock = cache / ".locks" / name / f"{part.name.partition('.')[0]}.lock"
        with contextlib.suppress(OSError):
            if scratch.is_abandoned(part, lock, STALLED):
                part.unlink()
