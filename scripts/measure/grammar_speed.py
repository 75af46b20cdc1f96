"""Times JSON of SmolLM2: the default drafter with forced tokens beside plain decoding, under the same grammar.

    python -m scripts.measure.grammar_speed [--record grammar-speed]

Each prompt asks for JSON of a schema, in compact form. Both decode one prompt at a time, in turns, and must write the
same text. A ratio is the median over all prompts and repeats of two times that were measured one after the other; the
times do not include compilation and the prompt.
"""

import argparse
import sys
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, quartiles, write_record
from jaxspec.checkpoints.presets import fetch_preset
from jaxspec.kernels.library import describe_kernels

TOKENS = 160
STRING: dict[str, Any] = {"type": "string", "maxLength": 16}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 99_999}


def make_object(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object whose properties are all required."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS = {
    "a city": make_object(name=STRING, country=STRING, population=NUMBER, is_capital={"type": "boolean"},
                          continent={"enum": ["Africa", "Asia", "Europe", "America", "Oceania"]}),
    "an order of three articles": make_object(
        order_number=NUMBER, customer=make_object(first_name=STRING, last_name=STRING),
        articles={"type": "array", "minItems": 3, "maxItems": 3,
                  "items": make_object(description=STRING, quantity=NUMBER, unit_price=NUMBER)},
    ),
    "the weather of a day": make_object(date={"type": "string", "format": "date"}, temperature_celsius=NUMBER,
                                        wind_direction={"enum": ["north", "east", "south", "west"]},
                                        precipitation_millimetres=NUMBER, description=STRING),
    "a call of a search tool": make_object(
        tool_name={"const": "search_documents"},
        arguments=make_object(query=STRING, maximum_results=NUMBER, include_archived={"type": "boolean"},
                              sort_order={"enum": ["ascending", "descending"]}),
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafters", nargs="+", default=["prompt-lookup"])
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {describe_kernels()}")
    model = jaxspec.load(fetch_preset("smollm2-135m-instruct"), dtype=arguments.dtype)
    rows = []
    for name, schema in SCHEMAS.items():
        grammar = jaxspec.compile_grammar(model, schema, whitespace="compact")

        def decode(drafter: str, name: str = name, grammar: Any = grammar) -> Any:
            return jaxspec.generate(model, f"Describe {name} as JSON.", grammar=grammar, drafter=drafter,
                                    max_new_tokens=TOKENS, verbose=False)  # fmt: skip

        plain = decode("none")
        for drafter in arguments.drafters:
            drafted = decode(drafter)
            if drafted[0].tokens != plain[0].tokens:
                raise SystemExit(f"{drafter} writes another text than plain decoding: {drafted[0].text!r}")
            pairs = [
                (decode("none").timing.decode_s, decode(drafter).timing.decode_s) for _ in range(arguments.repeats)
            ]
            times = np.asarray(pairs)
            tokens = len(plain[0].tokens)
            rows.append({
                "text": name, "drafter": drafter, "tokens": tokens, "rounds": int(drafted.stats.rounds),
                "plain": quartiles(tokens / times[:, 0]), "drafted": quartiles(tokens / times[:, 1]),
                "ratio": quartiles(times[:, 0] / times[:, 1]),
            })  # fmt: skip
            print(rows[-1], plain[0].text, flush=True)
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'grammar-speed', sys.argv, {'rows': rows})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
