"""Repositories of the Hugging Face Hub, through the `huggingface_hub` package and its own cache.

The package resumes what was broken off, shows its progress, and takes its settings from the environment: `HF_TOKEN`
for what is not public, `HF_HUB_OFFLINE=1` to use the cache alone, `HF_HOME` for where that is.
"""

import pathlib
from collections.abc import Sequence

from jaxspec.errors import FetchError

# What the readers open, and nothing else: no code, and no pickles unless they are asked for.
_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    "heads.json",
    "heads.safetensors",
]
PICKLES = ("medusa_lm_head.pt",)


def fetch_repository(repo_id: str, revision: str | None = None, more: Sequence[str] = ()) -> pathlib.Path:
    """Gives the directory of a Hub repository, downloading what is not in the Hub's own cache.

    Args:
        repo_id: `organization/name`.
        revision: branch, tag or commit; the default branch when None.
        more: files to fetch besides what is read of a model.

    Raises:
        FetchError: the repository could not be fetched.
    """
    import huggingface_hub

    try:
        wanted = [*_PATTERNS, *more]
        return pathlib.Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=wanted))
    except Exception as error:  # its errors, and those of the HTTP library beneath, share no base class
        raise FetchError(
            f"{repo_id}: no preset, no path here, and it could not be fetched from the Hugging Face Hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from error
