"""The bridge between two vocabularies: the tokens that a target and a draft model share, and the draft's spelling of
the others.

Two tokens are the same if they stand for the same bytes in the middle of a text. The names of tokens cannot be
compared, because families write them in different alphabets: byte-level BPE maps bytes to printable characters, and
SentencePiece marks spaces and writes bytes in hexadecimal. Control tokens do not have bytes in a text; control tokens
that end a turn, end a text or begin a text are matched by their role.

Drafting only the shared tokens is called "token-level intersection" (Timor et al. 2025, arXiv:2502.05202).
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.errors import VocabMismatch, ignored_refusals
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer

MAX_SPELLING = 32
"""Maximum number of draft tokens that spell one token of the target; only the end of a longer spelling is kept."""
LOW_SHARE = 1 / 3
"""The share of a sample text below which few drafts can be accepted."""
SAMPLE_TEXT = """The committee will meet again on Thursday, 14 March 2024, at 10:30; please send your questions to us.
When the rain stopped, she opened the window and listened: somewhere below, a street musician was playing an old waltz.
def moving_average(values: list[float], width: int = 3) -> list[float]:
    if width < 1 or width > len(values):
        raise ValueError(f"width must be between 1 and {len(values)}, got {width}")
\treturn [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]
Wir möchten wissen, ob die neue Brücke über den Fluss noch in diesem Jahr fertiggestellt wird.
| city | inhabitants | area |
|------|------------:|-----:|
| Graz |     302,749 | 127.6 km² |
"""
"""The text from which `Bridge.sample_share` is computed: prose, code and a table."""


@dataclasses.dataclass(frozen=True)
class Side:
    """The properties of one of two models that concern its text.

    Attributes:
        tokenizer: its tokenizer.
        template: its chat template, if any.
        stop_ids: ids of the tokens that end its texts.
        vocab: the number of its logits; larger token ids do not have a row.
        name: its name in messages.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_ids: tuple[int, ...]
    vocab: int
    name: str = "model"

    @property
    def size(self) -> int:
        """The number of tokens that have both a text and a row."""
        return min(self.tokenizer.vocab_size, self.vocab)

    @functools.cached_property
    def roles(self) -> list[int | None]:
        """The ids of the tokens that end a turn, end a text, and begin a text; None for each token that the model does
        not have."""
        ends = [i for i in (*self.stop_ids, self.tokenizer.eos_id) if i is not None and i < self.size]
        turn = next(iter(ends), None)
        if self.template is not None:
            talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            with ignored_refusals():  # a template may refuse the conversation
                ids = self.tokenizer.encode(self.template.render(talk, add_generation_prompt=False))
                turn = next((i for i in reversed(ids) if i in ends), turn)
        begin = self.tokenizer.bos_id
        begin = None if begin is None or begin >= self.size else begin
        return [turn, next((i for i in ends if i != turn), None), begin]

    @functools.cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """The id of each text; if several tokens have the same bytes, the lowest plain id."""
        ids: dict[bytes, int] = {}
        ordinary = [i for i in range(self.size) if i not in self.tokenizer.special_ids]
        for i in sorted(ordinary, key=lambda i: (not self.tokenizer.is_plain(i), i)):
            ids.setdefault(self.tokenizer.token_bytes(i), i)
        ids.pop(b"", None)
        return ids

    def spell(self, texts: Sequence[bytes]) -> list[list[int]]:
        """Returns the ids of texts in the middle of other texts. If the tokenizer's ids do not keep the bytes, uses the
        longest matches."""
        tokenizer = self.tokenizer
        whole = [text.decode(errors="replace") for text in texts]
        split = tokenizer.encode_all(whole, begins=False)
        return [ids if self._spells(ids, text) else self.longest_matches(text) for ids, text in zip(split, texts)]

    def _spells(self, ids: Sequence[int], text: bytes) -> bool:
        """Tells whether ids without control tokens have these bytes."""
        ordinary = max(ids, default=0) < self.size and not self.tokenizer.special_ids.intersection(ids)
        return ordinary and b"".join(self.tokenizer.pieces(ids)) == text

    def conversation(self, ids: Sequence[int]) -> list[dict[str, str]] | None:
        """Returns the messages that the chat template renders as these ids, or None.

        The first and the last message are the user's. The text between messages is found by rendering a conversation
        with known contents.
        """
        if self.template is None:
            return None
        marks = "\ue000", "\ue001", "\ue002"  # characters of private use
        roles = "user", "assistant", "user"
        known = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
        with ignored_refusals(ValueError):
            before, *between, after = re.split("|".join(marks), self.template.render(known))
            for start in (0, 1):  # with and without a BOS that only the tokenizer adds
                text = b"".join(self.tokenizer.pieces(ids[start:], skip_special=False)).decode()
                rest, turns = text.removeprefix(before).removesuffix(after), []
                for mark in itertools.cycle(between):
                    turn, has_mark, rest = rest.partition(mark)
                    turns.append({"role": roles[len(turns) % 2], "content": turn})
                    if not has_mark:
                        break
                if self.tokenizer.encode(self.template.render(turns)) == list(ids):
                    return turns
        return None

    def longest_matches(self, text: bytes) -> list[int]:
        """Returns the ids of a text, taking the longest token at each position from left to right; bytes without a
        token are skipped."""
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self.by_bytes), None)
            ids += [] if end is None else [self.by_bytes[text[at:end]]]
            at = at + 1 if end is None else end
        return ids

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self.by_bytes), default=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Bridge:
    """Tables between the vocabularies of a target and a draft model.

    Attributes:
        target: the target's side.
        draft: the draft model's side.
        as_target: the target's ids of the common tokens, ascending, `[R]`.
        common: the draft's ids of the same tokens, `[R]`.
        spelling: the draft's spellings of all tokens of the target, concatenated.
        starts: the start of the spelling of each of the target's ids, and the end of the last spelling, `[V + 1]`.
        sample_share: the share of common tokens among the target's tokens of a sample text.
    """

    target: Side
    draft: Side
    as_target: np.ndarray
    common: np.ndarray
    spelling: np.ndarray
    starts: np.ndarray
    sample_share: float

    @property
    def widest(self) -> int:
        """The maximum number of draft tokens that spell one token of the target."""
        return int(np.diff(self.starts).max())

    @property
    def begin(self) -> int:
        """The draft token with which an otherwise empty text begins."""
        turn, text, bos = self.draft.roles
        return next((i for i in (bos, text, turn) if i is not None), int(self.common[0]))

    @property
    def shares(self) -> dict[str, float]:
        """The shares of common tokens: of the target's vocabulary, of the draft's, and of a sample text."""
        count = len(self.common)
        return {"target": count / self.target.size, "draft": count / self.draft.size, "sample": self.sample_share}

    def __str__(self) -> str:
        shares, names = self.shares, (self.draft.name, self.target.name)
        line = (
            f"{names[0]} and {names[1]} have {len(self.common)} tokens in common: {shares['target']:.0%} of the "
            f"target's, {shares['draft']:.0%} of the draft's, {shares['sample']:.0%} of the tokens of a sample text"
        )
        return line + (
            "; other tokens cannot be drafted, so expect few accepted tokens and little speed-up from this pair"
            if shares["sample"] < LOW_SHARE
            else ""
        )

    def respell(self, ids: Iterable[int]) -> list[int]:
        """Returns the draft's spelling of the target's tokens, one token at a time, as the decoder spells committed
        tokens."""
        return [int(i) for token in ids for i in self.spelling[self.starts[token] : self.starts[token + 1]]]

    def prompt(self, prompt: Any, ids: Sequence[int], variables: Mapping[str, Any]) -> list[int]:
        """Returns a prompt in the draft's tokens.

        Text is tokenized by the draft's tokenizer. Messages are rendered by the draft's chat template, including
        messages that the target's template has already rendered as token ids. Other ids, and messages that the draft's
        template refuses, are spelled from the target's ids.

        Args:
            prompt: raw text, token ids or chat messages.
            ids: the same prompt in the target's tokens.
            variables: variables of the chat template, such as `tools`.
        """
        side = self.draft
        spelling = None
        if isinstance(prompt, str):
            spelling = side.tokenizer.encode(prompt)
        elif side.template is not None:
            messages = prompt if isinstance(prompt[0], Mapping) else self.target.conversation(ids)
            with ignored_refusals():
                spelling = (
                    None if messages is None else side.tokenizer.encode(side.template.render(messages, **variables))
                )
        if spelling is None:
            spelling = [*(side.tokenizer.encode("") or [self.begin]), *self.respell(ids)]
        return [i for i in spelling if i < side.size] or [self.begin]


@functools.lru_cache(maxsize=8)
def build_bridge(target: Side, draft: Side) -> Bridge:
    """Builds the tables of two vocabularies, which takes seconds; the tables of the most recent pairs are cached.

    Raises:
        VocabMismatch: the vocabularies have no text in common.
    """
    shared = target.by_bytes.keys() & draft.by_bytes.keys()
    if not shared:
        raise VocabMismatch(
            f"{draft.name} and {target.name} do not have a token with the same text; choose another draft model"
        )
    ends: dict[int, int] = {}
    for ours, theirs in zip(target.roles, draft.roles):
        if ours is not None and theirs is not None and ours not in ends and theirs not in ends.values():
            ends[ours] = theirs
    pairs = sorted({target.by_bytes[text]: draft.by_bytes[text] for text in shared}.items() | ends.items())

    spellings: list[list[int]] = [[] for _ in range(target.vocab)]
    others = {}
    for token in range(target.size):
        if token in ends or token in target.tokenizer.special_ids:
            spellings[token] = [ends[token]] if token in ends else []
            continue
        text = target.tokenizer.token_bytes(token)
        if text in shared:
            spellings[token] = [draft.by_bytes[text]]
        else:
            others[token] = text
    for token, ids in zip(others, draft.spell([*others.values()])):
        spellings[token] = ids[-MAX_SPELLING:]
    as_target, common = np.asarray(pairs, np.int32).T
    sample = target.tokenizer.encode(SAMPLE_TEXT, special=False)
    return Bridge(
        target,
        draft,
        as_target,
        common,
        np.asarray([token for ids in spellings for token in ids], np.int32),
        np.cumsum([0, *map(len, spellings)], dtype=np.int32),
        float(np.isin(sample, as_target).mean()) if sample else 0.0,
    )
