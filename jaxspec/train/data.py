"""From files of conversations to the rows a run reads."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.errors import TrainingError
from jaxspec.models.model import Model
from jaxspec.train import texts
from jaxspec.train.answers import answers
from jaxspec.train.conversations import BadRow, read
from jaxspec.train.log import Watch
from jaxspec.train.settings import Settings

ANSWERS = "answers"


class Data(NamedTuple):
    """What a run reads."""

    rows: texts.Rows
    held: texts.Rows
    ids: Any  # [R] the drafted tokens, where not all are
    bad: list[BadRow]
    prompts: list[list[int]]  # held out, for decoding
    answered: list[texts.Text]  # held out


def prepare(
    target: Model, target_print: str, files: Sequence, folder: pathlib.Path, settings: Settings, watch: Watch
) -> Data:
    """Reads the files, lets the target answer, and packs what is learnt from."""
    conversations, bad = read(files, settings.bad_rows == "refuse")
    if settings.distill:
        prompts, more = texts.prompts_of(target, conversations, settings.row_tokens - settings.heads - 2)
        if not prompts:
            raise TrainingError(f"no prompt can be used; the first: {more[0].where}: {more[0].why}")
        told = functools.partial(watch.phase, "the target answers")
        all_texts = answers(target, target_print, prompts, settings, folder / ANSWERS, told)
    else:
        all_texts, more = texts.texts_of(target, conversations)
    bad += more
    if more and settings.bad_rows == "refuse":
        raise TrainingError(f"{more[0].where}: {more[0].why}; mend it, or let bad rows be reported")
    for row in bad[:5]:
        watch.say(f"left out: {row.where}: {row.why}")
    if bad:
        watch.say(f"{len(bad)} of {len(bad) + len(all_texts)} rows left out")
    learnt, apart = texts.split(len(all_texts), settings.held_out)
    used, held = [all_texts[i] for i in learnt], [all_texts[i] for i in apart]
    vocab = target.lm.vocab
    ids = texts.frequent(used, vocab, settings.draft_vocab) if 0 < settings.draft_vocab < vocab else None
    (rows, cut), (held_rows, _) = (texts.pack(some, settings.row_tokens) for some in (used, held))
    if not len(rows.tokens):
        raise TrainingError("nothing to learn from: every answer is cut off; make row_tokens larger")
    learnt_tokens = int(rows.mask.sum())
    watch.say(
        f"{len(used)} texts, {learnt_tokens} tokens to learn from, in {len(rows.tokens)} rows of "
        f"{settings.row_tokens}; {len(held)} texts held out" + (f"; {cut} cut" if cut else "")
    )
    prompts = [text.ids[: int(text.mask.argmax())].tolist() for text in held]
    return Data(rows, held_rows, ids, bad, prompts, held)
