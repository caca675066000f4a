"""JSON Schema (draft 2020-12) → grammars of JSON texts that fit.

The texts are a part of those that fit: the declared properties in their order, others only where
the schema declares none, no white space but one space after `:` and `,`. A keyword that constrains
and is not supported is refused by name; annotations are passed over.
Source: https://json-schema.org/draft/2020-12/json-schema-validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.grammar.characters import LAST, Span, character, without
from sabia.core.grammar.json_numbers import MOST_OPEN, integers, reals
from sabia.core.grammar.nodes import (
    EMPTY,
    Node,
    Ref,
    Repeat,
    alt,
    byte_set,
    literal,
    optional,
    seq,
)  # fmt: skip
from sabia.core.grammar.regular import matching, regular

Schema = Mapping[str, Any]
ANNOTATIONS = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly", "strict", "discriminator",
})  # fmt: skip
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": BOUNDS, "number": BOUNDS, "boolean": (), "null": (),
}  # fmt: skip
DAY = (
    r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|02-(0[1-9]|1\d|2[0-8]))"
)
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
FORMATS: Mapping[str, str] = {
    "date": r"[12]\d{3}-" + DAY, "time": TIME, "date-time": r"[12]\d{3}-" + DAY + "T" + TIME,
    "duration": r"P(\d{1,4}D(T\d{1,4}H)?|T\d{1,4}[HMS]|\d{1,4}[WMY])",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "ipv6": r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "hostname": rf"{LABEL}(\.{LABEL}){{0,4}}",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@{LABEL}(\.{LABEL}){{1,4}}",
    "uri": rf"https?://{LABEL}(\.{LABEL}){{0,4}}(/[A-Za-z0-9._~-]{{0,40}}){{0,8}}",
}  # fmt: skip
LITERAL: Sequence[Span] = ((0x20, 0x21), (0x23, 0x5B), (0x5D, LAST))  # written as they are
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}  # written with `\\`
MOST_LENGTH = 100_000  # of strings and arrays


def json_schema(schema: object) -> Node:
    """The JSON texts of values that fit a schema, as far as described above.

    Raises UsageError for a schema that is invalid or has what is not supported.
    """
    if not isinstance(schema, dict | bool):
        raise UsageError("JSON schema: expected an object")
    try:
        return _Translation(schema if isinstance(schema, dict) else {}).value(schema, "")
    except RecursionError:
        raise UsageError("JSON schema: nested too deeply") from None
    except UnicodeEncodeError:
        raise UsageError("JSON schema: a text has an unpaired surrogate") from None


def quoted(spans: tuple[Span, ...]) -> Node:
    """One character of the spans as JSON writes it within a string: as it is where it can be."""
    plain = [(max(low, a), min(high, b)) for low, high in spans for a, b in LITERAL
             if max(low, a) <= min(high, b)]  # fmt: skip
    escaped = [code for low, high in without(spans, LITERAL) for code in range(low, high + 1)]
    branches = [character(tuple(plain))] if plain else []
    short = sum(1 << ord(SHORT[code]) for code in escaped if code in SHORT)
    if short:
        branches.append(seq(literal("\\"), byte_set(short)))
    branches += [literal(f"\\u{code:04x}") for code in escaped if code not in SHORT]
    return alt(*branches)


def _hex(low: int, high: int) -> Node:
    """A hexadecimal digit of a range."""
    digits = [f"{value:x}" for value in range(low, high + 1)]
    return byte_set(sum(1 << ord(d) for d in {*digits, *(d.upper() for d in digits)}))


def _any_character() -> Node:
    """A character of a string in any of the ways of JSON."""
    digit = _hex(0, 15)
    low, high = _hex(13, 13), _hex(0, 7)
    not_surrogate = alt(
        seq(alt(_hex(0, 12), _hex(14, 15)), digit, digit, digit), seq(low, high, digit, digit)
    )
    pair = seq(low, _hex(8, 11), digit, digit, literal("\\u"), low, _hex(12, 15), digit, digit)
    short = byte_set(sum(1 << ord(letter) for letter in 'bfnrt"\\/'))
    unicode = seq(literal("u"), alt(not_surrogate, pair))
    return alt(character(tuple(LITERAL)), seq(literal("\\"), alt(short, unicode)))


ANY_CHARACTER = _any_character()
QUOTE, COMMA, COLON = literal('"'), seq(literal(","), optional(literal(" "))), seq(
    literal(":"), optional(literal(" "))
)  # fmt: skip
STRING = seq(QUOTE, Repeat(ANY_CHARACTER), QUOTE)
NUMBER = reals(None, None)


class _Translation:
    """The schemas within one, by their place (a JSON pointer), → nodes."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._refs: dict[str, Ref] = {}

    def value(self, schema: object, at: str) -> Node:
        """The texts of values that fit a schema."""
        if schema is False:
            return alt_of([])
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _refused(at, "expected an object")
        keys = set(schema) - ANNOTATIONS
        for name, make in (("$ref", self._ref), ("enum", self._enum), ("const", self._const),
                           ("anyOf", self._any_of), ("oneOf", self._one_of),
                           ("allOf", self._all_of)):  # fmt: skip
            if name in keys:
                besides = keys - {name, "type"}
                if besides:
                    raise _refused(at, f"{sorted(besides)[0]} beside {name} is not supported")
                return make(schema, f"{at}/{name}")
        types = self._types(schema, keys, at)
        if not types:
            return self._anything()
        known = {key for kind in types for key in KEYWORDS[kind]} | {"type"}
        if keys - known:
            name = sorted(keys - known)[0]
            raise _refused(at, f"{name} is not supported (of type {', '.join(types)})")
        return alt_of([self._of_type(kind, schema, at) for kind in types])

    def _types(self, schema: Schema, keys: set[str], at: str) -> Sequence[str]:
        """The types of a schema: its own, or those that its keywords are about."""
        types = schema.get("type")
        if types is None:
            kinds = [kind for kind in KEYWORDS if keys & set(KEYWORDS[kind]) and kind != "integer"]
            if keys and not kinds:
                raise _refused(at, f"{sorted(keys)[0]} is not supported")
            return kinds
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not all(kind in KEYWORDS for kind in types):
            raise _refused(at, f"type {json.dumps(types)} (expected {', '.join(KEYWORDS)})")
        return [kind for kind in types if kind != "integer" or "number" not in types]

    def _of_type(self, kind: str, schema: Schema, at: str) -> Node:
        makers = {"object": self._object, "array": self._array, "string": self._string}
        if kind in makers:
            return makers[kind](schema, at)
        if kind in ("integer", "number"):
            return self._number(kind, schema, at)
        return literal("null") if kind == "null" else alt(literal("true"), literal("false"))

    def _anything(self) -> Node:
        """Any JSON value."""
        if "" not in self._refs:
            self._refs[""] = ref = Ref()
            members = _listed(seq(STRING, COLON, ref), 0, None)
            ref.target = alt(
                seq(literal("{"), members, literal("}")),
                seq(literal("["), _listed(ref, 0, None), literal("]")), STRING, NUMBER or EMPTY,
                literal("true"), literal("false"), literal("null"),
            )  # fmt: skip
        return self._refs[""]

    def _ref(self, schema: Schema, at: str) -> Node:
        pointer = schema["$ref"]
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise _refused(at, f"{json.dumps(pointer)} (expected #/... of this schema)")
        if pointer not in self._refs:
            ref = self._refs[pointer] = Ref()
            ref.target = self.value(self._at(pointer, at), pointer[1:])
        return self._refs[pointer]

    def _at(self, pointer: str, at: str) -> object:
        """The schema that a pointer names."""
        value: object = self._root
        for name in pointer[1:].split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise _refused(at, f"{pointer} is missing")
        return value

    def _enum(self, schema: Schema, at: str) -> Node:
        values = schema["enum"]
        if not isinstance(values, list) or not values:
            raise _refused(at, "expected a list of values")
        if types := schema.get("type"):
            wanted = [types] if isinstance(types, str) else types
            values = [value for value in values if _fits(value, wanted)]
        return alt_of([literal(_compact(value)) for value in values])

    def _const(self, schema: Schema, at: str) -> Node:
        return self._enum({**schema, "enum": [schema["const"]]}, at)

    def _any_of(self, schema: Schema, at: str) -> Node:
        return alt_of(self._alternatives(schema, "anyOf", at))

    def _one_of(self, schema: Schema, at: str) -> Node:
        nodes = self._alternatives(schema, "oneOf", at)
        marks = [self._marks(one, at) for one in schema["oneOf"]]
        for number, mark in enumerate(marks):
            if any(not _disjoint(mark, other) for other in marks[:number]):
                raise _refused(
                    at, "two of its schemas may fit the same value; give them different types or "
                    "constants, or use anyOf",
                )  # fmt: skip
        return alt_of(nodes)

    def _all_of(self, schema: Schema, at: str) -> Node:
        nodes = self._alternatives(schema, "allOf", at)
        if len(nodes) > 1:
            raise _refused(at, "more than one schema is not supported")
        return nodes[0]

    def _alternatives(self, schema: Schema, name: str, at: str) -> list[Node]:
        if "type" in schema:
            raise _refused(at, f"type beside {name} is not supported")
        schemas = schema[name]
        if not isinstance(schemas, list) or not schemas:
            raise _refused(at, "expected a list of schemas")
        return [self.value(one, f"{at}/{number}") for number, one in enumerate(schemas)]

    def _marks(self, schema: object, at: str) -> dict[str, frozenset[str]]:
        """What the values of a schema have in common: their types, and by required property its
        constants."""
        seen = set[str]()
        while isinstance(schema, dict) and schema.get("$ref", "") not in ("", *seen):
            seen.add(schema["$ref"])
            schema = self._at(schema["$ref"], at)
        if not isinstance(schema, dict):
            return {}
        if (values := _constants(schema)) is not None:
            return {"": frozenset(_kind(json.loads(value)) for value in values), "=": values}
        keys = set(schema) - ANNOTATIONS
        kinds = self._types(schema, keys, at) if not keys & {"anyOf", "oneOf", "allOf"} else ()
        marks = {"": frozenset("number" if kind == "integer" else kind for kind in kinds)}
        for name in schema.get("required", ()):
            inner = schema.get("properties", {}).get(name)
            if isinstance(inner, dict) and (values := _constants(inner)) is not None:
                marks[f"/{name}"] = values
        return {name: kept for name, kept in marks.items() if kept}

    def _object(self, schema: Schema, at: str) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        more = schema.get("additionalProperties", True)
        if not isinstance(properties, dict):
            raise _refused(f"{at}/properties", "expected an object")
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise _refused(f"{at}/required", "expected a list of names")
        below = f"{at}/additionalProperties"
        if not properties and not required:
            members = EMPTY
            if more is not False:
                members = _listed(seq(STRING, COLON, self.value(more, below)), 0, None)
            return seq(literal("{"), members, literal("}"))
        declared = {**properties, **{n: more for n in required if n not in properties}}
        first = then = EMPTY  # the members from here on, at the beginning and after others
        for name, inner in reversed(declared.items()):
            if inner is False and name not in required:
                continue
            where = f"{at}/properties/{name}" if name in properties else below
            member = seq(literal(_compact(name)), COLON, self.value(inner, where))
            present, following = seq(member, then), seq(COMMA, member, then)
            if name in required:
                first, then = present, following
            else:
                first, then = alt(present, first), alt(following, then)
        return seq(literal("{"), first, literal("}"))

    def _array(self, schema: Schema, at: str) -> Node:
        least, most = _count(schema, "minItems", 0, at), _count(schema, "maxItems", None, at)
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(prefix, list):
            raise _refused(f"{at}/prefixItems", "expected a list of schemas")
        most = len(prefix) if items is False and (most is None or most > len(prefix)) else most
        least = least or 0
        if most is not None and most < least:
            return alt_of([])
        fixed = [self.value(one, f"{at}/prefixItems/{n}") for n, one in enumerate(prefix)]
        fixed = fixed if most is None else fixed[:most]
        if not fixed:
            item = self.value(items, f"{at}/items") if most != 0 else EMPTY
            return seq(literal("["), _listed(item, least, most), literal("]"))
        node = EMPTY
        if most is None or most > len(fixed):
            limit = None if most is None else most - len(fixed)
            item = seq(COMMA, self.value(items, f"{at}/items"))
            node = Repeat(item, max(least - len(fixed), 0), limit)
        for number in range(len(fixed) - 1, -1, -1):
            begin = [COMMA] if number else []
            node = seq(*begin, fixed[number], node)
            node = node if number < least else optional(node)
        return seq(literal("["), node, literal("]"))

    def _string(self, schema: Schema, at: str) -> Node:
        pattern, form = schema.get("pattern"), schema.get("format")
        least, most = _count(schema, "minLength", None, at), _count(schema, "maxLength", None, at)
        given = [name for name in ("pattern", "format", "minLength", "maxLength") if name in schema]
        if (pattern is not None or form is not None) and len(given) > 1:
            raise _refused(at, f"{given[1]} beside {given[0]} is not supported")
        if form is not None:
            if form not in FORMATS:
                known = ", ".join(FORMATS)
                raise _refused(f"{at}/format", f"{json.dumps(form)} (expected {known})")
            return seq(QUOTE, regular(FORMATS[form], quoted), QUOTE)
        if pattern is not None:
            if not isinstance(pattern, str):
                raise _refused(f"{at}/pattern", "expected a regular expression")
            return seq(QUOTE, matching(pattern, quoted), QUOTE)
        if most is not None and most < (least or 0):
            return alt_of([])
        return seq(QUOTE, Repeat(ANY_CHARACTER, least or 0, most), QUOTE)

    def _number(self, kind: str, schema: Schema, at: str) -> Node:
        bounds = dict[str, int | None]()
        for name in BOUNDS:
            bound = schema.get(name)
            if bound is not None and (
                isinstance(bound, bool) or not isinstance(bound, int | float) or bound % 1
            ):
                raise _refused(f"{at}/{name}", f"{json.dumps(bound)} (expected an integer)")
            bounds[name] = None if bound is None else int(bound)
        low, high = bounds["minimum"], bounds["maximum"]
        above, below = bounds["exclusiveMinimum"], bounds["exclusiveMaximum"]
        if kind == "integer":
            low = low if above is None else max(above + 1, above + 1 if low is None else low)
            high = high if below is None else min(below - 1, below - 1 if high is None else high)
            node = integers(low, high)
        else:
            far = [name for name in BOUNDS[2:] if abs(bounds[name] or 0) > MOST_OPEN]
            if far:
                raise _refused(f"{at}/{far[0]}", f"expected at most {MOST_OPEN:,} from zero")
            open_low = above is not None and (low is None or above >= low)
            open_high = below is not None and (high is None or below <= high)
            node = reals(above if open_low else low, below if open_high else high, open_low,
                         open_high)  # fmt: skip
        return node or alt_of([])


def alt_of(items: Sequence[Node]) -> Node:
    """A text of one of the items, of which there may be none."""
    return alt(*items) if items else byte_set(0)


def _listed(item: Node, least: int, most: int | None) -> Node:
    """`least` to `most` items with commas between them."""
    if most == 0:
        return EMPTY
    more = Repeat(seq(COMMA, item), max(least - 1, 0), None if most is None else most - 1)
    node = seq(item, more)
    return node if least else optional(node)


def _count(schema: Schema, name: str, default: int | None, at: str) -> int | None:
    value = schema.get(name, default)
    if value is None and name not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_LENGTH:
        shown = json.dumps(value)
        raise _refused(f"{at}/{name}", f"{shown} (expected an integer from 0 to {MOST_LENGTH:,})")
    return value


def _constants(schema: Schema) -> frozenset[str] | None:
    """The only values that fit a schema, as JSON; None if it is not bound to some."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_compact, values)) if isinstance(values, list) else None


def _disjoint(one: Mapping[str, frozenset[str]], other: Mapping[str, frozenset[str]]) -> bool:
    return any(name in other and not values & other[name] for name, values in one.items())


def _kind(value: object) -> str:
    """The type of a value; integers are numbers."""
    kinds: Sequence[tuple[type | tuple[type, ...], str]] = (
        (bool, "boolean"), ((int, float), "number"), (str, "string"), (list, "array"),
        (dict, "object"),
    )  # fmt: skip
    return next((name for types, name in kinds if isinstance(value, types)), "null")


def _fits(value: object, types: Sequence[str]) -> bool:
    whole = isinstance(value, int | float) and value % 1 == 0
    return _kind(value) in types or (_kind(value) == "number" and whole and "integer" in types)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refused(at: str, reason: str) -> UsageError:
    return UsageError(f"JSON schema{' ' + at if at else ''}: {reason}")
