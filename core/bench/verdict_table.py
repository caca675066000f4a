"""Rubric items over steps of training, or over models, and how far judges agree: from verdict rows.

The steps of a run are divided into at most BINS runs of steps of about equal length. The change is
that from the first column to the last one, with a normal 95 % interval whose standard errors are
clustered by prompt; the two columns count as independent.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from sabia.core import page
from sabia.core.bench.statistics import (
    Interval,
    finite,
    interval_text,
    numbered,
    standard_error,
    z_value,
)
from sabia.core.bench.verdict_rows import VerdictRow
from sabia.core.judge.agreement import Agreement

BINS = 8
LINES = 12  # items of a table on a terminal
ROWS = 60  # items of a table of the report


@dataclass(frozen=True)
class Cell:
    """Mean value of an item over the answers with a verdict (NaN without one)."""

    mean: float
    error: float
    known: int
    unknown: int


@dataclass(frozen=True)
class ItemRow:
    """One item: a cell for each column, and the change from the first column to the last one."""

    item: str
    cells: tuple[Cell, ...]
    change: Interval | None

    @property
    def unknown(self) -> int:
        """Answers without a verdict."""
        return sum(cell.unknown for cell in self.cells)


@dataclass(frozen=True)
class ItemTable:
    """The items of a task; model: the run whose steps are the columns, '' if they are models."""

    task: str
    model: str
    columns: tuple[str, ...]
    rows: tuple[ItemRow, ...]  # the largest decrease first

    @property
    def title(self) -> str:
        """Such as 'rubric: items over the steps of run'."""
        by = f"the steps of {self.model}" if self.model else "models"
        return f"{self.task}: rubric items over {by}"


def item_tables(rows: Iterable[VerdictRow]) -> list[ItemTable]:
    """The tables of what was decided: of each run its steps, of other rows the models."""
    cells: dict[tuple[str, str], dict[str, dict[str | int, list[VerdictRow]]]] = {}
    for row in rows:
        if not row.entry.judge:
            key = (row.task, "" if row.step is None else row.model)
            column = row.model if row.step is None else row.step
            items = cells.setdefault(key, {}).setdefault(row.entry.item, {})
            items.setdefault(column, []).append(row)
    return [_table(task, model, items) for (task, model), items in cells.items()]


def _table(
    task: str, model: str, items: Mapping[str, Mapping[str | int, list[VerdictRow]]]
) -> ItemTable:
    seen = dict.fromkeys(column for by_column in items.values() for column in by_column)
    groups: list[list[str | int]] = [[column] for column in seen]
    if model:
        steps = sorted(map(int, seen))
        groups = [part.tolist() for part in np.array_split(steps, min(BINS, len(steps)))]
    made = []
    for item, by_column in items.items():
        cells = tuple(
            _cell([row for column in group for row in by_column.get(column, ())])
            for group in groups
        )
        made.append(ItemRow(item, cells, _change(cells)))
    made.sort(key=lambda row: row.change.value if row.change else 0.0)
    columns = tuple(
        f"{group[0]}–{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups
    )
    return ItemTable(task, model, columns, tuple(made))


def _cell(rows: Sequence[VerdictRow]) -> Cell:
    known = [row for row in rows if row.entry.value is not None]
    if not known:
        return Cell(math.nan, math.nan, 0, len(rows))
    values = np.array([row.entry.value for row in known], float)
    error = standard_error(values, numbered(row.item_id for row in known))
    return Cell(float(values.mean()), error, len(known), len(rows) - len(known))


def _change(cells: Sequence[Cell]) -> Interval | None:
    first, last = cells[0], cells[-1]
    if len(cells) < 2 or not first.known or not last.known:
        return None
    change = last.mean - first.mean
    half = z_value() * math.hypot(first.error, last.error)
    half = math.inf if math.isnan(half) else half
    return Interval(change, change - half, change + half, "normal_clustered_by_prompt")


def agreements(rows: Iterable[VerdictRow]) -> dict[tuple[str, str], Agreement]:
    """How far judges agree, by task and model; none where only one judge was asked."""
    agreed: dict[tuple[str, str], Agreement] = {}

    def answer(row: VerdictRow) -> tuple[Any, ...]:
        return row.task, row.model, row.step, row.item_id, row.sample

    for (task, model, *_), entry in groupby(rows, answer):
        values: dict[tuple[str, bool], dict[str, float | None]] = {}
        for row in entry:
            judge = (row.entry.judge, row.entry.audit)
            values.setdefault(judge, {})[row.entry.item] = row.entry.value
        joint = values.pop(("", False), {})
        if values:
            named = [(name, audit, numbers) for (name, audit), numbers in values.items()]
            agreed.setdefault((task, model), Agreement()).add(joint, named)
    return {key: one for key, one in agreed.items() if one.tables}


def to_json(rows: Sequence[VerdictRow]) -> dict[str, object]:
    """The tables as plain data: `rubric_items` and `judges`; shares are fractions of 1."""
    return {
        "rubric_items": [
            _item_json(table, row) for table in item_tables(rows) for row in table.rows
        ],
        "judges": [
            {"task": task, "model": model} | row
            for (task, model), agreement in agreements(rows).items()
            for row in agreement.rows()
        ],
    }


def _item_json(table: ItemTable, row: ItemRow) -> dict[str, Any]:
    columns = [
        {
            "name": name,
            "met_share": cell.mean if cell.known else None,
            "verdicts": cell.known,
            "unknown": cell.unknown,
        }
        for name, cell in zip(table.columns, row.cells, strict=True)
    ]
    record = {"task": table.task, "model": table.model or None, "item": row.item, "over": columns}
    if row.change is None:
        return record
    ends = {name.replace("value", "change"): end for name, end in row.change.ends.items()}
    return record | {f"{name}_share": finite(end) for name, end in ends.items()}


def sections(rows: Sequence[VerdictRow]) -> list[str]:
    """The HTML of the tables."""
    parts = []
    for table in item_tables(rows):
        cells = [[row.item, *_texts(row), row.unknown or ""] for row in table.rows[:ROWS]]
        more = len(table.rows) - len(cells)
        note = f"and {more} more items" if more > 0 else ""
        columns = ["item", *table.columns, "change [95 %]", "no verdict"]
        parts += [f"<h3>{page.text(table.title)}</h3>", page.table(columns, cells, note)]
    for (task, model), agreement in agreements(rows).items():
        lines = [
            [row["item"] or "all items", " and ".join(row["judges"]), "yes" if row["audit"] else "",
             f"{row['agreement']:.1%}", "" if row["kappa"] is None else f"{row['kappa']:.2f}",
             row["verdicts"]]
            for row in agreement.rows()
        ]  # fmt: skip
        lines = lines[-ROWS:]  # the rows of all items are the last ones
        columns = ["item", "judges", "auditor", "agreement", "κ", "verdicts"]
        parts.append(f"<h3>{page.text(f'{task}: agreement of the judges of {model}')}</h3>")
        parts.append(page.table(columns, lines))
    return parts


def _texts(row: ItemRow) -> list[str]:
    cells = ["" if not cell.known else f"{cell.mean:.3f} ({cell.known})" for cell in row.cells]
    return [*cells, interval_text(row.change, "+.3f")]


def terminal_lines(rows: Sequence[VerdictRow]) -> list[list[str]]:
    """Tables of items with their first and last column for a terminal, as rows of cells."""
    tables = []
    for table in item_tables(rows):
        if len(table.columns) > 1:
            head = [table.title, table.columns[0], table.columns[-1], "change [95 %]"]
            texts = [(row.item, _texts(row)) for row in table.rows[:LINES]]
            tables += [head, *([item, cells[0], *cells[-2:]] for item, cells in texts)]
    return tables
