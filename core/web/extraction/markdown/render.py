"""Chosen blocks of a scanned page to Markdown.

Chosen blocks of one element that nothing but inline markup separates are one paragraph; formulas
beside chosen blocks belong to the text though they hold no block. Tables and code are taken whole
if half of their text is chosen, or if they stand between chosen prose or beside it in one element,
since the block classifier knows little of numbers and code; else only the chosen cells are. Rows
that hold a table, code of several lines, a heading or a long text are written as paragraphs, since
a pipe table cannot hold them.

`pipe_table` writes cells with spans (GitHub Flavored Markdown 0.29, section 4.10). The first row is
the header, since the format has no table without one. A text of at most _REPEATED characters is
repeated in all places that its cell spans, as pandas.read_html does; longer ones, and that of a
cell alone in its row, stand in the first place.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sized
from itertools import groupby
from typing import NamedTuple

import numpy as np

from sabia.core.web.extraction.markdown.code_block import (
    code_of,
    fenced,
    is_line_numbers,
    language_of,
)
from sabia.core.web.extraction.markdown.element_tree import Context, Tree
from sabia.core.web.extraction.markdown.inline import (
    FORMULA_SIGNS,
    formulas,
    inline,
    line_starts_escaped,
)
from sabia.core.web.extraction.markdown.markup import attribute, attributes_at, content_of
from sabia.kernels.html.definitions import COLUMNS, Page

_LONG_CELL = 1_000  # bytes of a block
_WHOLE = 0.5  # share of the text
_AROUND = 3  # elements
_CODE_CELL = re.compile(rb"\s*<(?:pre|code)\b", re.IGNORECASE)
_COLUMN = {name: i for i, name in enumerate(COLUMNS)}
MOST_SPAN = 1_000  # columns, the limit of the HTML standard (4.9.11)
_REPEATED = 100
_PLACES_PER_CELL, _PLACES = 8, 1_000


class Cell(NamedTuple):
    """Markdown of a cell, lines separated by line feeds, and how many places it spans."""

    text: str
    columns: int = 1
    rows: int = 1


def pipe_table(rows: list[list[Cell]]) -> list[str]:
    """The lines of the table. Spans that would make far more places than cells are ignored."""
    grid = filled(rows, _PLACES_PER_CELL * sum(map(len, rows)) + _PLACES)
    if grid is None:
        grid = [[cell.text for cell in row] for row in rows]
    grid = [row for row in grid if any(row)] or grid[:1]
    lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in grid]
    width = max(map(len, grid))
    lines[0] += "  |" * (width - len(grid[0]))  # cells beyond those of the header would be dropped
    return [lines[0], "|" + " --- |" * width, *lines[1:]]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def filled(rows: list[list[Cell]], most: int) -> list[list[str]] | None:
    """A text for each place of a rectangle, or None if that were more than `most` places."""
    grid: list[list[str]] = []
    below: dict[int, tuple[int, str]] = {}  # column: further rows that a cell spans, its text
    width = places = 0
    for number, row in enumerate(rows):
        line: dict[int, str] = {}
        for column, (left, text) in below.items():
            line[column] = text
            below[column] = (left - 1, text)
        column, alone = 0, len(row) == 1 and not line
        for cell in row:
            while column in line:
                column += 1
            span = min(cell.columns or 1, MOST_SPAN)
            more = min(cell.rows or len(rows), len(rows) - number) - 1
            places += span * (more + 1)
            if places > most:
                return None
            again = cell.text if len(cell.text) <= _REPEATED else ""
            for step in range(span):
                text = cell.text if not step else "" if alone else again
                line[column + step] = text
                if more:
                    below[column + step] = (more, "" if alone and step else again)
            column += span
        below = {column: kept for column, kept in below.items() if kept[0] > 0}
        width = max(width, max(line, default=-1) + 1)
        if width * (number + 1) > most:
            return None
        grid.append([line.get(column, "") for column in range(max(line, default=-1) + 1)])
    return [line + [""] * (width - len(line)) for line in grid]


class Writer:
    """Collects lines. The elements around a paragraph are its path; each has a marker."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._path: tuple[int, ...] = ()
        self._markers: list[str] = []

    def add(self, path: tuple[int, ...], markers: list[str], lines: list[str]) -> None:
        """Add a paragraph, heading, table or code block; `markers` belong to `path`."""
        common = 0
        while path[: common + 1] == self._path[: common + 1] and common < len(path):
            common += 1
        around = [_continued(marker) for marker in markers[:common]]
        if self._lines and not self._in_one_list(markers, common):
            self._lines.append("".join(around).rstrip())
        begin = "".join([*around, *markers[common:]])
        go_on = "".join(map(_continued, markers))
        self._lines.append((begin + lines[0]).rstrip() if not lines[0] else begin + lines[0])
        self._lines += [go_on + line if line else go_on.rstrip() for line in lines[1:]]
        self._path, self._markers = path, markers

    def _in_one_list(self, markers: list[str], common: int) -> bool:
        """Whether the paragraph begins an item of the list that is open, or of one within it."""
        if common >= len(markers) or markers[common] == "> ":
            return False
        if common < len(self._markers):  # an item after an item of the same kind
            return (self._markers[common][0] == "-") == (markers[common][0] == "-")
        # a list within an item; only a list from 1 on can follow a text directly
        return common > 0 and markers[common] in ("- ", "1. ") and markers[common - 1] != "> "

    def text(self) -> str:
        """The document."""
        return "\n".join(self._lines)


def _continued(marker: str) -> str:
    """What stands before the further lines."""
    return marker if marker == "> " else " " * len(marker)


class Unit(NamedTuple):
    """A paragraph: where its source begins and ends, and its element."""

    start: int
    end: int
    element: int


def markdown_of(page: Page, data: bytes, chosen: np.ndarray) -> str:
    """Markdown of the chosen blocks (bool[blocks]) of a page whose source is `data`."""
    return _Renderer(page, data, chosen).rendered()


class _Piece(NamedTuple):
    """A chosen block, or a formula, whose `block` is the number of the block before it."""

    start: int
    end: int
    element: int
    block: int


class _Renderer:
    def __init__(self, page: Page, data: bytes, chosen: np.ndarray) -> None:
        self.data, self.tree = data, Tree(page)
        self.blocks, self.chosen = page.blocks, chosen.copy()
        self.source: list[int] = page.blocks[:, _COLUMN["source"]].tolist()
        self.complex: set[int] = set()  # rows that are written as paragraphs
        self.numbers_beside: Counter[int] = Counter()  # row: its `pre` elements
        self.outer_pres: set[int] = set()
        self.rows: dict[int, dict[int, list[int]]] = {}  # table: row: cells
        self.segments: dict[int, list[dict[int, list[int]]]] = {}  # table: runs of simple rows
        self.done: set[int] = set()  # rows and `pre` elements
        self.writer = Writer()

    def rendered(self) -> str:
        """The Markdown."""
        self._read_tables()
        self._take_whole()
        self.units = list(self._units())
        self.starts = [unit.start for unit in self.units]
        for unit in self.units:
            context = self.tree.context(unit.element)
            row = context.row
            if row >= 0 and row not in self.complex and self._table(context.table, row):
                continue
            if context.pre >= 0 and context.pre not in self.outer_pres:
                self._code(context.pre)
                continue
            text = inline(self.data, unit.start, unit.end)
            if context.heading:
                text = "#" * context.heading + " " + " ".join(text.split("\n")) if text else ""
            else:
                text = line_starts_escaped(text)
            if text:
                self._write(context, text.split("\n"))
        return self.writer.text()

    def _write(self, context: Context, lines: list[str]) -> None:
        markers = [self.tree.marker(self.data, element) for element in context.path]
        self.writer.add(context.path, markers, lines)

    # which blocks

    def _read_tables(self) -> None:
        """The rows and cells of all tables, and what makes a row complex."""
        tree = self.tree
        for element in tree.of(
            "table", "tr", "td", "th", "pre", "h1", "h2", "h3", "h4", "h5", "h6"
        ):
            name, context = tree.names[element], tree.context(element)
            if name == "tr" and context.row == element:
                self.rows.setdefault(context.table, {})[element] = []
            elif name in ("td", "th") and context.row >= 0:
                self.rows[context.table][context.row].append(element)
            elif name not in ("tr", "td", "th"):
                outer = tree.context(tree.up[element])
                if name == "pre" and outer.pre >= 0:
                    self.outer_pres.add(outer.pre)
                if name == "pre":
                    self.numbers_beside[outer.row] += 1
                if name != "pre" or (outer.row >= 0 and self._several_lines(element)):
                    self.complex.add(outer.row)
        long = self.blocks[:, _COLUMN["bytes"]] > _LONG_CELL
        for element in self.blocks[long, _COLUMN["element"]].tolist():
            self.complex.add(tree.context(element).row)

    def _several_lines(self, pre: int) -> bool:
        """Whether one of the blocks of a `pre` has several lines, or there are several blocks."""
        low, high = self._range(pre)
        breaks = self.blocks[low:high, _COLUMN["breaks"]]
        return high - low > 1 or bool(breaks.any()) or b"\n" in self._inside(pre).strip()

    def _inside(self, element: int) -> bytes:
        start, end = self.tree.source[element], self.tree.end[element]
        return self.data[content_of(self.data, start, end) : end]

    def _range(self, element: int) -> tuple[int, int]:
        """The blocks of an element: from, to."""
        start, end = self.tree.source[element], self.tree.end[element]
        return bisect_left(self.source, start), bisect_left(self.source, end)

    def _take_whole(self) -> None:
        """Choose all blocks of the tables and code that belong to the text."""
        tree, size = self.tree, self.blocks[:, _COLUMN["bytes"]]
        tables = [table for table, rows in self.rows.items()
                  if self.complex.isdisjoint(rows) and _is_grid(rows.values())]  # fmt: skip
        whole = [*tables, *(pre for pre in tree.of("pre") if pre not in self.outer_pres)]
        if not whole:
            return
        ranges = [self._range(element) for element in whole]
        prose = np.ones(len(size) + 2, bool)  # blocks in none of them, and one more at each end
        for low, high in ranges:
            prose[low + 1 : high + 1] = False
        chosen = np.concatenate([[False], self.chosen, [False]])
        numbers = np.arange(len(prose))
        before = np.maximum.accumulate(np.where(prose, numbers, 0))
        after = np.minimum.accumulate(np.where(prose, numbers, numbers[-1])[::-1])[::-1]
        for element, (low, high) in zip(whole, ranges, strict=True):
            taken = size[low:high][self.chosen[low:high]].sum()
            around = [int(i) for i in (before[low], after[high + 1]) if chosen[i]]
            if (
                (taken and taken >= _WHOLE * size[low:high].sum())
                or len(around) == 2
                or any(self._beside(element, block - 1) for block in around)
            ):
                self.chosen[low:high] = True

    def _beside(self, element: int, block: int) -> bool:
        """Whether the element around a block's own is one of the few around `element`."""
        up = self.tree.up
        around = up[int(self.blocks[block, _COLUMN["element"]])]
        for _ in range(_AROUND):
            element = up[element]
            if element == around:
                return True
        return False

    def _units(self) -> Iterator[Unit]:
        """The paragraphs in order."""
        pieces = self._pieces()
        bounds = [(piece.start, piece.end) for piece in pieces]
        begun = np.searchsorted(self.tree.source, bounds).tolist()  # elements before both
        first = 0
        for i, piece in enumerate(pieces):
            after = pieces[i + 1] if i + 1 < len(pieces) else None
            if after is None or not (
                after.element == piece.element
                and after.block - piece.block <= 1
                and begun[i + 1][0] == begun[i][1]
            ):
                yield Unit(pieces[first].start, piece.end, piece.element)
                first = i + 1

    def _pieces(self) -> list[_Piece]:
        ends, elements = (self.blocks[:, _COLUMN[name]].tolist()
                          for name in ("source_end", "element"))  # fmt: skip
        starts = self.source
        pieces = [_Piece(starts[i], ends[i], elements[i], i)
                  for i in np.flatnonzero(self.chosen).tolist()]  # fmt: skip
        if any(sign in self.data for sign in FORMULA_SIGNS):
            return sorted([*pieces, *self._formulas(starts, ends, elements)])
        return pieces

    def _formulas(
        self, starts: list[int], ends: list[int], elements: list[int]
    ) -> Iterator[_Piece]:
        """Formulas outside of blocks: after a chosen block, or before one in its element."""
        chosen = self.chosen.tolist()
        for i in range(-1, len(starts)):
            last = i + 1 == len(starts)
            before, after = i >= 0 and chosen[i], not last and chosen[i + 1]
            if not (before or after):
                continue
            gap = (ends[i] if i >= 0 else 0, len(self.data) if last else starts[i + 1])
            for start, end in formulas(self.data, *gap):
                element = self.tree.element_at(start)
                if before or element == elements[i + 1]:
                    yield _Piece(start, end, element, i)

    # what is written

    def _code(self, pre: int) -> None:
        """A code block, once; not line numbers beside code."""
        if pre in self.done:
            return
        self.done.add(pre)
        tree, data = self.tree, self.data
        start, end = tree.source[pre], tree.end[pre]
        inside = content_of(data, start, end)
        code, context = code_of(data, inside, end), tree.context(pre)
        beside = self.numbers_beside[context.row] > 1 and context.row >= 0
        if code.strip() and not (beside and is_line_numbers(code)):
            tags, around = [start, inside], pre
            for _ in range(2 if context.row < 0 else 6):  # out of the table of line numbers
                around = tree.up[around]
                tags.append(tree.source[around])
            self._write(context, fenced(code, language_of(data, tags)))

    def _table(self, table: int, row: int) -> bool:
        """Write the simple rows around `row` as a table, once; False if they are no grid."""
        if row in self.done:
            return True
        if table not in self.segments:
            rows = self.rows[table].items()
            self.segments[table] = [dict(group) for plain, group in
                                    groupby(rows, lambda one: one[0] not in self.complex)
                                    if plain]  # fmt: skip
        kept = next(group for group in self.segments[table] if row in group)
        self.segments[table].remove(kept)
        cells = [[self._cell(cell) for cell in line] for line in kept.values()]
        lines = self._numbered_code(kept)
        filled = [[cell for cell in line if cell.text] for line in cells]
        if lines is None and _is_grid([line for line in filled if line]):
            lines = pipe_table(cells)
        if lines is None:
            self.complex.update(kept)
            return False
        self.done.update(kept)
        self._write(self.tree.context(table), lines)
        return True

    def _cell(self, cell: int) -> Cell:
        start, end = self.tree.source[cell], self.tree.end[cell]
        low, high = bisect_left(self.starts, start), bisect_left(self.starts, end)
        units = self.units[low:high]
        text = "\n".join(filter(None, (inline(self.data, unit.start, unit.end) for unit in units)))
        attributes = attributes_at(self.data, start)
        columns, rows = (_number(attribute(attributes, name)) for name in ("colspan", "rowspan"))
        return Cell(text, columns, rows)

    def _numbered_code(self, rows: dict[int, list[int]]) -> list[str] | None:
        """Rows of a line number and a line of code as a code block; None if they are not."""
        numbers, lines = [], []
        for cells in rows.values():
            if len(cells) != 2 or not self._is_code(cells[1]):
                return None
            number, line = (self._inside(cell) for cell in cells)
            numbers.append(code_of(number, 0, len(number)))
            lines.append(code_of(line, 0, len(line)))
        shown = "\n".join(filter(None, numbers))
        return fenced("\n".join(lines), "") if is_line_numbers(shown or "1") else None

    def _is_code(self, cell: int) -> bool:
        classes = attribute(attributes_at(self.data, self.tree.source[cell]), "class")
        return "code" in classes or bool(_CODE_CELL.match(self._inside(cell)))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 6 else 1


def _is_grid(rows: Collection[Sized]) -> bool:
    """At least two rows and two columns."""
    return len(rows) > 1 and max(map(len, rows)) > 1
