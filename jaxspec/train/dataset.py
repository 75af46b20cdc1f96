"""Makes the rows of a run from conversations."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.errors import TrainingError
from jaxspec.models.model import Model
from jaxspec.text.conversations import BadRow, Conversation
from jaxspec.train import packing, tokenized
from jaxspec.train.identity import TargetIdentity
from jaxspec.train.log import Watch
from jaxspec.train.manifest import ANSWERS_FOLDER
from jaxspec.train.self_distill import answer_prompts
from jaxspec.train.settings import TrainSettings


class Data(NamedTuple):
    """The texts of a run.

    Attributes:
        rows: the rows to train on.
        held: the held-out rows.
        ids: the drafted tokens `[R]`, ascending; None for the whole vocabulary.
        bad: the rows of files that were left out.
        prompts: the held-out prompts.
        answered: the held-out prompts with their answers.
    """

    rows: packing.Rows
    held: packing.Rows
    ids: Any
    bad: list[BadRow]
    prompts: list[list[int]]
    answered: list[packing.Text]


def prepare_data(
    target: Model,
    identity: TargetIdentity,
    conversations: Sequence[Conversation],
    unread: Sequence[BadRow],
    folder: pathlib.Path,
    settings: TrainSettings,
    drafted: int,
    watch: Watch,
) -> Data:
    """Lets the target answer prompts, holds some texts out, and packs the texts into rows.

    Args:
        target: the target.
        identity: what a manifest records of the target.
        conversations: the conversations.
        unread: the rows of files that could not be read.
        folder: the folder of answers.
        settings: the settings.
        drafted: number of tokens that are guessed from each position.
        watch: callbacks for progress.

    Raises:
        TrainingError: there are too few texts; raised before the target answers if possible.
    """
    prompts: list[list[int]] = []
    texts: list[packing.Text] = []
    if settings.distill:
        prompts, more = tokenized.encode_training_prompts(target, conversations, settings.row_tokens - drafted - 2)
    else:
        texts, more = tokenized.encode_texts(target, conversations)
    if more and settings.bad_rows == "refuse":
        raise TrainingError(f"{more[0].where}: {more[0].why}; correct it, or set bad_rows (--bad-rows) to report")
    bad, count = [*unread, *more], len(prompts) + len(texts)
    for row in bad[:5]:
        watch.say(f"left out: {row.where}: {row.why}")
    if bad:
        watch.say(f"{len(bad)} of {len(bad) + count} rows left out")
    if not count:
        raise TrainingError(f"no row can be trained on; the first reason: {more[0].where}: {more[0].why}")
    training, held_out = tokenized.split_held_out(count, settings.held_out)
    if settings.distill:
        progress = functools.partial(watch.phase, "the target answers")
        texts = answer_prompts(
            target, identity, prompts, settings, drafted, folder / ANSWERS_FOLDER, progress, watch.say
        )
    used, held = [texts[i] for i in training], [texts[i] for i in held_out]
    vocab = target.lm.vocab
    ids = (
        tokenized.find_frequent_tokens(used, vocab, settings.draft_vocab) if 0 < settings.draft_vocab < vocab else None
    )
    (rows, cut), (held_rows, _) = (packing.pack_texts(part, settings.row_tokens) for part in (used, held))
    if not len(rows.tokens):
        raise TrainingError("nothing to train on: every answer is cut off; increase row_tokens (--row-tokens)")
    if len(held) and not len(held_rows.tokens):
        raise TrainingError(
            f"the {len(held)} held-out texts have no answer within {settings.row_tokens} tokens; "
            "increase row_tokens (--row-tokens) or held_out (--held-out)"
        )
    watch.say(
        f"{len(used)} texts, {int(rows.mask.sum())} tokens to train on, in {len(rows.tokens)} rows of "
        f"{settings.row_tokens}; {len(held)} texts held out" + (f"; {cut} cut" if cut else "")
    )
    held_prompts = [text.ids[: int(text.mask.argmax())].tolist() for text in held]
    return Data(rows, held_rows, ids, bad, held_prompts, held)
