"""Parts as text for a terminal: lines of its width, styles where it has them, and a pager.

The width of characters is that of rich, by which wide ones take two columns.
"""

import bisect
import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import IO, TextIO

from rich.cells import cell_len, get_character_cell_size

from sabia.core.recipes.show import parts
from sabia.core.recipes.show.parts import Part, Span, visible

WIDTH = 80  # columns, where no terminal has another width
NARROWEST = 20
CODES = {
    parts.REMOVED: "31", parts.ADDED: "32", parts.QUIET: "2", parts.MASKED: "2", parts.NAME: "1",
}  # fmt: skip
MARKS = {parts.REMOVED: ("[-", "-]"), parts.ADDED: ("{+", "+}")}
GUTTERS = {parts.TRAINED: "▌ ", parts.MASKED: "  "}
TAB = "    "
LESS = {"LESS": "FRX", "LESSCHARSET": "utf-8", "LV": "-c"}


def lines_of(shown: Iterable[Part], width: int, styled: bool) -> Iterator[str]:
    """Lines of at most `width` columns; styled: with ANSI escape sequences."""
    before = ""
    for role, same in groupby(shown, lambda part: part.role):
        if before and (role != parts.FIELD or before == parts.TEXT):
            yield ""
        if role == parts.FIELD:
            yield from _fields([*same], width, styled)
            before = role
            continue
        for number, part in enumerate(same):
            if number:
                yield ""
            if role == parts.TITLE:
                yield _rule(part, width, styled)
            elif role == parts.HEADING:
                yield from _wrapped(part.spans, width, styled, marked=False)
            else:
                yield from _text(part.spans, width, styled)
        before = role


def _fields(fields: Sequence[Part], width: int, styled: bool) -> Iterator[str]:
    """Names and values in two columns; a name that is too long has a line of its own."""
    names = [" ".join(visible(part.label).split()) for part in fields]
    column = min(max(map(cell_len, names)) + 2, width // 3)
    for name, part in zip(names, fields, strict=True):
        lines = [*_wrapped(part.spans, width - column, styled)]
        if cell_len(name) >= column:
            yield from _wrapped([(parts.NAME, name)], width, styled)
            name = ""
        for number, line in enumerate(lines or [""]):
            first = "" if number else name
            yield _styled(parts.NAME, first, styled) + " " * (column - cell_len(first)) + line


def _rule(part: Part, width: int, styled: bool) -> str:
    words = " ".join(visible(part.label).split())
    note = " ".join(visible("".join(text for _, text in part.spans)).split())
    words = _cut(words, width - 8)
    note = _cut(note, width - cell_len(words) - 10)
    end = f" {note} ──" if note else ""
    rule = "─" * max(2, width - cell_len(words) - cell_len(end) - 4)
    title = f"{_styled(parts.QUIET, '──', styled)} {_styled(parts.NAME, words, styled)}"
    return f"{title} {_styled(parts.QUIET, rule + end, styled)}"


def _cut(words: str, width: int) -> str:
    """The end of a text that is wider."""
    if cell_len(words) <= width:
        return words
    while words and cell_len(words) > width - 1:
        words = words[1:]
    return f"…{words}" if width > 1 else ""


def _text(spans: Iterable[Span], width: int, styled: bool) -> Iterator[str]:
    """Lines of a text; tokens with and without loss begin new ones, with a sign before each."""
    pending = list[Span]()
    for style, words in spans:
        if style not in GUTTERS:
            pending.append((style, words))
            continue
        yield from _wrapped(pending, width, styled)
        pending = []
        for line in _wrapped([(style, words)], width - 2, styled):
            yield _styled(style, GUTTERS[style], styled) + line
    yield from _wrapped(pending, width, styled)


def _wrapped(spans: Iterable[Span], width: int, styled: bool, marked: bool = True) -> Iterator[str]:
    """Styled spans as lines. marked: with signs around what differs."""
    plain, starts, styles = "", list[int](), list[str]()
    for style, words in spans:
        opening, closing = MARKS.get(style, ("", "")) if marked else ("", "")
        starts.append(len(plain))
        styles.append(style)
        plain += f"{opening}{visible(words)}{closing}".replace("\t", TAB)
    if not plain:
        return
    first = 0
    for line in plain.split("\n"):
        for start, end in _cuts(line, max(width, 2)):
            yield _spans_of(plain, first + start, first + end, starts, styles, styled)
        first += len(line) + 1


def _spans_of(
    plain: str, start: int, end: int, starts: list[int], styles: list[str], styled: bool
) -> str:
    """Characters [start, end) with their styles."""
    if not styled:
        return plain[start:end]
    line, span = "", bisect.bisect_right(starts, start) - 1
    while span < len(starts) and (span < 0 or starts[span] < end):
        stop = starts[span + 1] if span + 1 < len(starts) else end
        line += _styled(styles[span], plain[max(start, starts[span]) : min(end, stop)], True)
        span += 1
    return line


def _cuts(line: str, width: int) -> Iterator[tuple[int, int]]:
    """The lines [start, end) of at most `width` columns that a line becomes, cut between words
    where that is possible."""
    if len(line) <= width and (line.isascii() or cell_len(line) <= width):
        yield 0, len(line)
        return
    start = column = 0
    for match in re.finditer(r"\S+|\s+", line):
        size = cell_len(match[0])
        if column + size > width and not match[0].isspace() and column:
            yield start, start + len(line[start : match.start()].rstrip())
            start, column = match.start(), 0
        if column + size <= width or (match[0].isspace() and column):
            column += size
            continue
        for index in range(match.start(), match.end()):
            cell = get_character_cell_size(line[index])
            if column + cell > width:
                yield start, index
                start, column = index, 0
            column += cell
    if start < len(line):
        yield start, start + len(line[start:].rstrip())


def _styled(style: str, words: str, styled: bool) -> str:
    code = CODES.get(style)
    return f"\x1b[{code}m{words}\x1b[0m" if styled and code and words else words


def show_text(shown: Iterable[Part]) -> None:
    """Write parts to stdout; to a terminal by a pager. Raises BrokenPipeError if stdout is closed;
    to end the pager is no error."""
    pager = _pager() if sys.stdout.isatty() else []
    if not pager:
        print_parts(shown, sys.stdout)
        return
    lines = _lines_for(shown, sys.stdout)
    environment = LESS | dict(os.environ)
    with subprocess.Popen(
        pager, 1, stdin=subprocess.PIPE, env=environment, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            _write(process.stdin, lines)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        while True:  # Ctrl-C is for the pager while it runs
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
                return


def print_parts(shown: Iterable[Part], file: TextIO) -> None:
    """Write parts to a terminal, in its width, or to a file, in WIDTH columns."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")
    _write(file, _lines_for(shown, file))


def _lines_for(shown: Iterable[Part], file: TextIO) -> Iterator[str]:
    terminal = file.isatty()
    width = min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), 2 * WIDTH)
    styled = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return lines_of(shown, width if terminal else WIDTH, styled)


def _write(file: IO[str], lines: Iterable[str]) -> None:
    for line in lines:
        file.write(f"{line}\n")


def _pager() -> list[str]:
    """The command that pages; [] if there is none."""
    names = ("SABIA_PAGER", "PAGER")
    chosen = next((os.environ[name] for name in names if name in os.environ), "less")
    words = shlex.split(chosen)
    return words if words and words != ["cat"] and shutil.which(words[0]) else []
