"""Regular expressions → grammars: the texts that a pattern matches as a whole.

The syntax is that of Python's `re`, whose parser is used. Anchors may stand at the two ends only;
look-around, back references, atomic groups and flags are refused by name. `\\d`, `\\w` and `\\s`
write ASCII characters, so that other engines match the text too; negated, they exclude all of
Unicode's.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.grammar.characters import LAST, Span, character, complement, union
from sabia.core.grammar.nodes import EMPTY, Node, Repeat, alt, seq

ASCII: dict[str, tuple[Span, ...]] = {
    "CATEGORY_DIGIT": ((0x30, 0x39),),
    "CATEGORY_WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "CATEGORY_SPACE": ((0x09, 0x0D), (0x20, 0x20)),
}
LINE_ENDS: tuple[Span, ...] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
MOST_REPEATS = 2_000  # product of the counts of nested repetitions
LONGEST = 10_000  # characters of a pattern
Writer = Callable[[tuple[Span, ...]], Node]  # a character of a set → its bytes


def regular(pattern: str, write: Writer = character) -> Node:
    """The texts that a pattern matches as a whole, each character written by `write`.

    Raises UsageError for a pattern that is invalid or has what is not supported.
    """
    return _Translation(write).sequence(_parsed(pattern), 1)


def matching(pattern: str, write: Writer = character) -> Node:
    """The texts in which the pattern matches somewhere (JSON Schema's `pattern`)."""
    steps = list(_parsed(pattern))
    anything = Repeat(write(((0, LAST),)))
    before = [] if steps and _is(steps[0], "AT_BEGINNING") else [anything]
    after = [] if steps and _is(steps[-1], "AT_END") else [anything]
    return seq(*before, _Translation(write).sequence(steps, 1), *after)


def _parsed(pattern: str) -> Sequence[Any]:
    if len(pattern) > LONGEST:
        raise _refused(pattern, f"more than {LONGEST:,} characters")
    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _refused(pattern, str(error) or "nested too deeply") from None
    if parsed.state.flags & ~re.UNICODE:
        raise _refused(pattern, "flags are not supported")
    return parsed


def _is(step: tuple[Any, Any], anchor: str) -> bool:
    names = (anchor, anchor + "_STRING")
    return str(step[0]) == "AT" and str(step[1]) in names


class _Translation:
    """Parsed patterns → nodes."""

    def __init__(self, write: Writer) -> None:
        self._write = write

    def sequence(self, steps: Iterable[tuple[Any, Any]], repeats: int, outer: bool = True) -> Node:
        """One step after another; repeats: the product of the counts around them."""
        steps = list(steps)
        if outer:
            steps = steps[1:] if steps and _is(steps[0], "AT_BEGINNING") else steps
            steps = steps[:-1] if steps and _is(steps[-1], "AT_END") else steps
        nodes = [self._step(str(kind), value, repeats) for kind, value in steps]
        return seq(*nodes) if nodes else EMPTY

    def _step(self, kind: str, value: Any, repeats: int) -> Node:
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            limit = None if most is parser.MAXREPEAT else int(most)
            times = max(repeats * max(limit or least, 1), 1)
            if times > MOST_REPEATS:
                raise UsageError(
                    f"regular expression: {times:,} nested repetitions (expected at most "
                    f"{MOST_REPEATS:,})"
                )
            return Repeat(self.sequence(inner, times, outer=False), int(least), limit)
        if kind == "BRANCH":
            return alt(*(self.sequence(one, repeats, outer=False) for one in value[1]))
        if kind == "SUBPATTERN":
            _, added, removed, inner = value
            if added or removed:
                raise UsageError("regular expression: flags of a group are not supported")
            return self.sequence(inner, repeats, outer=False)
        return self._write(_spans(kind, value))


def _spans(kind: str, value: Any) -> tuple[Span, ...]:
    """The characters of a step that matches one."""
    if kind == "LITERAL":
        return ((value, value),)
    if kind == "NOT_LITERAL":
        return complement([(value, value)])
    if kind == "ANY":
        return complement(LINE_ENDS)
    if kind != "IN":
        name = kind.lower().replace("_", " ")
        raise UsageError(f"regular expression: {name} is not supported here")
    members = [(str(name), what) for name, what in value]
    negated = members[0][0] == "NEGATE"
    spans = [span for name, what in members[negated:] for span in _members(name, what, negated)]
    return complement(spans) if negated else union(spans)


def _members(kind: str, value: Any, negated: bool) -> Sequence[Span]:
    """The characters of a part of a set."""
    if kind == "LITERAL":
        return ((value, value),)
    if kind == "RANGE":
        return (value,)
    category = str(value)
    if category in ASCII:
        return _unicode(category) if negated else ASCII[category]
    positive = category.replace("_NOT_", "_")
    return complement(ASCII[positive] if negated else _unicode(positive))


@cache
def _unicode(category: str) -> tuple[Span, ...]:
    """All characters of a category, as `re` has them."""
    letter = {"CATEGORY_DIGIT": r"\d", "CATEGORY_WORD": r"\w", "CATEGORY_SPACE": r"\s"}[category]
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    return tuple((m.start(), m.end() - 1) for m in re.finditer(letter + "+", everything))


def _refused(pattern: str, reason: str) -> UsageError:
    shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
    return UsageError(f"regular expression {shown!r}: {reason}")
