"""The models and heads that a command loads: their options, the checks of their headers, and loading.

Imports JAX only when used.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from jaxspec.cli.options import UsageError
from jaxspec.errors import CapacityError, JaxspecError, MissingTokenizer
from jaxspec.registry import DRAFTERS, MTP_DRAFTER, SELF_DRAFTER, drafter_takes, find
from jaxspec.storage.reading import check_path

if TYPE_CHECKING:
    from jaxspec.checkpoints.base import Checkpoint
    from jaxspec.generation.drafting import Drafting
    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the models and heads of a command come from.

    Attributes:
        target: source of the target.
        draft: source of the draft model; None for no draft model.
        heads: sources of heads, at most one for each drafter.
        dtype: dtype of the target's weights, and of heads.
        draft_dtype: dtype of the draft model's weights.
        context: the maximum length of the target's texts; None for the maximum that the target was made for.
        allow_pickle: whether heads may be read from `.pt` files.
        exact: True if the bits of a text must not depend on the drafter; None for the fastest form. See `jaxspec.load`.
        generation_config: whether texts have the processors that generation_config.json sets.
    """

    target: str
    draft: str | None
    heads: tuple[str, ...]
    dtype: str
    draft_dtype: str
    context: int | None
    allow_pickle: bool
    exact: bool | None = None
    generation_config: bool = False


def add_heads(add: Callable, *, several: bool = False) -> None:
    """Adds `--heads`, which may be given once for every drafter if `several`, and `--allow-pickle`."""
    add(
        "--heads",
        action="append" if several else "store",
        metavar="SOURCE",
        help="heads of 'medusa', 'eagle' or 'dflash': a directory, a file or a Hub repository (default: the heads of "
        "the preset)" + "; repeatable, once for every drafter" * several,
    )
    add_allow_pickle(add)


def add_allow_pickle(add: Callable) -> None:
    """Adds `--allow-pickle`."""
    add("--allow-pickle", action="store_true", help="also read heads from .pt files; no code in them is run")


def read_sources(args: argparse.Namespace, drafters: Collection[str] | None) -> Sources:
    """Reads the options of models and heads, with the preset's own draft model and heads as defaults.

    Args:
        args: the options of a command that decodes.
        drafters: names of the drafters that the command uses; None for all drafters that the models support.

    Raises:
        UsageError: no drafter takes the model or the heads of an option, or a drafter needs an option that is missing.
    """
    draft, heads = args.draft_model, [args.heads] if isinstance(args.heads, str) else args.heads
    if drafters is not None:
        takes = set().union(*map(drafter_takes, drafters))
        for option, field, given in (("--draft-model", "draft", draft), ("--heads", "heads", heads)):
            if given is not None and field not in takes:
                raise UsageError(
                    f"{option} is for the drafter {_name_takers(field)}, not {' or '.join(drafters) or 'none'}"
                )
        if "model" in drafters:
            draft = draft or find_preset_draft(args.target)
        for name in drafters:
            if (option := _missing(name, args.target, draft, heads)) is not None:
                raise UsageError(f"the drafter {name} needs {option} SOURCE")
        if not heads and "heads" in takes:
            heads = [own for name in drafters if (own := find_preset_heads(args.target, name)) is not None]
    if args.draft_dtype is not None and draft is None:
        raise UsageError(f"--draft-dtype needs a draft model of the drafter {_name_takers('draft')}; leave it out")
    draft_dtype = args.draft_dtype or args.dtype
    return Sources(
        args.target, draft, tuple(heads or ()), args.dtype, draft_dtype, args.context, args.allow_pickle,
        True if args.exact else None,
        getattr(args, "generation_config", False),
    )  # fmt: skip


def _name_takers(field: str) -> str:
    """Returns the names of the drafters that take "draft" or "heads", for a message; imports all of jaxspec's own."""
    return " or ".join(name for name in DRAFTERS if DRAFTERS.own(name) and field in find("drafter", name).takes)


def _missing(drafter: str, target: str, draft: str | None, heads: list[str] | None) -> str | None:
    """Returns the option that a drafter of jaxspec's own needs and that is missing, such as `--heads`; or None.

    Heads may also come with jaxspec, or be inside the target. Drafters of other packages report missing inputs
    themselves, and so does `MTP_DRAFTER`. `SELF_DRAFTER` and `AUTO_DRAFTER` need nothing.
    """
    takes = find("drafter", drafter).takes if DRAFTERS.own(drafter) else ()
    if "draft" in takes and draft is None and drafter != SELF_DRAFTER:
        return "--draft-model"
    if "heads" not in takes or heads is not None or drafter == MTP_DRAFTER:
        return None
    known = find_preset_heads(target, drafter) is not None or (drafter == "eagle" and _has_heads_inside(target))
    return None if known else "--heads"


def _has_heads_inside(target: str) -> bool:
    """Returns whether local files of a target hold heads; files that cannot be read hold none."""
    from jaxspec.heads.find import find_layout
    from jaxspec.heads.layouts import LAYOUTS

    try:
        layout = find_layout(check_path(target)) if os.path.exists(target) else None
    except JaxspecError:
        return False
    return layout in LAYOUTS and LAYOUTS[layout].in_model


def find_preset_draft(target: str) -> str | None:
    """Returns the draft model of a preset; None if the target is not a preset or has no draft model."""
    from jaxspec.checkpoints.presets import PRESETS

    return PRESETS[target].draft if target in PRESETS else None


def find_preset_heads(target: str, drafter: str) -> str | None:
    """Returns the source of the heads that come with jaxspec; None if there are none for this target."""
    from jaxspec.heads.find import find_shipped_heads

    return f"{target}/{drafter}" if find_shipped_heads(target, drafter) else None


def load_for_drafting(
    sources: Sources, drafting: "Drafting", new_tokens: int | None, chat: bool | None
) -> tuple["Model", "Drafting"]:
    """Loads the target, and returns it with the drafting that has the loaded draft model and heads.

    Args:
        sources: the sources of models and heads.
        drafting: the drafting, without models and heads.
        new_tokens: as in `load_models`.
        chat: as in `load_models`.
    """
    target, draft = load_models(sources, drafting, new_tokens, chat)
    loaded = load_heads_by_drafter(sources, target)
    heads = next(iter(loaded.values()), None) if drafting.is_auto else loaded.get(str(drafting.drafter))
    return target, dataclasses.replace(drafting, draft=draft, heads=heads)


def load_models(
    sources: Sources, drafting: "Drafting | None", new_tokens: int | None, chat: bool | None
) -> tuple["Model", "Model | None"]:
    """Loads the target and the draft model; they are one object if source and dtype agree.

    All headers are read before any weight, so that a misspelled name of a draft model or of heads costs no time.

    Args:
        sources: the sources of models and heads.
        drafting: the drafting of the command; None for a command with several draftings.
        new_tokens: number of new tokens of each text; None for a conversation, which fits its answers into the context.
        chat: whether a chat template is needed; None if a template is used only when there is one.

    Raises:
        JaxspecError: a source does not exist or is malformed.
        CapacityError: the new tokens alone exceed the target's context.
    """
    from jaxspec.checkpoints.source import open_source
    from jaxspec.cli import show

    for source in sources.heads:
        _check_heads(source, sources.allow_pickle, drafting)
    draft = None if sources.draft is None else open_source(sources.draft, report=show.say)
    checkpoint = open_source(sources.target, report=show.say, context=sources.context)
    _check_target(sources.target, checkpoint, new_tokens, chat)
    target = show.load_model(
        checkpoint, sources.dtype, exact=sources.exact, generation_config=sources.generation_config
    )
    if draft is None:
        return target, None
    same = (sources.draft, sources.draft_dtype) == (sources.target, sources.dtype)
    return target, target if same else show.load_model(draft, sources.draft_dtype)


def _check_target(name: str, checkpoint: "Checkpoint", new_tokens: int | None, chat: bool | None) -> None:
    """Checks the headers of the target; see `load_models`.

    Raises:
        CapacityError: the new tokens alone exceed the target's context.
        MissingTokenizer: a chat template is needed, and the target has none.
    """
    context = checkpoint.config.max_position
    if new_tokens is not None and new_tokens >= context:
        limit = f"the prompt and the new tokens must fit in the model's context of {context} tokens"
        raise CapacityError(f"max_new_tokens={new_tokens}: {limit}")
    if chat and checkpoint.chat_template is None and not checkpoint.named_templates:
        way = "use `jaxspec generate` instead" if new_tokens is None else "pass plain text (--no-chat) instead"
        raise MissingTokenizer(f"{name} has no chat template; {way}")


def _check_heads(source: str, allow_pickle: bool, drafting: "Drafting | None") -> None:
    """Checks the headers of heads; reads no weight.

    Raises:
        UsageError: the heads are for another drafter, or cannot draft the tree.
        JaxspecError: there are no heads, or they are malformed.
    """
    from jaxspec.cli import show
    from jaxspec.core.topology import as_topology
    from jaxspec.heads.headers import open_heads

    config = open_heads(source, allow_pickle=allow_pickle, report=show.say).config_of_any_vocabulary()
    if drafting is None or drafting.is_auto:
        return
    if config.drafter != drafting.drafter:
        other = f"--drafter {config.drafter}, not {drafting.drafter}"
        raise UsageError(f"--heads {source}: these heads ({config.summary}) are for {other}")
    topology = as_topology(drafting.tree)
    if topology is not None and (depth := topology.shape.depth) > config.max_depth:
        most = f"drafts at most {config.max_depth} tokens deep, but the tree is {depth} deep"
        raise UsageError(f"--heads {source} ({config.summary}) {most}")


def load_heads_by_drafter(sources: Sources, target: "Model") -> dict[str, "DraftHeads"]:
    """Loads all heads, prints their notes, and returns them by drafter.

    Raises:
        UsageError: two sources have heads for the same drafter.
    """
    from jaxspec.checkpoints.base import activation_dtype
    from jaxspec.cli import show
    from jaxspec.heads.files import load_heads

    loaded: dict[str, DraftHeads] = {}
    for source in sources.heads:
        dtype = activation_dtype(sources.dtype)
        heads = load_heads(source, target=target, dtype=dtype, allow_pickle=sources.allow_pickle)
        for note in heads.notes:
            show.say(f"{source}: {note}", answer=True)
        drafter = heads.config.drafter
        if drafter in loaded:
            raise UsageError(
                f"--heads {source}: other heads for {drafter} are given as well; give one source per drafter"
            )
        loaded[drafter] = heads
    return loaded
