"""Repositories of the Hugging Face Hub, through the `huggingface_hub` package and its own cache.

The package keeps every file that has arrived, shows its progress, and takes its settings from the environment:
`HF_TOKEN` for what is not public, `HF_HUB_OFFLINE=1` to use the cache alone, `HF_HOME` for where that is.
"""

import contextlib
import pathlib
from collections.abc import Sequence

from jaxspec.errors import FetchError
from jaxspec.storage import scratch, writing

# What the readers of models open, and nothing else: no code and no pickles.
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
"""Seconds without a byte after which an unlocked part of a file is taken for abandoned; some disks do not lock."""


def fetch_repository(repo_id: str, revision: str | None = None, more: Sequence[str] = ()) -> pathlib.Path:
    """Gives the directory of a Hub repository, downloading what is not in the Hub's own cache.

    What a killed download left of a file is removed; the package itself never would.

    Args:
        repo_id: `organization/name`.
        revision: branch, tag or commit; the default branch when None.
        more: files to fetch besides what is read of a model.

    Raises:
        FetchError: the repository could not be fetched.
    """
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    cache, settings = pathlib.Path(HF_HUB_CACHE), {"revision": revision, "allow_patterns": [*_PATTERNS, *more]}
    try:
        _remove_abandoned(cache, repo_id)
        return pathlib.Path(huggingface_hub.snapshot_download(repo_id, **settings))
    except Exception as error:  # its errors, and those of the HTTP library beneath, share no base class
        if writing.is_full(error):
            why = writing.full(cache, _missing(repo_id, settings))
            raise FetchError(
                f"{repo_id} cannot be stored: {why}; free some, or set HF_HOME to a folder on another disk"
            ) from error
        raise FetchError(
            f"{repo_id}: no preset, no path here, and it could not be fetched from the Hugging Face Hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from error


def _missing(repo_id: str, settings: dict) -> int | None:
    """The bytes that are still to be downloaded; None if the Hub does not say."""
    import huggingface_hub

    with contextlib.suppress(Exception):
        files = huggingface_hub.snapshot_download(repo_id, **settings, dry_run=True)
        return sum(file.file_size or 0 for file in files if file.will_download)
    return None


def _remove_abandoned(cache: pathlib.Path, repo_id: str) -> None:
    """Removes the parts of files that no process is downloading. Each process names its own, so none is resumed."""
    name = f"models--{repo_id.replace('/', '--')}"
    for part in (cache / name / "blobs").glob("*.????????.incomplete"):
        lock = cache / ".locks" / name / f"{part.name.partition('.')[0]}.lock"
        with contextlib.suppress(OSError):
            if scratch.is_abandoned(part, lock, STALLED):
                part.unlink()
