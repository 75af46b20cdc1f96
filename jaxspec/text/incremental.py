"""Incremental decoding of tokens to text, in whole characters."""

import codecs
from collections.abc import Iterable

from jaxspec.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes token ids in pieces.

    For every split of `ids` into pieces, the concatenation of the results of `push` and `finish` is exactly
    `tokenizer.decode(ids, skip_special)`. Bytes of an incomplete character are held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these ids complete; it may be empty, inside a character."""
        data = b"".join(self._tokenizer.pieces(ids, self._skip_special))
        if self._strip and data:
            self._strip = False
            data = data[1:] if data[:1] == b" " else data
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Returns the text that was held back: an incomplete character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)
