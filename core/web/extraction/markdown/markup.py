"""Tags and attributes in the bytes of a page, as the HTML scanner reads them."""

import html
import re
from functools import cache

from sabia.kernels.html import lexicon

# a comment; (closing, name, attributes) of a tag; a declaration. No part is read twice
MARKUP = re.compile(
    rb"""<!--(?:-?>|.*?(?:--!?>|\Z))
      |<(/?)([A-Za-z][^\s/>]*+)
        ((?:[^>"'=]++|=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z))?|["'])*+)(?:>|\Z)
      |<(?:[!?]|/(?!\Z))[^>]*+(?:>|\Z)""",
    re.VERBOSE | re.DOTALL,
)
RAW = frozenset(lexicon.RAW.split())
UNSEEN = frozenset(lexicon.UNSEEN.split())
BLOCK = frozenset(f"{lexicon.BLOCK} {lexicon.CELLS} hr".split())
MAYBE_HIDDEN = frozenset(lexicon.INLINE.split())
MOST_ATTRIBUTES = 4_000  # bytes of a tag
_HIDDEN = re.compile(
    rb"""(?:^|[\s"'])(?:hidden(?=[\s=/]|$)|aria-hidden\s*=\s*["']?\s*true|style\s*=\s*
         (?:"[^"]*?display\s*:\s*none|'[^']*?display\s*:\s*none|display:none))""",
    re.VERBOSE | re.IGNORECASE,
)


def name_of(match: re.Match[bytes]) -> str:
    """The name of a MARKUP match in small letters; empty if it is no tag."""
    return (match[2] or b"").decode("ascii", "replace").lower()


def plain(source: bytes) -> str:
    """Text between tags: character references read, null bytes left out."""
    text = source.decode("utf-8", "replace")
    if "&" in text:
        text = html.unescape(text)
    return text.replace("\0", "")


def hidden(attributes: bytes) -> bool:
    """Whether the scanner takes an element with these attributes for invisible."""
    return bool(attributes) and bool(_HIDDEN.search(attributes))


@cache
def _tags(name: str) -> re.Pattern[bytes]:
    return re.compile(rb"<(/?)%s(?=[\s/>]|\Z)" % re.escape(name).encode(), re.IGNORECASE)


def closing(data: bytes, name: str, start: int, end: int) -> tuple[int, int]:
    """(where the end tag begins, the position after it) of an element whose content begins at
    `start`; both are `end` if it is not closed."""
    depth, most = 1, name not in RAW
    for match in _tags(name).finditer(data, start, end):
        depth += -1 if match[1] else most
        if not depth:
            after = data.find(b">", match.end(), end)
            return match.start(), after + 1 if after >= 0 else end
    return end, end


def attribute(attributes: bytes, name: str) -> str:
    """The value of an attribute, at most MOST_ATTRIBUTES bytes in; empty without it."""
    match = _attribute(name).search(attributes, 0, MOST_ATTRIBUTES)
    return plain(next(filter(None, match.groups()), b"")) if match else ""


@cache
def _attribute(name: str) -> re.Pattern[bytes]:
    value = rb"""\s*=\s*(?:"([^"]*+)"|'([^']*+)'|([^\s"'>]++))"""
    return re.compile(rb"""(?:^|[\s"'/])""" + name.encode() + value, re.IGNORECASE)


def attributes_at(data: bytes, position: int) -> bytes:
    """The attributes of the tag at a position, at most MOST_ATTRIBUTES bytes."""
    match = MARKUP.match(data, position, position + MOST_ATTRIBUTES)
    return (match[3] or b"") if match else b""


def content_of(data: bytes, start: int, end: int) -> int:
    """Where the content of the element begins whose tag is at `start`."""
    match = MARKUP.match(data, start, end)
    return match.end() if match else start
