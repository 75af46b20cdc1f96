"""Tokenizers, for byte-level BPE and SentencePiece-style BPE vocabularies.

The `tokenizers` library encodes in the confined process (see `jaxspec.confined`), because a file can make it use
unbounded time and memory. Decoding is implemented in this module: each token is a sequence of bytes, and the text is
their concatenation, decoded as UTF-8 with U+FFFD for invalid bytes. This makes streaming exact; see `incremental`.
"""

import array
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jaxspec.confined.process import CONFINED, Limits, RemoteError, RemoteObject
from jaxspec.errors import CheckpointError, InvalidConfig, TokenOutOfRange, shown
from jaxspec.storage.reading import check_path, parse_object, read_json_file, read_text_file
from jaxspec.text.gguf_vocab import convert_tokenizer

MAX_STEPS = 10_000
"""Maximum number of lists and objects in a part of a tokenizer.json other than the vocabulary."""
LOAD_SECONDS, LOAD_MEMORY = 2.0, 64 << 20  # for the smallest file
LOAD_SECONDS_PER_CHARACTER, LOAD_MEMORY_PER_CHARACTER = 1e-6, 48  # measured: 1e-7 seconds and 12 bytes
ENCODE_SECONDS, ENCODE_MEMORY = 2.0, 64 << 20  # for the shortest text
ENCODE_SECONDS_PER_BYTE, ENCODE_MEMORY_PER_BYTE = 1e-5, 1024  # measured: 1.5e-6 seconds and 250 bytes


class Tokenizer:
    """A tokenizer that maps text to token ids and back.

    Attributes:
        text: the text of its `tokenizer.json`.
        bos_id, eos_id: ids of the tokens that begin and end a text; None if the checkpoint does not name them.
        add_bos: whether a text begins with BOS; None leaves it to the file's post-processor.
        strips_space: whether the encoder prepends a space, which decoding removes.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        bos_id: int | None = None,
        eos_id: int | None = None,
        add_bos: bool | None = None,
        *,
        text: str | None = None,
        vocab_size: int | None = None,
    ):
        """Reads the content of a `tokenizer.json`.

        Args:
            content: the content of the file.
            bos_id, eos_id, add_bos: see the attributes.
            text: the text of the file, if there is one.
            vocab_size: vocabulary size of the model, if known; see `_check_ids`.

        Raises:
            CheckpointError: the content is malformed or takes too much time or memory, or an id in it is out of range.
        """
        self.text = json.dumps(content, ensure_ascii=False) if text is None else text
        self.bos_id, self.eos_id, self.add_bos = bos_id, eos_id, add_bos
        size = len(self.text)
        _check_steps(content)
        end = _check_ids(content, vocab_size, size)
        limits = Limits(
            LOAD_SECONDS + LOAD_SECONDS_PER_CHARACTER * size, LOAD_MEMORY + LOAD_MEMORY_PER_CHARACTER * size
        )
        try:
            self._encoder = RemoteObject("tokenizer", "tokenizer", (self.text,), limits)
            description = self._encoder.call("describe", limits=limits)
        except RemoteError as error:
            raise CheckpointError(f"not a valid tokenizer.json: {_reason(error)}") from None
        _check_description(description, end)
        if description["dropout"]:
            warnings.warn(
                "the tokenizer's file enables dropout, a setting for training that makes encoding random; "
                "dropout is turned off",
                stacklevel=4,
            )
        self._model: str = description["model"]
        self._names = _vocabulary(content)
        self._added = {i: (name, special) for i, name, special in description["added"]}
        self._byte_level, self.strips_space = _decoder_kind(description["decoder"])
        for name, token_id in (("bos", bos_id), ("eos", eos_id)):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise CheckpointError(f"tokenizer: {name} id {token_id} is not in 0..{self.vocab_size - 1}")

    @classmethod
    def from_json(cls, path: str | Path, vocab_size: int | None = None) -> "Tokenizer":
        """Reads a `tokenizer.json`, and BOS and EOS from the `tokenizer_config.json` in the same directory.

        Args:
            path: path of `tokenizer.json`.
            vocab_size: vocabulary size of the model, if known; see `_check_ids`.

        Raises:
            CheckpointError: the file cannot be read, needs too much time or memory, or contains an id out of range.
        """
        path = check_path(path, "the path of tokenizer.json")
        CONFINED.start()  # while this process parses the file
        text = read_text_file(path)
        content = parse_object(text, str(path))
        settings = path.parent / "tokenizer_config.json"
        config = read_json_file(settings) if settings.is_file() else {}
        flag = config.get("add_bos_token")
        try:
            tokenizer = cls(content, add_bos=flag if isinstance(flag, bool) else None, text=text, vocab_size=vocab_size)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        names = [config.get("bos_token"), config.get("eos_token")]
        names = [n.get("content") if isinstance(n, dict) else n for n in names]
        tokenizer.bos_id, tokenizer.eos_id = (tokenizer.id_of(n) if isinstance(n, str) else None for n in names)
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Builds the tokenizer described by the `tokenizer.*` metadata of a GGUF file."""
        CONFINED.start()
        return cls(*convert_tokenizer(metadata))

    @classmethod
    def from_source(cls, source: Any, vocab_size: int | None = None) -> "Tokenizer":
        """Reads a checkpoint's `TokenizerSource`: its `json_path` or its `gguf` metadata. See `from_json`."""
        if source.json_path is not None:
            return cls.from_json(source.json_path, vocab_size)
        if source.gguf is not None:
            return cls.from_gguf(source.gguf)
        raise CheckpointError(
            "the checkpoint has no tokenizer: it has neither a tokenizer.json nor tokenizer.* metadata"
        )

    def save(self, directory: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, from which `from_json` restores the tokenizer."""
        (directory / "tokenizer.json").write_text(self.text, "utf-8")
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        config: dict[str, Any] = {key: self._name(i) for key, i in named.items() if i is not None}
        if self.add_bos is not None:
            config["add_bos_token"] = self.add_bos
        (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")

    def encode(self, text: str, special: bool = True, begins: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Special tokens that are spelled out in the text, for example by chat templates, are always encoded as special
        tokens.

        Args:
            text: the text.
            special: whether to add BOS if the model expects it and the text does not begin with it.
            begins: whether this is the beginning of a text. A text that continues another text gets neither BOS nor a
                leading space from the tokenizer.

        Raises:
            InvalidConfig: the text is not a string, or contains a lone surrogate.
            CheckpointError: the tokenizer fails, or needs too much time or memory.
        """
        return self.encode_all([text], special, begins)[0]

    def encode_all(self, texts: Sequence[str], special: bool = True, begins: bool = True) -> list[list[int]]:
        """Returns the token ids of several texts, faster than one at a time; see `encode`."""
        for text in texts:
            if not isinstance(text, str):
                raise InvalidConfig(f"text to encode must be a str, got {type(text).__name__}")
        if begins or not self.strips_space:
            return self._encode(texts, special and begins)
        # A line break, whose tokens do not merge with others, puts the encoder in the middle of a text.
        head, *ids_of_texts = self._encode(["\n", *("\n" + text for text in texts)], False)
        merged = [i for i, ids in enumerate(ids_of_texts) if ids[: len(head)] != head]
        instead = dict(zip(merged, self._encode([texts[i].removeprefix(" ") for i in merged], False)))
        return [instead.get(i, ids[len(head) :]) for i, ids in enumerate(ids_of_texts)]

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Returns the ids of texts as the library encodes them, with BOS if `special`."""
        if not texts:
            return []
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError:
            raise InvalidConfig("text to encode contains a lone surrogate, which is not a character") from None
        limits = Limits(ENCODE_SECONDS + ENCODE_SECONDS_PER_BYTE * size, ENCODE_MEMORY + ENCODE_MEMORY_PER_BYTE * size)
        try:
            data = self._encoder.call("encode", list(map(str, texts)), special and self.add_bos is None, limits=limits)
        except RemoteError as error:
            raise CheckpointError(f"the tokenizer is damaged and cannot encode: {_reason(error)}") from None
        numbers = _numbers(data)
        counts = numbers[: len(texts)]
        if len(counts) != len(texts) or len(texts) + sum(counts) != len(numbers):
            raise CheckpointError(
                f"tokenizer: its process sent {len(numbers)} numbers, which are not the ids of these texts"
            )
        ids_of_texts, end = [], len(texts)
        for count in counts:
            ids = numbers[end : end + count]
            ids_of_texts.append(self._with_bos(ids) if special else ids)
            end += count
        return ids_of_texts

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Returns the ids of a text with BOS, once, if the model expects it."""
        if self.bos_id is not None:
            if self.add_bos and ids[:1] != [self.bos_id]:
                return [self.bos_id, *ids]
            if self.add_bos is None and ids[:2] == [self.bos_id, self.bos_id]:
                return ids[1:]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Returns the text of token ids; invalid UTF-8 becomes U+FFFD, and control tokens are skipped."""
        data = b"".join(self.pieces(ids, skip_special))
        return (data[1:] if self.strips_space and data[:1] == b" " else data).decode("utf-8", "replace")

    def pieces(self, ids: Iterable[int], skip_special: bool = True) -> list[bytes]:
        """Returns the bytes of each token; a skipped special token has no bytes."""
        hidden = self.special_ids if skip_special else ()
        return [b"" if i in hidden else self.token_bytes(i) for i in map(int, ids)]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token. The bytes of a special token are its name; an unused id has no bytes."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenOutOfRange(f"token {token_id} is not in the vocabulary 0..{self.vocab_size - 1}")
        if token_id in self._added:
            return self._added[token_id][0].encode()
        token = self._names.get(token_id, "")
        if self._byte_level:
            known = [_BYTE_OF.get(c) for c in token]
            return token.encode() if None in known else bytes(known)  # type: ignore[arg-type]
        return bytes.fromhex(token[3:5]) if _is_byte(token) else token.replace("▁", " ").encode()

    def is_plain(self, token_id: int) -> bool:
        """Returns whether a token was learned from text: it was not added later, and is not a byte in hexadecimal."""
        return token_id not in self._added and (self._byte_level or not _is_byte(self._names.get(token_id, "")))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens, which decoding skips."""
        return frozenset(i for i, (_, special) in self._added.items() if special)

    @property
    def added_ids(self) -> Set[int]:
        """Ids of the tokens that were added to the learned vocabulary, including the control tokens."""
        return self._added.keys()

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return max(max(self._names, default=-1), max(self._added, default=-1)) + 1

    @property
    def kind(self) -> str:
        """A description of the tokenizer: its representation of bytes, and its algorithm."""
        return f"{'byte-level' if self._byte_level else 'SentencePiece-style'} {self._model}"

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token by its name (`<|im_end|>`), or None."""
        return self._ids.get(token)

    @cached_property
    def _ids(self) -> dict[str, int]:
        """The id of each token by its name; added tokens come first."""
        return {name: i for i, name in self._names.items()} | {name: i for i, (name, _) in self._added.items()}

    def _name(self, token_id: int) -> str | None:
        return self._added[token_id][0] if token_id in self._added else self._names.get(token_id)


@lru_cache(maxsize=16)  # a comparison takes tenths of a second
def same_vocab(first: Tokenizer, second: Tokenizer) -> bool:
    """Returns whether two tokenizers have the same token for each id, and the same control tokens."""
    return first._ids == second._ids and first.special_ids == second.special_ids


def _check_steps(content: Mapping[str, Any]) -> None:
    """Rejects a tokenizer.json with very many normalizers, pre-tokenizers, post-processors or decoders.

    Raises:
        CheckpointError: there are more than `MAX_STEPS` lists and objects in one of them.
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = content.get(name)
        level, count = [part] if isinstance(part, (dict, list)) else [], 0
        while level:
            count += len(level)
            if count > MAX_STEPS:
                raise CheckpointError(f"{name} has more than {MAX_STEPS} parts; published tokenizers have about 20")
            inside = (node.values() if isinstance(node, dict) else node for node in level)
            level = [child for children in inside for child in children if isinstance(child, (dict, list))]


def _check_ids(content: Mapping[str, Any], vocab_size: int | None, size: int) -> int:
    """Rejects a tokenizer.json with an id out of range, before a table of that size is allocated.

    The ids of a model's vocabulary can have gaps. Published files have a few additional tokens, without gaps, which are
    never emitted. Therefore an id must be below the vocabulary size or below the number of tokens in the file; without
    a model, it must be below `size`, the number of characters in the file.

    Returns:
        The end of the range.

    Raises:
        CheckpointError: an id is out of range; the message names the token.
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
        raise CheckpointError(f"token {wrong[0]!r:.40} has id {wrong[1]!r:.40}, expected 0 .. {end - 1}{known}")
    return end


def _check_description(description: Any, end: int) -> None:
    """Checks the confined process's description of a tokenizer, because the process may be under the control of a
    hostile file.

    Args:
        description: its answer, see `describe` in `workers/text_tokenizers.py`.
        end: end of the range of ids. Added tokens whose ids the library chooses come after it.

    Raises:
        CheckpointError: the description is malformed, or an id is out of range.
    """
    description = description if isinstance(description, dict) else {}
    decoder, added = description.get("decoder", 0), description.get("added")
    steps = decoder.get("decoders", []) if isinstance(decoder, dict) else []
    good = (
        isinstance(description.get("model"), str)
        and "dropout" in description
        and (decoder is None or isinstance(decoder, dict))
        and isinstance(steps, list)
        and all(isinstance(step, dict) for step in steps)
        and isinstance(added, list)
        and all(isinstance(token, list) and [type(part) for part in token] == [int, str, bool] for token in added)
        and all(0 <= token[0] < end + len(added) for token in added)
    )
    if not good:
        raise CheckpointError(
            f"tokenizer: its process answered {shown(description)}, expected a description of the file"
        )


def _numbers(data: Any) -> list[int]:
    """Returns the numbers of an answer of the confined process.

    Raises:
        CheckpointError: the answer is not a sequence of 32-bit integers.
    """
    if not isinstance(data, bytes) or len(data) % 4:
        raise CheckpointError(f"tokenizer: its process answered {shown(data)}, expected token ids")
    return array.array("I", data).tolist()


def _is_byte(token: str) -> bool:
    """Returns whether a token of a SentencePiece vocabulary is the name of a byte, such as `<0x0A>`."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's map from printable characters to bytes: visible bytes are unchanged, others start at U+0100."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(0x100 + n): b for n, b in enumerate(unseen)}


_BYTE_OF = _byte_alphabet()


def _vocabulary(content: Mapping[str, Any]) -> dict[int, str]:
    """Returns the name of each token of a valid tokenizer.json, without the added tokens."""
    vocab = content["model"]["vocab"]
    return {i: name for name, i in vocab.items()} if isinstance(vocab, dict) else {i: t[0] for i, t in enumerate(vocab)}


def _reason(error: RemoteError) -> str:
    """Returns the message of the library; for a bug of the library (a panic in Rust), says that the library fails."""
    return f"the tokenizers library fails: {error.text}" if error.kind == "PanicException" else error.text


def _decoder_kind(decoder: Mapping[str, Any] | None) -> tuple[bool, bool]:
    """Returns whether the tokenizer is byte-level, and whether its decoder strips a leading space."""
    decoder = decoder or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    first = steps[0] if steps else {}
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds == ["Metaspace"] and first.get("replacement") == "▁":
        return False, first.get("prepend_scheme", "always") != "never"
    spaced = first.get("pattern") == {"String": "▁"} and first.get("content") == " "
    if spaced and kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        return False, kinds[3:] == ["Strip"]
    raise CheckpointError(f"tokenizer: decoder {kinds} is not supported, expected a byte-level or SentencePiece one")
