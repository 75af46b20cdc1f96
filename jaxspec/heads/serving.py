"""Finds the systems that can serve draft heads, and the layouts that hold them. Nothing here imports JAX."""

from jaxspec.errors import InvalidConfig
from jaxspec.heads.kinds import Layout, head_kind, kind_of
from jaxspec.heads.layouts import EXPORT_LAYOUTS, LAYOUTS
from jaxspec.heads.sizes import HeadSizes


def find_obstacle(config: HeadSizes, layout: Layout) -> str | None:
    """Returns the reason why a layout cannot hold heads of these sizes; None if it can."""
    if layout.drafter != config.drafter:
        return f"the layout {layout.name} is for {head_kind(layout.drafter).title}"
    return kind_of(config).obstacle(config, layout)


def check_layout(config: HeadSizes, layout: Layout) -> None:
    """Refuses a layout that cannot hold heads of these sizes.

    Raises:
        InvalidConfig: the layout cannot hold the heads; the message names the layouts that can, or the heads that can
            be exported.
    """
    if (reason := find_obstacle(config, layout)) is None:
        return
    if (advice := kind_of(config).advice(config)) is not None:
        every = ", ".join(_with_readers(name) for name in EXPORT_LAYOUTS if LAYOUTS[name].drafter == config.drafter)
        raise InvalidConfig(f"{reason}, and no other layout can: only jaxspec serves them. {advice}, in {every}")
    possible = " or ".join(list_layouts(config))
    raise InvalidConfig(f"{reason}; {f'use the layout {possible}' if possible else 'no other layout can hold them'}")


def describe_serving(config: HeadSizes, own_target: bool = False) -> str:
    """Returns a sentence that says which systems can serve heads of these sizes.

    Args:
        config: the sizes of the heads.
        own_target: True if the target was trained with the heads (Medusa-2), and is saved in jaxspec's own format.
    """
    names = [_with_readers(name) for name in list_layouts(config)]
    if not names:
        advice = kind_of(config).advice(config)
        return "Only jaxspec serves these heads: no layout can hold them." + (f" {advice}." if advice else "")
    layouts = f"the layout{'s' if len(names) > 1 else ''} {', '.join(names)}"
    only = " The target trained with them is saved for jaxspec alone." if own_target else ""
    return f"jaxspec serves these heads, and 'jaxspec export' writes them in {layouts}.{only}"


def list_layouts(config: HeadSizes) -> list[str]:
    """Returns the names of the layouts that heads of these sizes can be exported to."""
    return [name for name in EXPORT_LAYOUTS if find_obstacle(config, LAYOUTS[name]) is None]


def _with_readers(name: str) -> str:
    readers = LAYOUTS[name].readers
    return name if readers.lower() == name else f"{name} ({readers})"
