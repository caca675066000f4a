"""The kinds of option values: how each is parsed, and how help names it.

Values come from the command line, an environment variable or a TOML file, as text or as a TOML
number. Every reader raises UsageError with the option's flag, the value and what was expected.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sabia.core import units
from sabia.core.errors import UsageError

TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


class Kind(NamedTuple):
    """A kind of value: metavar in help, reader `(text, flag) → value`, and JSON type."""

    metavar: str
    read: Callable[[Any, str], Any]
    json: str


def _text(value: object, flag: str) -> str:
    return str(value)


def _integer(value: object, flag: str) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise UsageError(
            f"{flag}: {value!r} is not a whole number (expected a number such as 4)"
        ) from None


def _number(value: object, flag: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise UsageError(
            f"{flag}: {value!r} is not a number (expected a number such as 0.5)"
        ) from None
    if not math.isfinite(number):
        raise UsageError(
            f"{flag}: {value!r} is not a finite number (expected a number such as 0.5)"
        )
    return number


def _whole(value: Any, flag: str) -> int:
    count = units.parse_count(value, flag)
    if count != int(count):
        raise UsageError(f"{flag}: {value!r} is not a whole number (expected a count such as 10k)")
    return int(count)


def _flag(value: object, flag: str) -> bool:
    text = str(value).strip().lower()
    if text not in TRUE + FALSE:
        raise UsageError(f"{flag}: {value!r} is not a boolean (expected true or false)")
    return text in TRUE


def _regex(value: object, flag: str) -> str:
    try:
        re.compile(str(value))
    except re.error as error:
        raise UsageError(f"{flag}: {value!r} is not a regular expression ({error})") from None
    return str(value)


KINDS = {
    "text": Kind("TEXT", _text, "string"),
    "regex": Kind("REGEX", _regex, "string"),
    "flag": Kind("", _flag, "boolean"),
    "integer": Kind("N", _integer, "integer"),
    "number": Kind("X", _number, "number"),
    "count": Kind("COUNT", units.parse_count, "number"),
    "whole": Kind("COUNT", _whole, "integer"),
    "length": Kind("LENGTH", units.parse_length, "integer"),
    "size": Kind("BYTES", units.parse_bytes, "integer"),
    "duration": Kind("DURATION", units.parse_duration, "number"),
    "share": Kind("FRACTION", units.parse_fraction, "number"),
    "money": Kind("USD", units.parse_money, "number"),
}
