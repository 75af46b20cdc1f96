"""JSON schemas as regular expressions of the texts that a schema allows.

Properties are written in the order of the schema, and only properties that the schema names. A text of the expression
is therefore valid, but not every valid text has this form. A keyword that the expression cannot enforce is refused.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import InvalidConfig, shown
from jaxspec.grammar.numbers import NUMBER, write_integers
from jaxspec.grammar.strings import CHARACTER, FORMATS, STRING, escape, write_pattern

WHITESPACE = {"compact": "", "blank": " ?", "lines": r"(?: |\n {0,16})?"}
"""What may follow a comma or a colon. With "lines", it may also follow an opening and precede a closing bracket."""

ANY_DEPTH = 2
"""Levels of lists and objects in a value that a schema does not describe."""

MAX_PARTS = 20_000
"""The largest number of parts of a schema, repetitions by references included."""

MAX_LENGTH = 4_000_000
"""The largest number of characters of a regular expression."""

_ANNOTATIONS = {
    "$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default",
    "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator",
}  # fmt: skip
_UNSUPPORTED = {
    "not", "if", "then", "else", "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "additionalItems",
    "uniqueItems", "contains", "minContains", "maxContains", "multipleOf", "$dynamicRef", "$recursiveRef", "extends",
    "disallow", "divisibleBy",
}  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum"},
    "boolean": set(),
    "null": set(),
}
_PYTHON_TYPES = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array", float: "number"}


def write_schema(schema: Any, recursion: int = 0, whitespace: str = "blank") -> str:
    """Returns the regular expression of the JSON texts that a schema allows.

    Args:
        schema: the JSON schema, as `json.load` returns it.
        recursion: how often a reference may lead to itself.
        whitespace: "blank" allows a blank after each comma and colon, "compact" allows nothing, and "lines" also allows
            line breaks with up to 16 blanks.

    Raises:
        InvalidConfig: the schema is invalid, has a keyword that is not supported, or allows nothing; the message names
            the place.
    """
    if whitespace not in WHITESPACE:
        raise InvalidConfig(f"whitespace must be one of {', '.join(WHITESPACE)}, got {shown(whitespace)}")
    expression = _Writer(schema, recursion, whitespace).write(schema, "#", ())
    if expression is None:
        raise InvalidConfig("the JSON schema allows no text, at least not with this depth of recursion")
    if len(expression) > MAX_LENGTH:
        raise InvalidConfig(f"the JSON schema is too large: its expression has {len(expression):,} characters")
    return expression


class _Writer:
    """Writes the parts of one schema. A part that no text fits is None."""

    def __init__(self, root: Any, recursion: int, whitespace: str):
        self.root, self.recursion, self.parts = root, recursion, 0
        gap = WHITESPACE[whitespace]
        self.comma, self.colon, self.inside = f",{gap}", f":{gap}", gap if whitespace == "lines" else ""

    def write(self, schema: Any, path: str, stack: tuple[str, ...]) -> str | None:
        """Writes a part.

        Args:
            schema: the part.
            path: where it is, as a JSON pointer.
            stack: the references that led to it.
        """
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise InvalidConfig(f"the JSON schema is too large: it has more than {MAX_PARTS:,} parts at {path}")
        if isinstance(schema, bool):
            return self.any_value(ANY_DEPTH) if schema else None
        if not isinstance(schema, Mapping):
            raise InvalidConfig(f"the JSON schema must be an object at {path}, got {shown(schema)}")
        keywords = {key for key in schema if _is_keyword(key, path)}
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in keywords:
                return getattr(self, f"_{name.removeprefix('$')}")(
                    self.alone(schema, keywords, name, path), path, stack
                )
        types = self.types(schema, keywords, path)
        known = {"type", "enum", "const"}.union(*(_OF_TYPE[one] for one in types))
        for name in keywords - known:
            if _applies(name, types):
                raise _unsupported(name, path, f"for type {' or '.join(types)}" if name in _NAMES else "")
        if "enum" in keywords or "const" in keywords:
            return self.values(schema, types, path)
        if not types:
            return self.any_value(ANY_DEPTH)
        return _either(getattr(self, f"_{one}")(schema, path, stack) for one in types)

    def alone(self, schema: Mapping, keywords: set[str], name: str, path: str) -> Any:
        """Returns the value of a keyword that may not have others beside it."""
        others = keywords - {name, "type"} if name != "$ref" else keywords - {name}
        if others:
            raise _unsupported(min(others), path, f"beside {name!r}")
        return schema[name]

    def types(self, schema: Mapping, keywords: set[str], path: str) -> list[str]:
        """Returns the types of a part; without `type`, those that its keywords are for, or none for any value."""
        given = schema.get("type")
        if given is None:
            return [one for one, own in _OF_TYPE.items() if own & keywords and one != "number"]
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, Sequence) or not listed or not all(one in _OF_TYPE for one in listed):
            raise InvalidConfig(f"type at {path} must be one of {', '.join(_OF_TYPE)}, got {shown(given)}")
        return ["number"] if {*listed} == {"number", "integer"} else list(dict.fromkeys(listed))

    # Combinations.

    def _ref(self, reference: Any, path: str, stack: tuple[str, ...]) -> str | None:
        if stack.count(reference) > self.recursion:
            if self.recursion:
                return None
            raise InvalidConfig(
                f"the JSON schema refers to itself at {path} ({shown(reference)}); pass recursion=2 to allow two levels"
            )
        return self.write(self.resolve(reference, path), str(reference), (*stack, reference))

    def resolve(self, reference: Any, path: str) -> Any:
        """Returns the part that a reference names."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise InvalidConfig(f"$ref at {path} must be a place in the same schema, got {shown(reference)}")
        part = self.root
        for name in reference.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(part, Sequence) and not isinstance(part, str) and name.isdecimal() and int(name) < len(part):
                part = part[int(name)]
            elif isinstance(part, Mapping) and name in part:
                part = part[name]
            else:
                raise InvalidConfig(f"$ref at {path} names {shown(reference)}, which the JSON schema does not have")
        return part

    def _anyOf(self, parts: Any, path: str, stack: tuple[str, ...]) -> str | None:
        return _either(self.write(part, where, stack) for part, where in _listed(parts, f"{path}/anyOf"))

    def _oneOf(self, parts: Any, path: str, stack: tuple[str, ...]) -> str | None:
        listed = list(_listed(parts, f"{path}/oneOf"))
        for i, (part, where) in enumerate(listed):
            for other, _ in listed[:i]:
                if not self.differ(part, other, where):
                    raise InvalidConfig(
                        f"oneOf at {path}: its parts are not known to exclude one another, so a text may fit several "
                        "of them; use anyOf"
                    )
        return _either(self.write(part, where, stack) for part, where in listed)

    def differ(self, first: Any, second: Any, path: str) -> bool:
        """Returns whether no value can fit both parts: their types differ, or the values of a required property do."""
        for _ in range(8):
            first, second = (
                self.resolve(part["$ref"], path) if isinstance(part, Mapping) and "$ref" in part else part
                for part in (first, second)
            )
        if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
            return False
        if values := [_constants(part) for part in (first, second) if _constants(part)]:
            return len(values) == 2 and not {*map(_key, values[0])} & {*map(_key, values[1])}
        types = [
            {part["type"]} if isinstance(part.get("type"), str) else {*part.get("type", ())} for part in (first, second)
        ]
        if all(types) and not types[0] & types[1]:
            return not ("integer" in types[0] | types[1] and "number" in types[0] | types[1])
        if types != [{"object"}, {"object"}]:
            return False
        shared = {*first.get("required", ())} & {*second.get("required", ())}
        for name in shared:
            pair = [_constants(part.get("properties", {}).get(name)) for part in (first, second)]
            if all(pair) and not {*map(_key, pair[0])} & {*map(_key, pair[1])}:
                return True
        return False

    def _allOf(self, parts: Any, path: str, stack: tuple[str, ...]) -> str | None:
        listed = list(_listed(parts, f"{path}/allOf"))
        if len(listed) > 1:
            raise _unsupported("allOf", path, "with several parts")
        return self.write(*listed[0], stack)

    # Values.

    def values(self, schema: Mapping, types: list[str], path: str) -> str | None:
        """Writes the values of `enum` and `const`, of the types that the schema allows."""
        listed = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
            raise InvalidConfig(f"enum at {path} must be a list of values, got {shown(listed)}")
        if "const" in schema:
            listed = [value for value in listed if _key(value) == _key(schema["const"])]
        named = {name for name in schema if _is_keyword(name, path)}
        others = {name for name in named - {"type", "enum", "const"} if _applies(name, types)}
        if others:
            raise _unsupported(min(others), path, "beside enum or const")
        return _either(self.value(value) for value in listed if not types or _is_of(value, types))

    def value(self, value: Any) -> str:
        """Writes one value."""
        if isinstance(value, Mapping):
            members = (f"{escape(_text(str(key)))}{self.colon}{self.value(one)}" for key, one in value.items())
            return rf"\{{{self.inside}{self.comma.join(members)}{self.inside}\}}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return rf"\[{self.inside}{self.comma.join(map(self.value, value))}{self.inside}\]"
        return escape(_text(value))

    def any_value(self, depth: int) -> str:
        """Writes any value with at most `depth` levels of lists and objects."""
        scalars = f"{STRING}|{NUMBER}|true|false|null"
        if not depth:
            return f"(?:{scalars})"
        inner = self.any_value(depth - 1)
        return f"(?:{scalars}|{self.list_of(inner, 0, None)}|{self.map_of(inner)})"

    def list_of(self, item: str | None, least: int, most: int | None, first: Sequence[str] = ()) -> str | None:
        """Writes a list of `first`, and then of further items; `least` and `most` count all of them."""
        rest_least, rest_most = max(least - len(first), 0), None if most is None else most - len(first)
        if (rest_most is not None and rest_most < rest_least) or (item is None and rest_least > 0):
            return None
        empty = rf"\[{self.inside}\]"
        if item is None or rest_most == 0:
            return rf"\[{self.inside}{self.comma.join(first)}{self.inside}\]" if first else r"\[\]"
        if first:
            more = f"(?:{self.comma}{item}){{{rest_least},{'' if rest_most is None else rest_most}}}"
            return rf"\[{self.inside}{self.comma.join(first)}{more}{self.inside}\]"
        more = f"(?:{self.comma}{item}){{{max(rest_least - 1, 0)},{'' if rest_most is None else rest_most - 1}}}"
        some = rf"\[{self.inside}{item}{more}{self.inside}\]"
        return some if rest_least else f"(?:{empty}|{some})"

    def map_of(self, value: str | None) -> str:
        """Writes an object with any names."""
        if value is None:
            return r"\{\}"
        member = f"{STRING}{self.colon}{value}"
        return rf"(?:\{{\}}|\{{{self.inside}{member}(?:{self.comma}{member})*{self.inside}\}})"

    # Types.

    def _object(self, schema: Mapping, path: str, stack: tuple[str, ...]) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        other = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not isinstance(required, Sequence) or isinstance(required, str):
            raise InvalidConfig(f"properties at {path} must be an object, and required a list of names")
        if not properties and not required:
            return self.map_of(self.write(other, f"{path}/additionalProperties", stack))
        named = {**properties, **{name: other for name in required if name not in properties}}
        members = []
        for name, part in named.items():
            where = f"{path}/properties/{str(name).replace('~', '~0').replace('/', '~1')}"
            value = self.write(part, where, stack)
            if value is not None:
                members.append((f"{escape(_text(name))}{self.colon}{value}", name in required))
            elif name in required:
                return None
        return rf"\{{{self.inside}{self.members(members)}{self.inside}\}}" if members else r"\{\}"

    def members(self, members: list[tuple[str, bool]]) -> str:
        """Writes members of an object, each required or not, with commas between those that are present."""

        def tail(rest: list[tuple[str, bool]]) -> str:
            return "".join(f"(?:{self.comma}{text}){'' if needed else '?'}" for text, needed in rest)

        first = next((i for i, (_, needed) in enumerate(members) if needed), None)
        if first is None:
            starts = (text + tail(members[i + 1 :]) for i, (text, _) in enumerate(members))
            return f"(?:{'|'.join(starts)})?"
        before = "".join(f"(?:{text}{self.comma})?" for text, _ in members[:first])
        return before + members[first][0] + tail(members[first + 1 :])

    def _array(self, schema: Mapping, path: str, stack: tuple[str, ...]) -> str | None:
        least, most = _count(schema, "minItems", path, 0), _count(schema, "maxItems", path, None)
        first = []
        for part, where in _listed(schema.get("prefixItems", ()), f"{path}/prefixItems", empty=True):
            first.append(self.write(part, where, stack))
        if None in first or (first and (least or 0) < len(first)):
            least = max(least or 0, len(first))  # lists with fewer items are also valid, and are not written
            if None in first:
                return None
        first = first if most is None else first[:most]
        return self.list_of(self.write(schema.get("items", True), f"{path}/items", stack), least or 0, most, first)

    def _string(self, schema: Mapping, path: str, stack: tuple[str, ...]) -> str | None:
        given = [name for name in ("pattern", "format") if name in schema]
        sizes = [name for name in ("minLength", "maxLength") if name in schema]
        if len(given) + bool(sizes) > 1:
            raise _unsupported((given + sizes)[1], path, f"beside {given[0]!r}")
        if given == ["pattern"]:
            return write_pattern(schema["pattern"])
        if given == ["format"]:
            if schema["format"] not in FORMATS:
                raise InvalidConfig(
                    f"format {shown(schema['format'])} at {path} is not supported; supported: {', '.join(FORMATS)}"
                )
            return f'"{FORMATS[schema["format"]]}"'
        least, most = _count(schema, "minLength", path, 0), _count(schema, "maxLength", path, None)
        if most is not None and (least or 0) > most:
            return None
        return f'"{CHARACTER}{{{least},{"" if most is None else most}}}"' if sizes else STRING

    def _integer(self, schema: Mapping, path: str, stack: tuple[str, ...]) -> str | None:
        bounds: dict[str, Any] = {}
        for name in _OF_TYPE["integer"] & {*schema}:
            value = schema[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InvalidConfig(f"{name} at {path} must be a number, got {shown(value)}")
            bounds[name] = value
        least = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
        most = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
        least += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
        most += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
        return write_integers(max(least, default=None), min(most, default=None))

    def _number(self, schema: Mapping, path: str, stack: tuple[str, ...]) -> str | None:
        if "minimum" not in schema:
            return NUMBER
        if schema["minimum"] != 0:
            raise _unsupported("minimum", path, "of a number other than 0")
        return NUMBER.removeprefix("-?")

    def _boolean(self, schema: Mapping, path: str, stack: tuple[str, ...]) -> str | None:
        return "(?:true|false)"

    def _null(self, schema: Mapping, path: str, stack: tuple[str, ...]) -> str | None:
        return "null"


_NAMES = set().union(*_OF_TYPE.values())
_KEYWORDS = _NAMES | _UNSUPPORTED | {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}


def _is_keyword(name: Any, path: str) -> bool:
    """Returns whether a word is a keyword; words that JSON Schema does not know have no effect, as it says.

    Raises:
        InvalidConfig: the word seems to be a misspelt keyword.
    """
    if name in _KEYWORDS or name in _ANNOTATIONS or not str(name)[:1].isalpha():
        return name in _KEYWORDS
    words = {word.lower(): word for word in _KEYWORDS | _ANNOTATIONS}
    like = [words[word] for word in difflib.get_close_matches(str(name).lower(), words, 1, 0.85)]
    if like and like[0] in _KEYWORDS:
        raise InvalidConfig(
            f"the JSON schema has {shown(name)} at {path}, which is not a keyword; did you mean {like[0]!r}?"
        )
    return False


def _applies(name: str, types: Sequence[str]) -> bool:
    """Returns whether a keyword may say something about values of some types; no types are all types.

    A keyword for values of another type has no effect: `maxItems` says nothing about a string.
    """
    owners = {one for one, names in _OF_TYPE.items() if name in names}
    if owners & {"integer", "number"}:
        owners |= {"integer", "number"}
    return not types or not owners or bool(owners & {*types})


def _unsupported(name: str, path: str, where: str = "") -> InvalidConfig:
    place = f" {where}" if where else ""
    return InvalidConfig(
        f"the JSON schema has the keyword {name!r} at {path}, which is not supported{place}; remove it, or check the "
        "text afterwards"
    )


def _listed(parts: Any, path: str, empty: bool = False) -> list[tuple[Any, str]]:
    """Returns the parts of a list, and where they are."""
    if not isinstance(parts, Sequence) or isinstance(parts, str) or not (parts or empty):
        raise InvalidConfig(f"the JSON schema must have a list of schemas at {path}, got {shown(parts)}")
    return [(part, f"{path}/{i}") for i, part in enumerate(parts)]


def _either(parts: Any) -> str | None:
    """Writes alternatives; those that no text fits are left out."""
    found = list(dict.fromkeys(part for part in parts if part is not None))
    return f"(?:{'|'.join(found)})" if found else None


def _count(schema: Mapping, name: str, path: str, default: int | None) -> int | None:
    value = schema.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**20):
        raise InvalidConfig(f"{name} at {path} must be a whole number from 0 to {2**20 - 1}, got {shown(value)}")
    return value


def _text(value: Any) -> str:
    """Returns a value as JSON writes it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise InvalidConfig(f"the JSON schema has {shown(value)}, which is not a JSON value") from None


def _key(value: Any) -> str:
    """Returns a text that is the same for equal values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _constants(part: Any) -> list[Any]:
    """Returns the values that a part lists, or none."""
    if not isinstance(part, Mapping):
        return []
    return [part["const"]] if "const" in part else list(part.get("enum", ()))


def _is_of(value: Any, types: list[str]) -> bool:
    kind = "integer" if isinstance(value, int) and not isinstance(value, bool) else _PYTHON_TYPES.get(type(value))
    return kind in types or (kind == "integer" and "number" in types)
