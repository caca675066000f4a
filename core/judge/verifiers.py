"""Verifiers check whether a text gives the right answer, without a model.

`verify(kind, text, reference)` is a pure function. Kinds:
  exact     equal after Unicode NFC and with each run of white space as one space
  contains  the reference occurs in the text, case-insensitively
  regex     `re.search` with MULTILINE finds the reference
  number    the last number of the text (inside \\boxed{} or after #### if present) has the
            reference's value; decimal comma and point, digit groups, fractions and percent are
            parsed
  choice    the last answer letter of the text is the reference's letter
  json      the text is one JSON value (a code fence around it is allowed) that contains the
            values of the reference; a reference that is a list of names asks for those keys
Verifiers are strict: in reinforcement learning a lenient one is soon exploited.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable

from sabia.core.errors import BadData

_NUMBER = re.compile(
    r"(?<![\w.,])[-+\u2212]?(?:\d[\d.,\u00a0\u202f]*\d|\d|\.\d+)(?:[eE][-+]?\d+)?"
    r"(?:\s*/\s*\d+)?(?:\s*%)?"
)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_HASHES = re.compile(r"####\s*(.+)")
_LETTER = re.compile(r"(?<![^\W_])\(?([A-Z])\)?(?![^\W_'])")
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)
REL_TOLERANCE = 1e-6


def normal(text: str) -> str:
    """Unicode NFC with runs of white space as one space, none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def exact(text: str, reference: str) -> bool:
    """The texts are equal except for white space and Unicode composition."""
    return normal(text) == normal(reference)


def contains(text: str, reference: str) -> bool:
    """The reference occurs in the text, case folded."""
    return normal(reference).casefold() in normal(text).casefold()


def regex(text: str, reference: str) -> bool:
    """The pattern is found in the text. Raises BadData if it is not a valid pattern."""
    try:
        return re.search(reference, text, re.MULTILINE) is not None
    except re.error as error:
        raise BadData(f"not a regular expression: {reference!r} ({error})") from error


def readings(token: str) -> set[float]:
    """Possible values of a written number: '1.234' is 1.234 or, with digit groups, 1234."""
    token = re.sub(r"[\s\u00a0\u202f]", "", token).replace("\u2212", "-")
    if token.endswith("%"):
        token = token[:-1]
    top, _, bottom = token.partition("/")
    if bottom:
        return {value / float(bottom) for value in readings(top) if float(bottom)}
    values = set()
    for plain in _plain_forms(top):
        try:
            values.add(float(plain))
        except ValueError:
            continue
    return values


def _plain_forms(token: str) -> list[str]:
    """Forms that Python parses, one for each meaning of the separators."""
    marks = [mark for mark in token if mark in ".,"]
    if not marks:
        return [token]
    last, groups = marks[-1], "," if marks[-1] == "." else "."
    if len(set(marks)) == 2:
        return [token.replace(groups, "").replace(last, ".")] if marks.count(last) == 1 else []
    if len(marks) > 1:
        return [token.replace(last, "")] if re.search(r"\d[.,]\d{3}\Z", token) else []
    decimal = token.replace(",", ".")
    grouped = re.fullmatch(r"[-+]?[1-9]\d{0,2}[.,]\d{3}", token)
    return [decimal, token.replace(last, "")] if grouped else [decimal]


def final_number(text: str) -> str | None:
    """The final number of a text: in its last \\boxed{}, after its last ####, else the last one."""
    numbers = _NUMBER.findall(text)
    return _marked_number(text) or (numbers[-1] if numbers else None)


def _marked_number(text: str) -> str | None:
    for pattern in (_BOXED, _HASHES):
        if (marked := pattern.findall(text)) and (inside := _NUMBER.findall(marked[-1])):
            return inside[-1]
    return None


def number(text: str, reference: str) -> bool:
    """The text's final number has the reference's value (relative tolerance 1e-6)."""
    expected = _reference_values(reference)
    given = final_number(text)
    return given is not None and any(
        math.isclose(value, want, rel_tol=REL_TOLERANCE, abs_tol=1e-12)
        for value in readings(given)
        for want in expected
    )


def _reference_values(reference: str) -> set[float]:
    """The value of a reference: a number, or a worked answer that marks one."""
    try:
        return {float(reference)}
    except ValueError:
        whole = _NUMBER.fullmatch(reference.strip())
        marked = whole[0] if whole else _marked_number(reference)
    if not marked or not (values := readings(marked)):
        raise BadData(
            f"not a number: reference {reference!r:.80} (expected a number, or a text that marks "
            "one by #### or \\boxed{})"
        )
    return values


def choice(text: str, reference: str) -> bool:
    """The last capital letter that stands alone in the text is the reference's."""
    letters = _LETTER.findall(text)
    return bool(letters) and letters[-1] == reference.strip().strip("().").upper()


def json_value(text: str, reference: str) -> bool:
    """The text is JSON and holds the reference: its keys with equal values, or named keys."""
    fenced = _FENCE.match(text.strip())
    try:
        value = json.loads(fenced[1] if fenced else text)
    except ValueError:
        return False
    if not reference:
        return True
    try:
        expected = json.loads(reference)
    except ValueError as error:
        raise BadData(f"not JSON: reference {reference!r:.80} (expected for kind json)") from error
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(
            key in value and value[key] == item for key, item in expected.items()
        )
    if isinstance(expected, list) and isinstance(value, dict):
        return all(key in value for key in expected)
    return value == expected


VERIFIERS: dict[str, Callable[[str, str], bool]] = {
    "exact": exact,
    "contains": contains,
    "regex": regex,
    "number": number,
    "choice": choice,
    "json": json_value,
}


def verify(kind: str, text: str, reference: str) -> bool:
    """True if the text passes the verifier `kind` against the reference."""
    if kind not in VERIFIERS:
        raise BadData(f"no verifier: {kind!r} (expected one of {', '.join(VERIFIERS)})")
    return VERIFIERS[kind](text, reference)
