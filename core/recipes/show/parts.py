"""What a record is shown as: titles, fields and texts, of spans with a style, for any medium.

Nothing that a text holds can act on a terminal: control characters, escape sequences and marks that
reorder text are replaced by signs for them.
"""

import difflib
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

PLAIN, QUIET, NAME = "plain", "quiet", "name"
REMOVED, ADDED = "removed", "added"  # of differences
TRAINED, MASKED = "trained", "masked"  # tokens with and without loss
Span = tuple[str, str]  # style, text
TITLE, HEADING, FIELD, TEXT = "title", "heading", "field", "text"

AROUND = 120  # characters of common text next to a difference
MOST_WORDS = 4_000  # of texts that are compared word by word; longer ones line by line
_HIDDEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


class Part(NamedTuple):
    """A title of a record, a heading in it, a field (name, value) or a text."""

    role: str
    label: str = ""
    spans: tuple[Span, ...] = ()


def title(words: str, note: str = "") -> Part:
    """The title of a record, with a quieter note."""
    return Part(TITLE, words, ((QUIET, note),) if note else ())


def heading(words: str, style: str = NAME) -> Part:
    """A heading in a record."""
    return Part(HEADING, "", ((style, words),))


def field(name: str, value: object) -> Part:
    """A field and its value."""
    return Part(FIELD, name, ((PLAIN, str(value)),))


def text(words: str, limit: int = 0, style: str = PLAIN) -> Part:
    """A text, of which at most `limit` characters are shown (0: all)."""
    return spans([(style, words)], limit)


def spans(styled: Iterable[Span], limit: int = 0) -> Part:
    """A text of styled spans, of which at most `limit` characters are shown (0: all)."""
    shown, left, more = list[Span](), limit, 0
    for style, words in styled:
        if limit and len(words) > left:
            shown += [(style, words[:left])] if left else []
            more += len(words) - left
            left = 0
        elif words:
            shown.append((style, words))
            left -= len(words)
    return Part(TEXT, "", (*shown, *([(QUIET, f"… {more:,} more characters")] if more else ())))


def visible(words: str) -> str:
    """A text with signs for what could act on a terminal."""
    return _HIDDEN.sub(_sign, words.replace("\r\n", "\n"))


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"


def difference(before: str, after: str) -> list[Span]:
    """What differs between two texts, by words, with some of the common text around it."""
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    middle = [text[start : len(text) - end] for text in (before, after)]
    words = [_WORDS.findall(text) for text in middle]
    if max(map(len, words)) > MOST_WORDS:
        words = [text.splitlines(True) for text in middle]
    if max(map(len, words)) > MOST_WORDS:
        words = [[text] if text else [] for text in middle]
    old, new = words
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changes: list[Span] = [(PLAIN, before[:start])]
    for kind, a, b, c, d in blocks:
        if kind == "equal":
            changes.append((PLAIN, "".join(old[a:b])))
            continue
        changes += [(REMOVED, "".join(old[a:b])), (ADDED, "".join(new[c:d]))]
    changes.append((PLAIN, before[len(before) - end :] if end else ""))
    return [*_shortened(_joined(changes))]


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common, up to the start of a word."""
    lengths = range(1, min(len(one), len(other)) + 1)
    # the length of the longest common start
    low = bisect_left(lengths, True, key=lambda size: one[:size] != other[:size])
    if low in (len(one), len(other)) and len(one) == len(other):
        return low
    while low and (one[low - 1].isalnum() or one[low - 1] == "_"):
        low -= 1
    return low


def _joined(changes: Sequence[Span]) -> Iterator[Span]:
    """Neighbouring changes as one, where only white space is between them."""
    pending = {REMOVED: "", ADDED: ""}
    for number, (style, words) in enumerate(changes):
        inside = 0 < number < len(changes) - 1 and any(pending.values())
        if style != PLAIN:
            pending[style] += words
        elif inside and not words.strip():
            pending = {kind: before + words for kind, before in pending.items()}
        else:
            yield from ((kind, text) for kind, text in pending.items() if text)
            pending = {REMOVED: "", ADDED: ""}
            if words:
                yield style, words
    yield from ((kind, text) for kind, text in pending.items() if text)


def _shortened(changes: Iterable[Span]) -> Iterator[Span]:
    """Common text only next to changes."""
    changes = list(changes)
    if all(style == PLAIN for style, _ in changes):
        yield QUIET, "the same text"
        return
    for number, (style, words) in enumerate(changes):
        head = AROUND if number else 0
        tail = AROUND if number + 1 < len(changes) else 0
        if style != PLAIN or len(words) <= head + tail:
            yield style, words
            continue
        head = words.rfind(" ", 0, head) + 1 or head if head else 0
        end = len(words) - tail
        end = words.find(" ", end) + 1 or end if tail else end
        yield PLAIN, words[:head]
        yield QUIET, f"… {end - head:,} characters in common … "
        yield PLAIN, words[end:]
