"""Verifiers check whether a text gives the right answer, without a model.

`verify(kind, text, reference)` is a pure function. Kinds:
  exact     equal after Unicode NFC and with each run of white space as one space
  contains  the reference occurs in the text, case-insensitively
  regex     `re.search` with MULTILINE finds the reference
  number    the last number of the text (inside \\boxed{} or after #### if present) has the
            reference's value; decimal comma and point, digit groups, fractions (1/2, \\frac{1}{2},
            2\\frac12) and percent are parsed
  choice    the last answer letter of the text is the reference's letter
  json      the text is one JSON value (a code fence around it is allowed) that contains the
            values of the reference; a reference that is a list of names asks for those keys
  math      the final answer of the text equals the reference's in any notation (`maths`)
  code      the program in the text passes the tests of the reference (`programs`)
Verifiers are strict: in reinforcement learning a lenient one is soon exploited. All take time that
grows with the length of the text, except for `regex`, `math` and `code`. These have limits of time
and memory; past a limit of time there is no verdict.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sabia.core.errors import BadData
from sabia.core.judge.bounded_regex import PastLimitError, find
from sabia.core.judge.maths import same_answer
from sabia.core.judge.numbers import number
from sabia.core.judge.programs import passes, tests_of
from sabia.core.sandbox.isolated import Tested, boxes

_LETTER = re.compile(r"(?<![^\W_])\(?([A-Z])\)?(?![^\W_'])")
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)


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
    return find(reference, text) is not None


def choice(text: str, reference: str) -> bool:
    """The last capital letter that stands alone in the text is the reference's."""
    letters = _LETTER.findall(text)
    return bool(letters) and letters[-1] == reference.strip().strip("().").upper()


def json_value(text: str, reference: str) -> bool:
    """The text is JSON and holds the reference: its keys with equal values, or named keys."""
    fenced = _FENCE.match(text.strip())
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
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


VERIFIERS: dict[str, Callable[[str, str], bool | Tested]] = {
    "exact": exact,
    "contains": contains,
    "regex": regex,
    "number": number,
    "choice": choice,
    "json": json_value,
    "math": same_answer,
    "code": passes,
}


def verify(kind: str, text: str, reference: str) -> bool | None:
    """Whether the text passes the verifier `kind` against the reference; None without a verdict."""
    return explained(kind, text, reference).passed


def explained(kind: str, text: str, reference: str) -> Tested:
    """What `verify` gives, and why the text fails or has no verdict, where the verifier says it.

    Raises BadData for an unknown kind or an invalid reference, MissingBackend for `code` where
    programs cannot be isolated.
    """
    if kind not in VERIFIERS:
        raise BadData(f"no verifier: {kind!r} (expected one of {', '.join(VERIFIERS)})")
    try:
        result = VERIFIERS[kind](text, reference)
    except PastLimitError:
        return Tested(None, "past the limit of time")
    return result if isinstance(result, Tested) else Tested(result)


def explained_all(kind: str, pairs: Sequence[tuple[str, str]]) -> list[Tested]:
    """`explained` of (text, reference) pairs, in their order; programs run on all processors."""
    if kind != "code":
        return [explained(kind, text, reference) for text, reference in pairs]
    with ThreadPoolExecutor(boxes.count) as pool:
        return list(pool.map(lambda pair: explained(kind, *pair), pairs))


def check_reference(kind: str, reference: str) -> None:
    """Raises BadData for a reference that the verifier cannot read, MissingBackend where it cannot
    run at all."""
    if kind == "code":
        with boxes.one() as box:
            box.check()
        tests_of(reference)
    else:
        verify(kind, "", reference)
