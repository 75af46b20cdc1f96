"""Incremental decoding of tokens to text, in whole characters."""

import codecs
from collections.abc import Iterable, Sequence

from jaxspec.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes token ids in pieces.

    For every split of `ids` into pieces, the concatenation of the results of `push` and `finish` is exactly
    `tokenizer.decode(ids, skip_special)`. Bytes of an incomplete character are held back.

    With `before`, the results are the text that follows the text of these ids: `tokenizer.decode(before)` followed by
    the results equals `tokenizer.decode(before + ids)`. There is one exception: if `before` ends inside a character
    that `ids` completes, the results begin with the whole character.

    Args:
        tokenizer: the tokenizer.
        skip_special: whether to skip control tokens.
        before: ids of the text that the decoded ids continue.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, before: Sequence[int] = ()):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        end = _last_bytes(tokenizer, skip_special, before)
        self._strip = tokenizer.strips_space and not end
        self._utf8.decode(end)
        self._cut_before = bool(self._utf8.getstate()[0])  # the text of `before` ends in U+FFFD

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these ids complete; the text is empty if they end inside a character."""
        data = b"".join(self._tokenizer.pieces(ids, self._skip_special))
        if self._strip and data:
            self._strip = False
            data = data[1:] if data[:1] == b" " else data
        return self._decode(data)

    def finish(self) -> str:
        """Returns the text that was held back: an incomplete character, as U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._cut_before and text:
            self._cut_before = False
            text = text.removeprefix("\ufffd")
        return text


def _last_bytes(tokenizer: Tokenizer, skip_special: bool, ids: Sequence[int]) -> bytes:
    """Returns the last bytes of a text, enough of them to hold an incomplete character.

    Ids that only pad a model's vocabulary do not have a text.
    """
    end = b""
    for i in reversed(ids):
        end = b"".join(tokenizer.pieces([i], skip_special)) + end if i < tokenizer.vocab_size else end
        if len(end) >= 4:  # the longest characters of UTF-8
            break
    return end
