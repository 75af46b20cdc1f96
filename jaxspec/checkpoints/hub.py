"""Downloads repositories of the Hugging Face Hub with the `huggingface_hub` package and its cache.

The package keeps completed files, shows progress, and is configured by the environment: `HF_TOKEN` for private
repositories, `HF_HUB_OFFLINE=1` to use only the cache, `HF_HOME` for the cache's location.
"""

import contextlib
import pathlib
import re
from collections.abc import Sequence

from jaxspec.checkpoints.gguf_parts import part_names
from jaxspec.errors import FetchError
from jaxspec.storage import scratch, writing

# The files that the readers of models open, which are neither code nor pickles.
_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
]
STALL_SECONDS = 600
"""Seconds without progress after which an unlocked partial file counts as abandoned; some file systems cannot lock."""


def fetch_repository(repo_id: str, revision: str | None = None, more: Sequence[str] = ()) -> pathlib.Path:
    """Returns the directory of a Hub repository. Files that are not in the Hub's cache are downloaded first.

    Also removes partial files of killed downloads, which the package itself never removes.

    Args:
        repo_id: `organization/name`.
        revision: branch, tag or commit; None for the default branch.
        more: patterns of further files to download.

    Raises:
        FetchError: the download failed, or the disk is full.
    """
    return _fetch(repo_id, revision, [*_PATTERNS, *more])


def fetch_gguf(repo_id: str, file: str, revision: str | None = None) -> pathlib.Path:
    """Returns the path of a GGUF file of a Hub repository. The file, or all parts of a split file, are downloaded
    first.

    Args:
        repo_id: `organization/name`.
        file: path of the file, or of any part, in the repository.
        revision: branch, tag or commit; None for the default branch.

    Raises:
        FetchError: the download failed, the repository has no such file, or the disk is full.
    """
    folder, _, name = file.rpartition("/")
    names = [f"{folder}/{part}" if folder else part for part in part_names(name)]
    path = _fetch(repo_id, revision, names) / file
    if not path.is_file():
        raise FetchError(
            f"{repo_id}: {file} is not in the cache and could not be downloaded; check its name, the connection and "
            "HF_HUB_OFFLINE"
        )
    return path


def _fetch(repo_id: str, revision: str | None, patterns: list[str]) -> pathlib.Path:
    """Downloads the files of these patterns."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    cache, settings = pathlib.Path(HF_HUB_CACHE), {"revision": revision, "allow_patterns": patterns}
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
            f"{_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """Describes why a download failed."""
    import huggingface_hub.errors as errors

    seen: set[int] = set()
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        chain.append(link)
        link = link.__cause__ or link.__context__
    kinds = (
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set, and the files are not in the cache"),
        (errors.GatedRepoError, "access must be requested on the repository's page; then set HF_TOKEN"),
        (errors.RevisionNotFoundError, "the branch, tag or commit does not exist"),
        (errors.RepositoryNotFoundError, "the repository does not exist, or it is private (set HF_TOKEN)"),
        (errors.HFValidationError, "it is not a valid name of a repository"),
    )
    for kind, why in kinds:
        if any(isinstance(link_error, kind) for link_error in chain):
            return why
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    text = re.sub(r"^(\w+(\.\w+)*(Error|Exception|Timeout)\b:? *|Got: *)+", "", text.strip())
    names = {type(link_error).__name__ for link_error in chain}
    if isinstance(error, errors.LocalEntryNotFoundError) or any(
        "Connect" in name or "Timeout" in name for name in names
    ):
        return f"the Hub cannot be reached, and the files are not in the cache{f' ({text})' if text else ''}"
    return text or "no reason given"


def _missing(repo_id: str, settings: dict) -> int | None:
    """Returns the number of bytes still to download; None if the Hub does not say."""
    import huggingface_hub

    with contextlib.suppress(Exception):
        files = huggingface_hub.snapshot_download(repo_id, **settings, dry_run=True)
        return sum(file.file_size or 0 for file in files if file.will_download)
    return None


def _remove_abandoned(cache: pathlib.Path, repo_id: str) -> None:
    """Removes partial files that no process is downloading. Their names are random, so no download would resume
    them."""
    name = f"models--{repo_id.replace('/', '--')}"
    for part in (cache / name / "blobs").glob("*.????????.incomplete"):
        lock = cache / ".locks" / name / f"{part.name.partition('.')[0]}.lock"
        with contextlib.suppress(OSError):
            if scratch.is_abandoned(part, lock, STALL_SECONDS):
                part.unlink()
