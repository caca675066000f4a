"""JSON numbers within bounds as grammars."""

from __future__ import annotations

from sabia.core.grammar.nodes import (
    EMPTY,
    Node,
    Repeat,
    alt,
    byte_range,
    byte_set,
    literal,
    optional,
    seq,
)  # fmt: skip

DIGITS = 18  # of an integer and of a fraction, at most: within 64 bits
OPEN_DIGITS = 6  # of a fraction between open bounds: no such number is rounded to its bound
MOST_OPEN = 10**9
DIGIT = byte_range(0x30, 0x39)
EXPONENT = seq(
    byte_set(1 << ord("e") | 1 << ord("E")), optional(byte_set(1 << ord("+") | 1 << ord("-"))),
    Repeat(DIGIT, 1, 2),
)  # fmt: skip


def fraction(digits: int = DIGITS) -> Node:
    """A point and digits."""
    return seq(literal("."), Repeat(DIGIT, 1, digits))


def integers(low: int | None, high: int | None) -> Node | None:
    """The integers low..high of at most DIGITS digits; None if there are none."""
    most = 10**DIGITS - 1
    low, high = max(-most, -most if low is None else low), min(most, most if high is None else high)
    signs = list[Node]()
    if low < 0 and high >= low:
        signs.append(seq(literal("-"), _naturals(max(-high, 1), -low)))
    if high >= 0 and high >= low:
        signs.append(_naturals(max(low, 0), high))
    return alt(*signs) if signs else None


def reals(
    low: int | None, high: int | None, open_low: bool = False, open_high: bool = False
) -> Node | None:
    """The numbers between two integers, the ends without those that are open; with an exponent
    where there are no bounds. None if there are none.

    Open bounds are at most MOST_OPEN from zero.
    """
    if low is None and high is None:
        return seq(
            optional(literal("-")), _naturals(0, 10**DIGITS - 1), optional(fraction()),
            optional(EXPONENT),
        )  # fmt: skip
    most = 10**DIGITS - 1
    low, high = -most if low is None else low, most if high is None else high
    signs = list[Node]()
    if low < 0 and (below := _between(max(-high, 0), -low, high <= 0 and open_high, open_low)):
        signs.append(seq(literal("-"), below))
    if high >= 0 and (above := _between(max(low, 0), high, low >= 0 and open_low, open_high)):
        signs.append(above)
    return alt(*signs) if signs else None


def _between(low: int, high: int, open_low: bool, open_high: bool) -> Node | None:
    """The numbers low..high, 0 <= low, without a sign."""
    if low > high or (low == high and (open_low or open_high)):
        return None
    zero = byte_range(0x30, 0x30)
    zeros = seq(literal("."), Repeat(zero, 1, DIGITS))
    if low == high:
        return seq(literal(str(low)), optional(zeros))
    parts = list[Node]()
    first = low
    if open_low:  # the fraction has a digit other than 0
        half = OPEN_DIGITS // 2
        positive = seq(
            literal("."), Repeat(zero, 0, half), byte_range(0x31, 0x39),
            Repeat(DIGIT, 0, OPEN_DIGITS - half - 1),
        )  # fmt: skip
        parts.append(seq(literal(str(low)), positive))
        first = low + 1
    if first < high:
        digits = OPEN_DIGITS if open_high else DIGITS
        parts.append(seq(_naturals(first, high - 1), optional(fraction(digits))))
    if not open_high:
        parts.append(seq(literal(str(high)), optional(zeros)))
    return alt(*parts)


def _naturals(low: int, high: int) -> Node:
    """The integers low..high, 0 <= low <= high, without leading zeros."""
    parts = list[Node]()
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)  # of as many digits
        parts.append(_of_length(str(low), str(last)))
        low = last + 1
    return alt(*parts)


def _of_length(low: str, high: str) -> Node:
    """The texts of digits between two of equal length."""
    if not low:
        return EMPTY
    size = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return Repeat(DIGIT, len(low), len(low))
    first, last = int(low[0]), int(high[0])
    if first == last:
        return seq(literal(low[0]), _of_length(low[1:], high[1:]))
    parts = list[Node]()
    if low[1:] != "0" * size:
        parts.append(seq(literal(low[0]), _of_length(low[1:], "9" * size)))
        first += 1
    if high[1:] != "9" * size:
        parts.append(seq(literal(high[0]), _of_length("0" * size, high[1:])))
        last -= 1
    if first <= last:
        parts.append(seq(byte_range(0x30 + first, 0x30 + last), Repeat(DIGIT, size, size)))
    return alt(*parts)
