"""Tokenizers in the confined process: the `tokenizers` library encodes text with the content of a file."""

import json
import struct

import tokenizers


class ConfinedTokenizer:
    """The tokenizer of a `tokenizer.json`.

    Some published files contain settings for training: truncation, padding and dropout. These settings are turned off.
    """

    def __init__(self, text):
        """Reads the text of the file."""
        self._inner = tokenizers.Tokenizer.from_str(text)
        self._inner.no_truncation()
        self._inner.no_padding()
        self._dropout = getattr(self._inner.model, "dropout", None)
        if self._dropout is not None:
            self._inner.model.dropout = None
        self._check_added()

    def _check_added(self):
        """Refuses added tokens that have the same text after normalization, because the library picks one of them at
        random."""
        if self._inner.normalizer is None:
            return
        seen = {}
        for _, token in sorted(self._inner.get_added_tokens_decoder().items()):
            if token.normalized:
                text = self._inner.normalizer.normalize_str(token.content)
                if text in seen:
                    raise ValueError(
                        f"the added tokens {seen[text]!r} and {token.content!r} are equal after normalization"
                    )
                seen[text] = token.content

    def describe(self):
        """Returns the kind of the model, its dropout, the decoder, and id, text and kind of each added token."""
        decoder = self._inner.decoder
        added = self._inner.get_added_tokens_decoder()
        return {
            "model": type(self._inner.model).__name__,
            "dropout": self._dropout,
            "decoder": None if decoder is None else json.loads(decoder.__getstate__()),
            "added": [(i, token.content, token.special) for i, token in added.items()],
        }

    def encode(self, texts, special):
        """Returns the number of tokens of each text, then the ids of all texts, as unsigned 32-bit integers.

        Args:
            texts: the texts.
            special: whether the post-processor adds special tokens.
        """
        parts = [[]]
        for text in texts:
            (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=special)
            parts[0].append(len(encoding))
            parts.append(encoding.ids)
        return b"".join(struct.pack(f"{len(part)}I", *part) for part in parts)
