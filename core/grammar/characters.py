"""Sets of characters as grammars of their bytes in UTF-8."""

from collections.abc import Iterable, Sequence
from functools import cache

from sabia.core.grammar.nodes import EMPTY, Node, alt, byte_set, seq

LAST = 0x10FFFF
Span = tuple[int, int]  # code points or bytes, both ends included
SURROGATES: Span = (0xD800, 0xDFFF)
# code points of one to four bytes
LENGTHS: Sequence[Span] = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST))


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans in order, joined where they touch."""
    joined = list[Span]()
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(spans: Iterable[Span]) -> tuple[Span, ...]:
    """All characters that are not in the spans; surrogates are no characters."""
    left, begin = list[Span](), 0
    for low, high in union([*spans, SURROGATES]):
        if begin < low:
            left.append((begin, low - 1))
        begin = high + 1
    return (*left, (begin, LAST)) if begin <= LAST else tuple(left)


def without(spans: Iterable[Span], excluded: Iterable[Span]) -> tuple[Span, ...]:
    """The spans without the excluded characters."""
    return complement([*complement(spans), *excluded])


@cache
def character(spans: tuple[Span, ...]) -> Node:
    """One character of the spans, without surrogates."""
    runs = list[tuple[Span, ...]]()
    for low, high in without(spans, ()):
        for first, last in LENGTHS:
            if max(low, first) <= min(high, last):
                runs += _runs(chr(max(low, first)).encode(), chr(min(high, last)).encode())
    return _tree(tuple(runs))


def _runs(low: bytes, high: bytes) -> list[tuple[Span, ...]]:
    """Products of byte ranges that together are the texts low..high of equal length."""
    if len(low) == 1:
        return [((low[0], high[0]),)]
    if low[0] == high[0]:
        return [((low[0], low[0]), *rest) for rest in _runs(low[1:], high[1:])]
    count = len(low) - 1
    first, last, runs = low[0], high[0], list[tuple[Span, ...]]()
    if low[1:] != b"\x80" * count:
        runs += [((first, first), *rest) for rest in _runs(low[1:], b"\xbf" * count)]
        first += 1
    if high[1:] != b"\xbf" * count:
        runs += [((last, last), *rest) for rest in _runs(b"\x80" * count, high[1:])]
        last -= 1
    if first <= last:
        runs.append(((first, last), *[(0x80, 0xBF)] * count))
    return runs


@cache
def _tree(runs: tuple[tuple[Span, ...], ...]) -> Node:
    """The runs with what they begin with taken together, so that a byte decides."""
    if runs == ((),):
        return EMPTY
    after: dict[tuple[tuple[Span, ...], ...], int] = {}
    for code in range(256):
        rests = tuple(run[1:] for run in runs if run[0][0] <= code <= run[0][1])
        if rests:
            after[rests] = after.get(rests, 0) | 1 << code
    branches = [
        byte_set(values) if rests == ((),) else seq(byte_set(values), _tree(rests))
        for rests, values in after.items()
    ]
    return alt(*branches)
