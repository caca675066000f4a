"""Texts written at random within a grammar fit the pattern or the schema, at any limit."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.grammar.automaton import Automaton
from sabia.core.grammar.characters import character
from sabia.core.grammar.guide import Guide, Vocabulary, Walk
from sabia.core.grammar.json_schema import json_schema
from sabia.core.grammar.nodes import seq, until
from sabia.core.grammar.regular import matching, regular

PIECES = ["the", '{"', '":', '",', ', "', "true", "null", "12", ".5", "[]", "é", "😀😀", "e-",
          "-0", "\\u00", "\\n", "T1", "2024-", "@a.", "aa", "ab", "  ", "x\n", "</think>",
          "<th"]  # fmt: skip
TOKENS = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
VOCABULARY = Vocabulary([b"", *TOKENS, b""])
PATTERNS = [
    r"[a-z]{3,8}", r"\d+(\.\d*)?", r"(yes|no|maybe)", r"[^\W\d]+", r"\S+@\S+\.(com|br)", r"(a+)+b?",
    r"((x{1,3}y){2,4}|z*)w", r"[^abc]{5}", r".{0,20}$", r"^\w\W\s\D$", r"(ab|abc)(cd|d)*?",
    r"[\u00e0-\u00ff\U0001f600-\U0001f64f]{1,4}", r"(a?){4}a{4}", r"(|a|bc)*x", r"[^\s\S]|q",
    r"[\ud7f0-\ue010]", r"[^\x00-\x7f]{2}", r"(?:(?P<n>a)|b){2}", r"\Aa*\Z",
]  # fmt: skip


def written(guide: Guide, limit: int, draw: random.Random) -> str:
    """A text of at most `limit` tokens, each drawn from those that are allowed."""
    walk, text = Walk(guide), b""
    for left in range(limit, 0, -1):
        if walk.complete or (walk.accepts and draw.random() < 0.2):
            break
        token = draw.choice(np.flatnonzero(walk.allowed(left)).tolist())
        walk.take(token)
        text += guide.vocabulary.bytes[token]
    assert walk.accepts
    return text.decode()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_the_pattern(pattern: str) -> None:
    draw = random.Random(pattern)
    guide = Guide(regular(pattern), VOCABULARY, "regex")
    least = guide.least_tokens
    texts = [written(guide, max(least, 1) + more, draw) for more in [0, 1, 5, 40] * 12]
    for text in texts:
        assert re.fullmatch(pattern, text), text
    assert len(set(texts)) > 1 or pattern == r"[^\s\S]|q"


def test_a_text_is_accepted_exactly_where_it_matches() -> None:
    draw, letters = random.Random(3), "abxyzw1.é\n"
    for pattern in [r"[a-z]{3,8}", r"(a+)+b?", r"((x{1,3}y){2,4}|z*)w", r"[^abc]{2,3}",
                    r"(a?){3}b{2,}", r"a*?(b|é)+", r"[^\d]\d*", r"(ab?|ba){1,3}x?"]:  # fmt: skip
        automaton = Automaton(regular(pattern))
        for _ in range(400):
            text = "".join(draw.choices(letters, k=draw.randint(0, 7)))
            state = automaton.after(automaton.start, text.encode())
            fits = state is not None and automaton.accepts(state)
            assert fits == bool(re.fullmatch(pattern, text)), (pattern, text)


def test_characters_are_written_as_their_utf_8() -> None:
    draw = random.Random(5)
    for _ in range(60):
        ends = sorted(draw.sample([*range(0x300), *draw.sample(range(0x110000), 40)], 4))
        spans = ((ends[0], ends[1]), (ends[2], ends[3]))
        automaton = Automaton(character(spans))
        near = [code + d for end in ends for code in (end,) for d in (-1, 0, 1)]
        for code in [*near, *draw.sample(range(0x110000), 20)]:
            if not 0 <= code < 0x110000 or 0xD800 <= code < 0xE000:
                continue
            state = automaton.after(automaton.start, chr(code).encode())
            assert (state is not None) == any(low <= code <= high for low, high in spans)
            assert state is None or automaton.complete(state)


def test_what_comes_first_ends_at_the_first_mark() -> None:
    draw = random.Random(6)
    for mark in ("</think>", "abab", "aab", "aaa", "é"):
        automaton = Automaton(until(mark))
        for _ in range(300):
            text = "".join(draw.choices([*mark, mark, "x"], k=draw.randint(1, 9)))
            state = automaton.after(automaton.start, text.encode())
            at = text.find(mark)
            assert (state is not None) == (at < 0 or at + len(mark) == len(text))
            assert state is None or automaton.accepts(state) == (at >= 0)


def drawn_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of any of the supported kinds."""
    kinds = ["string", "integer", "number", "boolean", "enum"]
    if depth < 3:
        kinds += ["object", "object", "array", "any_of", "any", "format", "pattern", "const",
                  "union", "ref"]  # fmt: skip
    kind = draw.choice(kinds)
    inner = lambda: drawn_schema(draw, depth + 1)  # noqa: E731
    if kind == "object":
        names = draw.sample(["a", "b", "c d", "é", '"q"', "x\\y", "long_name"], draw.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {n: inner() for n in names}}
        schema["required"] = [name for name in names if draw.random() < 0.5]
        more = draw.choice([None, False, True, {"type": "integer"}])
        if draw.random() < 0.1 and more is not False:
            schema["required"].append("extra")
        return schema if more is None else schema | {"additionalProperties": more}
    if kind == "array":
        schema = {"type": "array", "minItems": draw.choice([0, 0, 1, 4])}
        if draw.random() < 0.8:
            schema["items"] = inner()
        if draw.random() < 0.3:
            schema["prefixItems"] = [inner() for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.5:
            schema["maxItems"] = schema["minItems"] + draw.randint(0, 4)
        return schema
    if kind == "string":
        least = draw.randint(0, 5)
        return draw.choice(
            [
                {},
                {"minLength": least},
                {"maxLength": least},
                {"minLength": least, "maxLength": least + 2},
            ]
        ) | {"type": kind}
    if kind in ("integer", "number"):
        schema = {"type": kind}
        for name in draw.sample(["minimum", "exclusiveMinimum"], draw.randint(0, 2)):
            schema[name] = draw.choice([-1500, -12, -1, 0, 1, 7, 99, 12345])
        low = max([bound for bound in schema.values() if bound != kind], default=-20)
        for name in draw.sample(["maximum", "exclusiveMaximum"], draw.randint(0, 2)):
            schema[name] = low + draw.choice([2, 3, 10, 100, 1999])
        return schema
    forms = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration"]
    values = [1, 2.5, "x", 'é"', None, True, [1, 2], {"a": 1}]
    simple: dict[str, dict[str, Any]] = {
        "boolean": {"type": "boolean"}, "any": {}, "const": {"const": draw.choice(values)},
        "enum": {"enum": draw.sample(values, draw.randint(1, 5))},
        "format": {"type": "string", "format": draw.choice(forms)},
        "pattern": {"pattern": draw.choice([r"^[A-Z]{2}\d+$", "abc", r'^"\\?\n$', r"[^a]$"])},
        "union": {"type": ["string", "null", "integer"], "title": "a union"},
        "ref": {"$ref": draw.choice(["#/$defs/node", "#/$defs/leaf"])},
    }  # fmt: skip
    if kind == "pattern":
        simple["pattern"]["type"] = "string"
    return simple[kind] if kind in simple else {"anyOf": [inner(), inner()]}


DEFS = {
    "leaf": {"oneOf": [{"enum": ["l1", "l2"]}, {"type": "null"}]},
    "node": {"type": "object", "required": ["v"], "properties": {
        "v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_texts_fit_the_schema(seed: int) -> None:
    draw = random.Random(seed)
    lengths = set()
    for _ in range(60):
        schema = {"type": "array", "items": drawn_schema(draw), "minItems": 1, "$defs": DEFS}
        guide = Guide(json_schema(schema), VOCABULARY, "json")
        checks = jsonschema.Draft202012Validator
        fits = checks(schema, format_checker=checks.FORMAT_CHECKER)
        for limit in (guide.least_tokens, guide.least_tokens + 3, 400):
            text = written(guide, max(limit, guide.least_tokens), draw)
            fits.validate(json.loads(text))
            lengths.add(len(text))
    assert len(lengths) > 40


def test_deep_texts_are_ended() -> None:
    tokens = [b"[", b"]", b'{"a":', b"}", b'"', b"1", b"{", b":"]
    guide = Guide(json_schema({}), Vocabulary(tokens), "json")
    walk, text = Walk(guide), b""
    while not walk.complete:
        allowed = walk.allowed(5000)
        token = next((t for t in (0, 1, 5) if allowed[t]), int(allowed.argmax()))
        walk.take(token)
        text += tokens[token]
    assert text.count(b"[") > 50 and json.loads(text)


def test_texts_have_only_bytes_that_are_tokens_alone() -> None:
    only = [b"ab", b"cd", b"d", b"c", b"x"]  # a could be drawn where no b can follow
    guide = Guide(regular("(abc|acc|cdd?|x){2}"), Vocabulary(only), "regex")
    draw = random.Random(0)
    texts = {written(guide, limit, draw) for limit in (2, 3, 4, 6) for _ in range(60)}
    assert texts == {a + b for a in ("cd", "cdd", "x") for b in ("cd", "cdd", "x")}
    with pytest.raises(UsageError, match="no text of finite length"):
        Guide(regular("abb"), Vocabulary(only), "regex")


def test_the_cache_of_states_may_be_emptied_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sabia.core.grammar.automaton.MOST_STATES", 5)
    monkeypatch.setattr("sabia.core.grammar.guide.CACHE_BYTES", 0)
    draw = random.Random(0)
    guide = Guide(regular(r"(a{1,30}b|c(d|e)*f){2,40}"), VOCABULARY, "regex")
    for limit in (4, 20, 90):
        assert re.fullmatch(r"(a{1,30}b|c(d|e)*f){2,40}", written(guide, limit, draw))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "patternProperties": {}}, "patternProperties is not supported"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
        ({"not": {}}, "not is not supported"),
        ({"type": "strin"}, 'type \\["strin"\\] \\(expected object, array'),
        ({"type": "string", "format": "colour"}, "/format: \"colour\" \\(expected date"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "minLength beside pattern"),
        ({"type": "string", "pattern": "(a"}, "regular expression '\\(a'"),
        ({"type": "string", "maxLength": -1}, "maxLength: -1"),
        ({"type": "number", "minimum": 0.5}, "0.5 \\(expected an integer\\)"),
        ({"type": "number", "multipleOf": 2}, "multipleOf is not supported"),
        ({"$ref": "https://example.org/a"}, "expected #/"), ({"$ref": "#/$defs/a"}, "is missing"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "give them different types"),
        ({"allOf": [{}, {}]}, "more than one schema"), ({"enum": []}, "expected a list"),
        (3, "expected an object"),
        ({"properties": [1]}, "/properties: expected an object"), ({"enum": ["\ud800"]}, "surrog"),
        ({"enum": [1], "minimum": 3}, "minimum beside enum"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_honoured_are_refused(schema: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        json_schema(schema)


@pytest.mark.parametrize("pattern", [r"(a)\1", r"(?=a)b", r"a$b", r"\bx", "(?i)a", "(?>a)",
                                     "((a{99}){99}){99}", "(?i:a)", "a" * 20_000,
                                     "a{2,1}"])  # fmt: skip
def test_patterns_that_cannot_be_honoured_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="regular expression"):
        regular(pattern)


def test_schemas_without_a_value_are_refused() -> None:
    for schema in (
        {"$ref": "#"},
        False,
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ):
        with pytest.raises(UsageError, match="no text of finite length"):
            Guide(json_schema(schema), VOCABULARY, "json")


def test_a_pattern_may_match_within_a_text() -> None:
    draw = random.Random(1)
    for pattern in ("a+b", "^ab", "[xy]$", "^$"):
        guide = Guide(seq(matching(pattern)), VOCABULARY, "regex")
        for _ in range(20):
            assert re.search(pattern, written(guide, 12, draw))
