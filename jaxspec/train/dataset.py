"""From files of conversations to the rows a run reads."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.errors import TrainingError
from jaxspec.models.model import Model
from jaxspec.text.conversations import BadRow, Conversation
from jaxspec.train import packing, tokenized
from jaxspec.train.log import Watch
from jaxspec.train.manifest import ANSWERS
from jaxspec.train.self_distill import answers
from jaxspec.train.settings import Settings


class Data(NamedTuple):
    """What a run reads."""

    rows: packing.Rows
    held: packing.Rows
    ids: Any  # [R] the drafted tokens, where not all are
    bad: list[BadRow]
    prompts: list[list[int]]  # held out, for decoding
    answered: list[packing.Text]  # held out


def prepare(
    target: Model,
    target_print: str,
    conversations: Sequence[Conversation],
    unread: Sequence[BadRow],
    folder: pathlib.Path,
    settings: Settings,
    watch: Watch,
) -> Data:
    """Lets the target answer what was read from files, and packs what is learnt from.

    Raises:
        TrainingError: there is too little to learn from, or to hold out. What can be known of that before the target
            answers is checked before.
    """
    prompts: list[list[int]] = []
    given: list[packing.Text] = []
    if settings.distill:
        prompts, more = tokenized.prompts_of(target, conversations, settings.row_tokens - settings.heads - 2)
    else:
        given, more = tokenized.texts_of(target, conversations)
    if more and settings.bad_rows == "refuse":
        raise TrainingError(f"{more[0].where}: {more[0].why}; mend it, or let bad rows be reported")
    bad, count = [*unread, *more], len(prompts) + len(given)
    for row in bad[:5]:
        watch.say(f"left out: {row.where}: {row.why}")
    if bad:
        watch.say(f"{len(bad)} of {len(bad) + count} rows left out")
    if not count:
        raise TrainingError(f"nothing can be learnt from; the first row: {more[0].where}: {more[0].why}")
    learnt, apart = tokenized.split(count, settings.held_out)
    told = functools.partial(watch.phase, "the target answers")
    all_texts = given or answers(target, target_print, prompts, settings, folder / ANSWERS, told)
    used, held = [all_texts[i] for i in learnt], [all_texts[i] for i in apart]
    vocab = target.lm.vocab
    ids = tokenized.frequent(used, vocab, settings.draft_vocab) if 0 < settings.draft_vocab < vocab else None
    (rows, cut), (held_rows, _) = (packing.pack(some, settings.row_tokens) for some in (used, held))
    if not len(rows.tokens):
        raise TrainingError("nothing to learn from: every answer is cut off; make row_tokens (--row-tokens) larger")
    if len(held) and not len(held_rows.tokens):
        raise TrainingError(
            f"the {len(held)} texts that are held out have no answer within {settings.row_tokens} tokens; "
            "make row_tokens (--row-tokens) or held_out (--held-out) larger"
        )
    learnt_tokens = int(rows.mask.sum())
    watch.say(
        f"{len(used)} texts, {learnt_tokens} tokens to learn from, in {len(rows.tokens)} rows of "
        f"{settings.row_tokens}; {len(held)} texts held out" + (f"; {cut} cut" if cut else "")
    )
    prompts = [text.ids[: int(text.mask.argmax())].tolist() for text in held]
    return Data(rows, held_rows, ids, bad, prompts, held)
