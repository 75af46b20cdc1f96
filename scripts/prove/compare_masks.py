"""Compares the tokens that grammars allow with those of llguidance, state by state, over SmolLM2's vocabulary.

    pip install llguidance
    python -m scripts.prove.compare_masks [--schemas FOLDER] [--public 200] [--record masks]

Every schema is compared twice, along texts of random tokens. First llguidance reads the regular expression that jaxspec
makes of the schema: the allowed tokens must be the same in every state, and so must the states in which a text may end.
Then llguidance reads the schema: both allow some spellings of the same values that the other does not, so the states
in which they agree are counted. The schemas are 200 random ones; with FOLDER, also some schemas of a public set such as
JSONSchemaBench (every file `*.json` below it is a schema), of which it is counted which are refused, and why. Exit
status 1 if the masks of an expression differ, or if a finished text is not valid.
"""

import argparse
import collections
import importlib.metadata
import json
import pathlib
import re
import sys
from typing import Any

import jsonschema.validators
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, write_record
from jaxspec.checkpoints.presets import fetch_preset
from jaxspec.core.automaton import TokenAutomaton, read_vocabulary
from jaxspec.errors import InvalidConfig
from jaxspec.grammar.compilation import token_pieces
from jaxspec.grammar.expressions import compile_expression
from jaxspec.grammar.schema import write_schema
from jaxspec.text.tokenizer import Tokenizer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.schemas import random_document_schema

RANDOM, STEPS, WALKS = 200, 60, 2
SEPARATORS = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
WHERE = re.compile(r" at #\S*|\(.*?\)|'#\S*'")
SIZE = re.compile(r"[0-9][0-9,]* (states|characters)")


class Peer:
    """llguidance, for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes | None], stop: int):
        import llguidance  # pyright: ignore[reportMissingImports]

        class Vocabulary:
            eos_token_id, bos_token_id = stop, None
            special_token_ids = [token for token, piece in enumerate(pieces) if piece is None]  # noqa: RUF012
            tokens = [b"<|%d|>" % token if piece is None else piece for token, piece in enumerate(pieces)]  # noqa: RUF012

            def __call__(self, text: str) -> list[int]:
                return tokenizer.encode(text, False, False)

        self.made, self.stop, self.size = llguidance, stop, len(pieces)
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()), n_vocab=len(pieces))
        self.special = np.asarray(Vocabulary.special_token_ids)

    def start(self, expression: str | None, schema: Any = None) -> Any:
        """Returns a matcher of an expression, or of a schema; raises ValueError if it is refused."""
        kind = self.made.LLMatcher
        if expression is not None:
            grammar = kind.grammar_from_regex(expression)
        else:
            grammar = kind.grammar_from_json_schema(json.dumps(schema), overrides=SEPARATORS)
        limits = self.made.LLParserLimits(initial_lexer_fuel=10**9, step_lexer_fuel=10**8, max_lexer_states=10**7)
        matcher = kind(self.tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def allowed(self, matcher: Any, own: np.ndarray) -> tuple[np.ndarray, bool]:
        """Returns whether each token may follow, and whether the text may end, given the tokens that jaxspec allows."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self.size].astype(bool)
        mask[self.special] = False
        # Where the next bytes are forced, the mask has only the token that the tokenizer would write; others are tried.
        for token in np.flatnonzero(own & ~mask):
            mask[token] = matcher.validate_tokens([int(token)]) == 1
        return mask, bool(matcher.is_accepting())


def walk(
    automaton: TokenAutomaton, peer: Peer, matcher: Any, rng: np.random.Generator
) -> tuple[list[tuple[int, int, int]], list[int] | None]:
    """Returns what differs in every state of a random text: tokens that jaxspec alone allows, tokens that the peer
    alone allows, and whether they disagree on the end; and the text, if it is complete.

    Half of the tokens are drawn from all allowed ones, and half from those that lead most quickly to an end.
    """
    left = distances(automaton)
    state, text, rows = 0, [], []
    for _ in range(STEPS):
        own = automaton.allowed(state)
        other, ends = peer.allowed(matcher, own)
        rows.append((int((own & ~other).sum()), int((other & ~own).sum()), int(ends != bool(automaton.final[state]))))
        if automaton.final[state] and (rng.random() < 0.3 or not own.any()):
            return rows, text
        common = np.flatnonzero(own & other)
        if not len(common):
            return rows, None
        if rng.random() < 0.5:
            after = left[automaton.next[state, automaton.classes[common]]]
            common = common[after == after.min()]
        text.append(int(rng.choice(common)))
        state = int(automaton.next[state, automaton.classes[text[-1]]])
        if not matcher.consume_token(text[-1]):
            raise SystemExit(f"llguidance refuses a token that it allows: {matcher.get_error()}")
    return rows, None


def distances(automaton: TokenAutomaton) -> np.ndarray:
    """Returns the smallest number of tokens from each state to the end of a text."""
    left = np.where(automaton.final, 0, 10**6)
    while True:
        after = np.where(automaton.next >= 0, left[automaton.next], 10**6).min(1) + 1
        if (after >= left).all():
            return left
        left = np.minimum(left, after)


def compare(schemas: list[Any], peer: Peer, pieces: list[bytes | None]) -> dict[str, Any]:
    """Compares grammars of schemas; returns counts."""
    counts: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    for number, schema in enumerate(schemas):
        if number % 20 == 0:
            print(f"{number} of {len(schemas)}: {dict(counts)}", flush=True)
        try:
            expression = write_schema(schema, whitespace="compact")
            automaton = read_vocabulary(compile_expression(expression), pieces)
        except InvalidConfig as error:
            reason = SIZE.sub(r"too many \1", WHERE.sub("", str(error).split("; ")[0].split(", got")[0])).strip()
            refused[reason] += 1
            continue
        counts["schemas"] += 1
        for kind, asked in (("expression", (expression,)), ("schema", (None, schema))):
            try:
                matcher = peer.start(*asked)
            except ValueError as error:
                counts[f"{kind}: refused by llguidance"] += 1
                print(f"llguidance refuses {kind} {number}: {str(error)[:200]}")
                continue
            rng = np.random.default_rng(number)
            for _ in range(WALKS):
                matcher.reset()
                rows, text = walk(automaton, peer, matcher, rng)
                counts[f"{kind}: states"] += len(rows)
                counts[f"{kind}: equal states"] += sum(row == (0, 0, 0) for row in rows)
                counts[f"{kind}: states in which jaxspec alone allows a token"] += sum(row[0] > 0 for row in rows)
                counts[f"{kind}: states in which llguidance alone allows a token"] += sum(row[1] > 0 for row in rows)
                if text is not None:
                    counts[f"{kind}: finished texts"] += 1
                    counts[f"{kind}: valid texts"] += valid(schema, b"".join(pieces[t] or b"" for t in text))
    return {"given": len(schemas), **counts, "refused": dict(refused.most_common())}


def valid(schema: Any, text: bytes) -> bool:
    """Returns whether a text is JSON of a schema, formats included."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text))


def read_public(folder: pathlib.Path, count: int) -> list[Any]:
    """Returns a sample of the schemas below a folder, the same in every run."""
    files = sorted(path for path in folder.rglob("*.json") if path.is_file())
    chosen = np.random.default_rng(0).permutation(len(files))[:count]
    schemas = (json.loads(files[i].read_text()) for i in sorted(chosen))
    return [entry.get("schema", entry) if isinstance(entry, dict) and "tests" in entry else entry for entry in schemas]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--public", type=int, default=200, help="the number of schemas of FOLDER")
    parser.add_argument("--random", type=int, default=RANDOM, help="the number of random schemas")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    model = jaxspec.load(fetch_preset("smollm2-135m-instruct"))
    assert model.tokenizer is not None
    pieces = token_pieces(model.tokenizer)
    peer = Peer(model.tokenizer, pieces, model.stop_ids[0])
    sets = {"random": [random_document_schema(np.random.default_rng(seed)) for seed in range(arguments.random)]}
    if arguments.schemas:
        sets["public"] = read_public(arguments.schemas, arguments.public)
    values = {name: compare(schemas, peer, pieces) for name, schemas in sets.items()}
    print(json.dumps(values, indent=2))
    if arguments.record:
        versions = {name: importlib.metadata.version(name) for name in ("llguidance", "outlines-core", "jsonschema")}
        print(f"written: {write_record(arguments.record, 'masks', sys.argv, values, versions)}")
    wrong = (
        found.get("expression: states") != found.get("expression: equal states")
        or any(
            found.get(f"{kind}: finished texts") != found.get(f"{kind}: valid texts")
            for kind in ("expression", "schema")
        )
        for found in values.values()
    )
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
