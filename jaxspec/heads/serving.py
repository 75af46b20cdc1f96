"""Which systems can serve draft heads, and which layouts hold them. Nothing here imports JAX."""

from jaxspec.errors import InvalidConfig
from jaxspec.heads.config import HeadsConfig

READERS = {
    "v0.1": "Medusa 0.1, TensorRT-LLM, TGI",
    "legacy": "Medusa's legacy trainer, TGI",
    "v1.0": "Medusa 1.0, in the model they were trained with",
    "vllm": "vLLM",
}
"""Who reads a layout."""
WRITTEN = ("v0.1", "legacy", "vllm")
"""The layouts that `jaxspec export` writes."""


def obstacle(config: HeadsConfig, layout: str) -> str | None:
    """Says why a layout cannot hold heads of these sizes; None if it can."""
    if config.reads_words:
        return f"the layout {layout} has no place for heads that read the path (inputs {config.inputs!r})"
    if layout == "vllm":
        return None
    if config.draft_vocab_size is not None:
        return f"the layout {layout} has no place for a reduced vocabulary"
    if not config.bias:
        return f"the layout {layout} has a bias in every block, these heads have none"
    if layout == "legacy" and config.projection != "shared":
        return "the layout legacy shares the target's projection, these heads have their own"
    if layout == "legacy" and config.num_layers != 1:
        return f"the layout legacy has one block per head, these have {config.num_layers}"
    return None


def check_layout(config: HeadsConfig, layout: str) -> None:
    """Refuses a layout that cannot hold heads of these sizes.

    Raises:
        InvalidConfig: naming the layouts that can, or the kind of heads that can be exported.
    """
    if (why := obstacle(config, layout)) is None:
        return
    if config.reads_words:
        every = ", ".join(f"{one} ({READERS[one]})" for one in WRITTEN)
        raise InvalidConfig(
            f"{why}, nor has any other: only jaxspec serves them. Heads trained with --inputs hidden can be exported, "
            f"to {every}"
        )
    raise InvalidConfig(f"{why}; these can be exported to {' and '.join(layouts_for(config))}")


def served_by(config: HeadsConfig, own_target: bool = False) -> str:
    """Says in one sentence which systems can serve heads of these sizes.

    Args:
        config: the sizes.
        own_target: the target was trained with the heads (Medusa-2), and is saved in jaxspec's own format.
    """
    if config.reads_words:
        return (
            f"Only jaxspec serves heads with inputs {config.inputs!r}: they cannot be exported; those with inputs "
            "'hidden' can, for vLLM, TGI and TensorRT-LLM."
        )
    layouts = ", ".join(f"{name} ({READERS[name]})" for name in layouts_for(config))
    only = " The target trained with them is saved for jaxspec alone." if own_target else ""
    return f"jaxspec serves these heads, and 'jaxspec export' writes them in the layouts {layouts}.{only}"


def layouts_for(config: HeadsConfig) -> list[str]:
    """Names the layouts that heads of these sizes can be exported to."""
    return [name for name in WRITTEN if obstacle(config, name) is None]
