"""The source of a `pre` element to the code that it shows, and to a fenced code block.

Highlighters wrap tokens or lines into elements, put line numbers before lines or into a table cell
beside the code, and add buttons; only the code is kept, with its indentation and blank lines.
"""

import re

from sabia.core.web.extraction.markdown import markup
from sabia.core.web.extraction.markdown.inline import longest_ticks
from sabia.core.web.extraction.markdown.markup import (
    MARKUP,
    attribute,
    attributes_at,
    closing,
    name_of,
    plain,
)

_NUMBER_CLASS = re.compile(
    r"(?:^|[\s_-])(?:line-?nu?m(?:ber)?s?|linenos?|linenodiv|lnt?|gutter|blob-num|hljs-ln-numbers)"
    r"(?:$|[\s_-])",
    re.IGNORECASE,
)
_LANGUAGE = re.compile(
    r"(?:^|\s)(?:language|lang|highlight-source|highlight|sourceCode|brush)[-: ]\s*"
    r"([\w+#.-]{1,20})",
    re.IGNORECASE,
)
_NO_LANGUAGE = frozenset(("default", "none", "notranslate", "plaintext", "text"))
_LINES = markup.BLOCK - {"td", "th", "table", "tbody", "thead"}  # each is a line or several
_EMPTY_BEFORE = re.compile(r"\A(?:[ \t]*\n)+")


def code_of(data: bytes, start: int, end: int) -> str:
    """The code between two positions, without blank lines before and after it."""
    parts: list[str] = []
    at_start, filled = True, True  # of a line; since the last tag of _LINES began
    swallow = False  # a line feed between two elements of _LINES

    def add(text: str) -> None:
        nonlocal at_start, filled, swallow
        if swallow and text.startswith("\n"):
            text = text[1:]
        if text:
            parts.append(text)
            at_start, filled, swallow = text.endswith("\n"), True, False

    position = start
    while match := MARKUP.search(data, position, end):
        add(_text(data[position : match.start()]))
        name, ends, position = name_of(match), bool(match[1]), match.end()
        if name and not ends and _skipped(data, name, match, end):
            position = closing(data, name, position, end)[1]
        elif name == "br":
            swallow = False
            add("\n")
        elif name in _LINES:
            if not at_start or (ends and not filled):
                add("\n")
            filled, swallow = ends, ends
    add(_text(data[position:end]))
    return _EMPTY_BEFORE.sub("", "".join(parts)).rstrip()


def _text(source: bytes) -> str:
    return plain(source).replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")


def _skipped(data: bytes, name: str, match: re.Match[bytes], end: int) -> bool:
    """Whether the element is not code: a button, a script, something invisible, a line number."""
    if name in markup.RAW or name in markup.UNSEEN or name == "button":
        return True
    if name not in ("span", "td", "th", "a", "div", "i"):
        return False
    if name == "span" and markup.hidden(match[3]):
        return True
    if not _NUMBER_CLASS.search(attribute(match[3], "class")):
        return False
    after = data.find(b"<", match.end(), end)
    text = plain(data[match.end() : after if after >= 0 else end]).strip()
    return not text or text.isdigit()


def is_line_numbers(code: str) -> bool:
    """Whether the lines are consecutive numbers."""
    lines = code.split()
    if not (lines and lines[0].isdecimal() and len(lines[0]) < 7):
        return False
    first = int(lines[0])
    return lines == [str(number) for number in range(first, first + len(lines))]


def language_of(data: bytes, tags: list[int]) -> str:
    """The language that the classes of the tags at these positions name; empty if none does."""
    for position in tags:
        attributes = attributes_at(data, position)
        for name in ("class", "data-lang", "data-language"):
            value = attribute(attributes, name)
            match = _LANGUAGE.search(value if name == "class" else f"lang-{value}")
            if match and match[1].lower() not in _NO_LANGUAGE:
                return match[1]
    return ""


def fenced(code: str, language: str) -> list[str]:
    """The lines of a code block, whose fence is longer than any run of backticks within."""
    fence = "`" * max(longest_ticks(code) + 1, 3)
    return [fence + language, *code.split("\n"), fence]
