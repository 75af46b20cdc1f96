"""Compares texts under processors with the logits processors of transformers, token by token, on SmolLM2.

    pip install 'jaxspec-decoding[oracle]'
    python -m scripts.prove.compare_processors [--record processors-transformers]

Twenty prompts are decoded by jaxspec with its default drafter, with each setting of each processor that transformers
also has; all settings but one share a batch. Transformers then reads each text with its own copy of the model, in
float32, and changes the logits after every token by its own `LogitsProcessor`: the token with the highest changed logit
must be the next token of the text. Where it is not, the gap of both changed logits is reported; the two copies of the
model round differently, so that a gap below 1e-3 is a tie. Exit status 1 if a gap is larger, or if a processor changes
no text.
"""

import argparse
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.checkpoints.presets import fetch_preset

TOKENS, TIE = 32, 1e-3
TOPICS = ("rain", "bread", "chess", "rivers", "music", "ants", "glass", "maps", "tea", "clocks")
PROMPTS = [
    question.format(topic) for question in ("Explain {}.", "Answer with one word: do you like {}?") for topic in TOPICS
]


def make_processors(model: jaxspec.Model) -> dict[str, Any]:
    """Returns the processor of each setting."""
    comma, full_stop, the, it_is = (model.encode(text, begins=False) for text in (",", ".", " the", " It is"))
    return {
        "repetition 1.1": jaxspec.RepetitionPenalty(1.1),
        "repetition 1.5": jaxspec.RepetitionPenalty(1.5),
        "repetition 0.8": jaxspec.RepetitionPenalty(0.8),
        "no repeated 2-grams": jaxspec.NoRepeatNgram(2),
        "no repeated 3-grams": jaxspec.NoRepeatNgram(3),
        "at least 32 new tokens": jaxspec.MinNewTokens(TOKENS),
        "suppressed tokens": jaxspec.SuppressTokens([*comma, *full_stop]),
        "allowed tokens": jaxspec.AllowedTokens([*range(20_000), *model.stop_ids]),
        "logit bias": jaxspec.LogitBias({comma[0]: -3.0, full_stop[0]: 2.0, the[0]: -1.0}),
        "bad words": jaxspec.BadWords([the, it_is, [*comma, *model.encode(" and", begins=False)]]),
    }


def by_row(settings: list[Any], repeated: int, vocab: int) -> list[Any]:
    """Returns processors for all rows: `repeated` rows for each setting, with the others off."""

    def spread(kind: type, name: str, off: Any) -> list[Any]:
        return [getattr(one, name) if type(one) is kind else off for one in settings for _ in range(repeated)]

    biases = np.zeros((len(settings), vocab), np.float32)
    for bias, one in zip(biases, settings):
        if isinstance(one, jaxspec.LogitBias):
            bias[list(one.bias)] = list(one.bias.values())
    return [
        jaxspec.LogitBias(np.repeat(biases, repeated, 0)),
        jaxspec.RepetitionPenalty(np.asarray(spread(jaxspec.RepetitionPenalty, "strength", 1.0))),
        jaxspec.NoRepeatNgram(np.asarray(spread(jaxspec.NoRepeatNgram, "size", 0))),
        jaxspec.MinNewTokens(np.asarray(spread(jaxspec.MinNewTokens, "number", 0))),
        jaxspec.SuppressTokens(spread(jaxspec.SuppressTokens, "tokens", None)),
        jaxspec.AllowedTokens(spread(jaxspec.AllowedTokens, "tokens", None)),
    ]


def theirs(one: Any, prompt: int, stops: list[int]) -> Any:
    """Returns the processor of transformers that does the same; `prompt` is the length of the prompt."""
    from transformers.generation import logits_process as made  # pyright: ignore[reportMissingImports]

    match one:
        case jaxspec.RepetitionPenalty():
            return made.RepetitionPenaltyLogitsProcessor(float(one.strength))
        case jaxspec.NoRepeatNgram():
            return made.NoRepeatNGramLogitsProcessor(int(one.size))
        case jaxspec.BadWords():
            return made.NoBadWordsLogitsProcessor(one.words, eos_token_id=stops)
        case jaxspec.MinNewTokens():
            return made.MinNewTokensLengthLogitsProcessor(prompt, int(one.number), stops)
        case jaxspec.SuppressTokens():
            return made.SuppressTokensLogitsProcessor(one.tokens)
        case jaxspec.AllowedTokens():
            return made.PrefixConstrainedLogitsProcessor(lambda batch, ids: one.tokens, 1)
        case jaxspec.LogitBias():
            return made.SequenceBiasLogitsProcessor([[[token], value] for token, value in one.bias.items()])
    raise ValueError(one)


def compare(network: Any, one: Any, rows: list[tuple[list[int], list[int]]], stops: list[int]) -> dict[str, Any]:
    """Compares the texts of a setting; `rows` are prompts and new tokens."""
    import torch  # pyright: ignore[reportMissingImports]

    equal = total = 0
    gaps = []
    for prompt, new in rows:
        ids = torch.tensor([prompt + new])
        with torch.no_grad():
            logits = network(ids).logits[0, len(prompt) - 1 : -1].float()
        processor = theirs(one, len(prompt), stops)
        for i, token in enumerate(new):
            changed = processor(ids[:, : len(prompt) + i], logits[i : i + 1].clone())[0]
            total, equal = total + 1, equal + int(changed.argmax() == token)
            if changed.argmax() != token:
                gaps.append(float(changed.max() - changed[token]))
    return {"tokens": total, "equal": equal, "gaps": [round_significant(gap) for gap in sorted(gaps, reverse=True)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    file = pathlib.Path(fetch_preset("smollm2-135m-instruct"))
    model, texts = jaxspec.load(file), PROMPTS[: arguments.prompts]
    stops = list(model.stop_ids)

    def decode(processors: list[Any], texts: list[str]) -> list[tuple[list[int], list[int]]]:
        output = jaxspec.generate(model, texts, key=jax.random.key(0), max_new_tokens=TOKENS, batch=20, verbose=False,
                                  sampling=jaxspec.Sampling(0.0, processors=processors))  # fmt: skip
        return [(list(map(int, row.prompt_tokens)), list(row.tokens)) for row in output]

    processors = make_processors(model)
    mixed = [name for name, one in processors.items() if not isinstance(one, jaxspec.BadWords)]
    rows = decode(by_row([processors[name] for name in mixed], len(texts), model.lm.vocab), texts * len(mixed))
    own = {name: rows[i * len(texts) :][: len(texts)] for i, name in enumerate(mixed)}
    own["bad words"] = decode([processors["bad words"]], texts)
    plain = decode([], texts)
    print("decoded", flush=True)

    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    network = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype="float32").eval()
    values = {}
    for setting, rows in own.items():
        values[setting] = compare(network, processors[setting], rows, stops)
        values[setting]["texts that the processor changed"] = sum(a != b for a, b in zip(plain, rows, strict=True))
        print(setting, json.dumps(values[setting]), flush=True)
    if arguments.record:
        versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
        print(write_record(arguments.record, "processors-transformers", sys.argv, values, versions))
    return int(
        any(
            max(one["gaps"], default=0.0) > TIE or not one["texts that the processor changed"]
            for one in values.values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
