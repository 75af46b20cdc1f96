"""Text to token ids and back, for byte-level BPE and SentencePiece-style BPE vocabularies.

Encoding is the `tokenizers` library's. Decoding is ours: every token *is* a run of bytes, and a text is those
runs joined and read as UTF-8, with U+FFFD for what is no UTF-8. So streaming can be exact; see `stream.py`.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.errors import CheckpointError, InvalidConfig, TokenOutOfRange, VocabMismatch
from jaxspec.storage.reading import check_path, parse_object, read_json, read_text
from jaxspec.text.gguf_vocab import tokenizer_from_gguf

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A vocabulary with its rules.

    Attributes:
        inner: the `tokenizers.Tokenizer` that encodes.
        bos_id, eos_id: the tokens that begin and end a text, where the checkpoint names them.
        add_bos: whether a text begins with BOS; None leaves it to the post-processor of `inner`.
        strips_space: the space a text begins with is the encoder's own, and decoding takes it away.
    """

    def __init__(
        self,
        inner: "tokenizers.Tokenizer",
        bos_id: int | None = None,
        eos_id: int | None = None,
        add_bos: bool | None = None,
    ):
        self.inner, self.bos_id, self.eos_id, self.add_bos = inner, bos_id, eos_id, add_bos
        self._added = {i: (t.content, t.special) for i, t in inner.get_added_tokens_decoder().items()}
        self._byte_level, self.strips_space = _decoder_kind(inner)
        for name, token_id in (("bos", bos_id), ("eos", eos_id)):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise CheckpointError(f"tokenizer: {name} id {token_id} is not in 0..{self.vocab_size - 1}")

    @classmethod
    def from_json(cls, path: str | Path, vocab_size: int | None = None) -> "Tokenizer":
        """Reads a `tokenizer.json`; the `tokenizer_config.json` beside it names BOS and EOS.

        Args:
            path: of the file.
            vocab_size: of the model; see `_check_ids`.

        Raises:
            CheckpointError: the file cannot be read, or an id in it is out of range.
        """
        import tokenizers

        path = check_path(path, "the path of tokenizer.json")
        text = read_text(path)
        _check_ids(str(path), parse_object(text, str(path)), vocab_size, len(text))
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare `Exception`
            raise CheckpointError(f"{path}: not a tokenizer.json that can be read: {error}") from None
        inner.no_truncation()  # settings for training batches, which files in the wild still carry
        inner.no_padding()
        beside = path.parent / "tokenizer_config.json"
        config = read_json(beside) if beside.is_file() else {}
        names = [config.get("bos_token"), config.get("eos_token")]
        names = [n.get("content") if isinstance(n, dict) else n for n in names]
        bos, eos = (inner.token_to_id(n) if isinstance(n, str) else None for n in names)
        flag = config.get("add_bos_token")
        return cls(inner, bos, eos, flag if isinstance(flag, bool) else None)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Builds the tokenizer that the `tokenizer.*` keys of a GGUF file describe."""
        return cls(*tokenizer_from_gguf(metadata))

    @classmethod
    def from_source(cls, source: Any, vocab_size: int | None = None) -> "Tokenizer":
        """Reads whichever a checkpoint has, `source.json_path` or the metadata `source.gguf`, as `from_json` does."""
        if source.json_path is not None:
            return cls.from_json(source.json_path, vocab_size)
        if source.gguf is not None:
            return cls.from_gguf(source.gguf)
        raise CheckpointError("the checkpoint has no tokenizer: no tokenizer.json, no tokenizer.* metadata")

    def save(self, directory: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, from which `from_json` makes the same again."""
        (directory / "tokenizer.json").write_text(self.inner.to_str(), "utf-8")
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        config: dict[str, Any] = {key: self.inner.id_to_token(i) for key, i in named.items() if i is not None}
        if self.add_bos is not None:
            config["add_bos_token"] = self.add_bos
        (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`. With `special`, BOS is added where the model wants one and the text has none.

        Special tokens written out in the text (as chat templates do) become those tokens in either case.
        """
        if not isinstance(text, str):
            raise InvalidConfig(f"text to encode must be a str, got {type(text).__name__}")
        try:
            ids = self.inner.encode(text, add_special_tokens=special and self.add_bos is None).ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidConfig("text to encode has a lone surrogate, which is no character") from None
        except Exception as error:  # the library raises bare `Exception`
            raise CheckpointError(f"the tokenizer is broken, and cannot encode: {error}") from None
        if special and self.bos_id is not None:
            if self.add_bos and ids[:1] != [self.bos_id]:
                return [self.bos_id, *ids]
            if self.add_bos is None and ids[:2] == [self.bos_id, self.bos_id]:
                return ids[1:]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, control tokens are left out."""
        data = b"".join(self.pieces(ids, skip_special))
        return (data[1:] if self.strips_space and data[:1] == b" " else data).decode("utf-8", "replace")

    def pieces(self, ids: Iterable[int], skip_special: bool = True) -> list[bytes]:
        """The bytes of each token, empty for a special token that is skipped."""
        hidden = self.special_ids if skip_special else ()
        return [b"" if i in hidden else self.token_bytes(i) for i in map(int, ids)]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; a special token's are its name. Empty for an id that is unused."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenOutOfRange(f"token {token_id} is not in the vocabulary 0..{self.vocab_size - 1}")
        if token_id in self._added:
            return self._added[token_id][0].encode()
        token = self.inner.id_to_token(token_id) or ""
        if self._byte_level:
            known = [_BYTE_OF.get(c) for c in token]
            return token.encode() if None in known else bytes(known)  # type: ignore[arg-type]
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The control tokens, which decoding leaves out."""
        return frozenset(i for i, (_, special) in self._added.items() if special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def kind(self) -> str:
        """For people: how bytes are spelled, and the algorithm."""
        return f"{'byte-level' if self._byte_level else 'SentencePiece-style'} {type(self.inner.model).__name__}"

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name (`<|im_end|>`), or None."""
        return self.inner.token_to_id(token)


@lru_cache(maxsize=16)  # a comparison takes tenths of a second
def refuse_difference(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises VocabMismatch, naming the first differing id, unless the two stand for the same tokens by every id."""
    size = min(target.vocab_size, draft.vocab_size)
    same = target.inner.get_vocab(with_added_tokens=True) == draft.inner.get_vocab(with_added_tokens=True)
    if same and target.special_ids == draft.special_ids:
        return
    for i in range(size):
        ours, theirs = target.token_bytes(i), draft.token_bytes(i)
        if ours != theirs:
            raise VocabMismatch(f"token {i} is {ours!r} in the target's vocabulary and {theirs!r} in the draft's")
        if (i in target.special_ids) != (i in draft.special_ids):
            raise VocabMismatch(
                f"token {i}, {ours!r}, is a control token in one of target and draft, text in the other"
            )
    if target.vocab_size != draft.vocab_size:
        raise VocabMismatch(
            f"the target's vocabulary has {target.vocab_size} tokens, the draft's {draft.vocab_size}; "
            f"they differ from id {size} on, and must be the same"
        )


def _check_ids(where: str, content: Mapping[str, Any], vocab_size: int | None, size: int) -> None:
    """Refuses a tokenizer.json with an id out of range, before a table is made that reaches up to it.

    The ids of a model's vocabulary may have gaps. Beyond it published files have a few tokens that are never emitted,
    without gaps: so an id is below the size of the vocabulary, or below the number of tokens in the file. Of a file
    without a model it is below the number of the file's characters, `size`.

    Raises:
        CheckpointError: naming the token.
    """

    def part(of: Any, key: str, kind: type) -> Any:
        value = of.get(key) if isinstance(of, Mapping) else None
        return value if isinstance(value, kind) else kind()

    model = part(content, "model", dict)
    tokens = list(part(model, "vocab", dict).items())
    added = [token for token in part(content, "added_tokens", list) if isinstance(token, dict)]
    tokens += [(token.get("content"), token.get("id")) for token in added]
    count = len({name for name, _ in tokens if isinstance(name, str)}) + len(part(model, "vocab", list))
    processor = content.get("post_processor")
    for step in (processor, *part(processor, "processors", list)):
        for name, token in part(step, "special_tokens", dict).items():
            tokens += [(name, i) for i in part(token, "ids", list)]
    least = size if vocab_size is None else vocab_size
    end = max(least, count)
    wrong = next(((name, i) for name, i in tokens if type(i) is not int or not 0 <= i < end), None)
    if wrong is not None:
        known = "" if vocab_size is None else f": the model has {vocab_size} tokens, the file {count}"
        raise CheckpointError(
            f"{where}: token {wrong[0]!r:.40} has id {wrong[1]!r:.40}, expected 0 .. {end - 1}{known}"
        )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if visible, else the next one from U+0100."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(0x100 + n): b for n, b in enumerate(unseen)}


_BYTE_OF = _byte_alphabet()


def _decoder_kind(inner: "tokenizers.Tokenizer") -> tuple[bool, bool]:
    """(bytes are spelled GPT-2's way, a leading space is stripped), from the decoder's own description."""
    decoder = json.loads(inner.to_str()).get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    first = steps[0] if steps else {}
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds == ["Metaspace"] and first.get("replacement") == "▁":
        return False, first.get("prepend_scheme", "always") != "never"
    spaced = first.get("pattern") == {"String": "▁"} and first.get("content") == " "
    if spaced and kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        return False, kinds[3:] == ["Strip"]
    raise CheckpointError(f"tokenizer: decoder {kinds} is not read (byte-level and SentencePiece-style ones are)")
