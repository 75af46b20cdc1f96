"""Text that grows with the tokens, one whole character at a time."""

import codecs
from collections.abc import Iterable

from jaxspec.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Turns ids that arrive in pieces into text that arrives in pieces.

    For any way to cut `ids` into pieces, all that `push` returns, and then `finish`, is together exactly
    `tokenizer.decode(ids, skip_special)`. Bytes that may yet become a character are held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; often a word, empty inside a character."""
        data = b"".join(self._tokenizer.pieces(ids, self._skip_special))
        if self._strip and data:
            self._strip = False
            data = data[1:] if data[:1] == b" " else data
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What was held back: a character the text stopped inside of, as U+FFFD."""
        return self._utf8.decode(b"", final=True)
