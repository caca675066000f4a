"""Cells with spans to the lines of a pipe table (GitHub Flavored Markdown 0.29, section 4.10).

The first row is the header, since the format has no table without one. A text of at most
_REPEATED characters is repeated in all places that its cell spans, as pandas.read_html does;
longer ones, and that of a cell alone in its row, stand in the first place.
"""

from typing import NamedTuple

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
