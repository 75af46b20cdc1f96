"""Random JSON schemas, with keywords that grammars support."""

from typing import Any

import numpy as np

TEXTS = ["alpha", "beta", 'a "quote"', "back\\slash", "é 😀", "x.y*z", "", "line\nbreak"]


def random_schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """Returns a schema with at most `depth` levels of objects and lists."""
    makers = [_string, _integer, _number, _constant, _literal]
    if depth:
        makers += [_object, _object, _object, _array, _union]
    return makers[rng.integers(len(makers))](rng, depth)


def random_document_schema(rng: np.random.Generator) -> dict[str, Any]:
    """Returns the schema of an object, some parts of which are references."""
    schema = _object(rng, 2)
    if "properties" in schema and rng.random() < 0.4:
        schema["$defs"] = {"part": random_schema(rng, 1)}
        schema["properties"]["first"] = {"$ref": "#/$defs/part", "description": "a reference"}
        schema["properties"]["second"] = {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
        schema["required"] = [*schema["required"], "first"]
    return schema


def _pick(rng: np.random.Generator, values: list[Any]) -> Any:
    return values[rng.integers(len(values))]


def _string(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    extra: list[dict[str, Any]] = [
        {}, {}, {"maxLength": int(rng.integers(0, 12))}, {"minLength": 1, "maxLength": 5},
        {"pattern": "^[a-z]{2,4}$"}, {"pattern": r"^\d{3}-\d{4}$"}, {"pattern": "b+"}, {"pattern": r'^(a|"|\\)[^b]?$'},
        {"format": _pick(rng, ["date", "time", "date-time", "uuid", "ipv4", "email"])},
    ]  # fmt: skip
    return {"type": "string"} | _pick(rng, extra)


def _integer(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    low = int(rng.integers(-1200, 1200))
    extra = [
        {}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + int(rng.integers(0, 3000))},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + int(rng.integers(2, 300))},
    ]  # fmt: skip
    return {"type": "integer"} | _pick(rng, extra)


def _number(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"type": "number"} | _pick(rng, [{}, {"minimum": 0}])


def _constant(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    values = [*TEXTS, 7, -1, 2.5, True, None, {"a": [1, "b"]}, []]
    return {"enum": [values[i] for i in rng.permutation(len(values))[: rng.integers(1, 5)]]}


def _literal(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"type": _pick(rng, ["boolean", "null", ["string", "null"], ["integer", "boolean"]])}


def _object(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    if rng.random() < 0.1:
        return {"type": "object", "additionalProperties": random_schema(rng, 0)}
    names = [f"{_pick(rng, ['name', 'size', 'k~/', 'ünit'])}{i}" for i in range(rng.integers(1, 5))]
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    extra: list[dict[str, Any]] = [
        {}, {"minItems": 1}, {"maxItems": 3}, {"minItems": 2, "maxItems": 3}, {"prefixItems": [{"type": "null"}]},
    ]  # fmt: skip
    return {"type": "array", "items": random_schema(rng, depth - 1)} | _pick(rng, extra)


def _union(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    kinds = [
        {"type": "object", "properties": {"kind": {"const": kind}, "v": random_schema(rng, 0)}, "required": ["kind"]}
        for kind in ("a", "b")
    ]
    return {"oneOf": [*kinds, {"type": "null"}]}
