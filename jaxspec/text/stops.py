"""Stop strings, which end a text."""

from collections.abc import Iterable, Sequence

from jaxspec.errors import InvalidConfig, shown
from jaxspec.text.incremental import IncrementalDecoder
from jaxspec.text.tokenizer import Tokenizer

MAX_STOP_CHARACTERS = 4096  # text of up to this length can be held back
MAX_STOPS = 4096
"""Maximum number of stop strings, because all of them are searched for in every new text."""


class StopStrings:
    """The stop strings of a text, matched incrementally.

    The text ends at the stop string that is *completed* first; if two of them end with the same character, at the
    longer one. Therefore the end of a text depends only on its characters, and not on how the text is split into
    pieces.
    """

    def __init__(self, strings: Sequence[str] | str = ()):
        if not isinstance(strings, Sequence):
            raise InvalidConfig(f"stop must be a string or a list of strings, got {shown(strings)}")
        if not isinstance(strings, str) and len(strings) > MAX_STOPS:
            raise InvalidConfig(f"stop must be a list of at most {MAX_STOPS} strings, got {shown(strings)}")
        strings = (strings,) if isinstance(strings, str) else tuple(strings)
        for string in strings:
            if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_CHARACTERS:
                raise InvalidConfig(
                    f"a stop string must be a str of 1 to {MAX_STOP_CHARACTERS} characters, got {shown(string)}"
                )
        self.strings = strings
        self._held, self._matched = "", False

    def find(self, text: str) -> int | None:
        """Returns the index at which the stop string that ends `text` begins, or None."""
        matches = ((text.find(stop), stop) for stop in self.strings)
        return min(((at + len(stop), at) for at, stop in matches if at >= 0), default=(0, None))[1]

    def push(self, text: str) -> tuple[str, bool]:
        """Adds new text; returns the text that is safe to emit, and whether a stop string is complete.

        A suffix that could begin a stop string is held back. After a match, the returned text is empty.
        """
        if self._matched:
            return "", True
        text = self._held + text
        if (at := self.find(text)) is not None:
            self._held, self._matched = "", True
            return text[:at], True
        keep = max((_overlap(text, stop) for stop in self.strings), default=0)
        safe, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return safe, False

    def finish(self) -> str:
        """Returns the text that was held back, at the end of a text without a stop string."""
        pending, self._held = self._held, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def cut_tokens(
    tokenizer: Tokenizer, ids: Iterable[int], stops: StopStrings | Sequence[str], before: Sequence[int] = ()
) -> tuple[int, str]:
    """Returns how many of the ids remain after applying the stop strings, and their text.

    The last token is the one that completes a stop string; the text is cut before the stop string.

    Args:
        tokenizer: the tokenizer.
        ids: token ids of an answer.
        stops: the stop strings.
        before: token ids of the prompt, see `IncrementalDecoder`.
    """
    matcher = StopStrings(stops.strings if isinstance(stops, StopStrings) else stops)
    decoder, text, count = IncrementalDecoder(tokenizer, before=before), "", 0
    for count, token in enumerate(ids, start=1):
        safe, matched = matcher.push(decoder.push([token]))
        text += safe
        if matched:
            return count, text
    safe, _ = matcher.push(decoder.finish())
    return count, text + safe + matcher.finish()
