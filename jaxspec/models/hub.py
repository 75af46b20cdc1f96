"""Repositories of the Hugging Face Hub, through the `huggingface_hub` package and its own cache.

The package resumes what was broken off, shows its progress, and takes its settings from the environment: `HF_TOKEN`
for what is not public, `HF_HUB_OFFLINE=1` to use the cache alone, `HF_HOME` for where that is.
"""

import pathlib

from jaxspec.errors import FetchError

# What the reader opens, and nothing else: no pickles, no code.
_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
]


def fetch_repository(repo_id: str, revision: str | None = None) -> pathlib.Path:
    """Gives the directory of a Hub repository, downloading what is not in the Hub's own cache.

    Args:
        repo_id: `organization/name`.
        revision: branch, tag or commit; the default branch when None.

    Raises:
        FetchError: the repository could not be fetched.
    """
    import huggingface_hub

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # its errors, and those of the HTTP library beneath, share no base class
        raise FetchError(
            f"{repo_id}: no preset, no path here, and it could not be fetched from the Hugging Face Hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from error
