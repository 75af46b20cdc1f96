"""Finds the systems that can serve draft heads, and the layouts that hold them. Nothing here imports JAX."""

from jaxspec.errors import InvalidConfig
from jaxspec.heads.config import HeadsConfig
from jaxspec.heads.kinds import HeadSizes
from jaxspec.heads.layouts import EXPORTED, LAYOUTS, AnyLayout, Layout


def obstacle(config: HeadSizes, layout: AnyLayout) -> str | None:
    """Returns the reason why a layout cannot hold heads of these sizes; None if it can."""
    if not isinstance(layout, Layout):
        return layout.obstacle(config)
    if not isinstance(config, HeadsConfig):
        return f"the layout {layout.name} is for Medusa heads"
    if config.reads_words:
        return f"the layout {layout.name} has no place for heads that read the path (inputs {config.inputs!r})"
    if config.draft_vocab_size is not None and layout.tokens is None:
        return f"the layout {layout.name} has no place for a reduced vocabulary"
    if not config.bias and layout.requires_bias:
        return f"the layout {layout.name} has a bias in every block; these heads have none"
    if config.projection != "shared" and layout.projections == ("shared",):
        return f"the layout {layout.name} shares the target's projection, these heads have their own"
    if layout.num_layers not in (None, config.num_layers):
        return f"the layout {layout.name} has one block per head, these have {config.num_layers}"
    return None


def check_layout(config: HeadSizes, layout: AnyLayout) -> None:
    """Refuses a layout that cannot hold heads of these sizes.

    Raises:
        InvalidConfig: the layout cannot; the message names the layouts that can, or the heads that can be exported.
    """
    if (why := obstacle(config, layout)) is None:
        return
    if isinstance(config, HeadsConfig) and config.reads_words:
        every = ", ".join(_with_readers(name) for name in EXPORTED if LAYOUTS[name].drafter == config.drafter)
        raise InvalidConfig(
            f"{why}, nor has any other: only jaxspec serves them. Heads trained with --inputs hidden can be exported, "
            f"to {every}"
        )
    raise InvalidConfig(f"{why}; these can be exported to {' and '.join(layouts_for(config)) or 'no other'}")


def served_by(config: HeadSizes, own_target: bool = False) -> str:
    """Returns a sentence that says which systems can serve heads of these sizes.

    Args:
        config: sizes of the heads.
        own_target: True if the target was trained with the heads (Medusa-2), and is saved in jaxspec's own format.
    """
    if isinstance(config, HeadsConfig) and config.reads_words:
        return (
            f"Only jaxspec serves heads with inputs {config.inputs!r}: they cannot be exported; those with inputs "
            "'hidden' can, for vLLM, TGI and TensorRT-LLM."
        )
    names = [_with_readers(name) for name in layouts_for(config)]
    layouts = f"the layout{'s' if len(names) > 1 else ''} {', '.join(names)}"
    only = " The target trained with them is saved for jaxspec alone." if own_target else ""
    return f"jaxspec serves these heads, and 'jaxspec export' writes them in {layouts}.{only}"


def layouts_for(config: HeadSizes) -> list[str]:
    """Returns the names of the layouts that heads of these sizes can be exported to."""
    return [name for name in EXPORTED if obstacle(config, LAYOUTS[name]) is None]


def _with_readers(name: str) -> str:
    readers = LAYOUTS[name].readers
    return name if readers.lower() == name else f"{name} ({readers})"
