"""The items of a task's files, with their few-shot examples.

Examples come from `shots_data`, or are the first rows of the data, which are then not evaluated;
sampled ones are drawn for each item, by `shots_sampler`. Ids must be unique, because models are
compared item by item.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from sabia.core import notes
from sabia.core.bench.items import (
    Item,
    Message,
    Row,
    compiled,
    item_of,
    items_of_row,
    listed,
    names_of,
    render,
    target_text,
    value,
)
from sabia.core.bench.task import Task
from sabia.core.bench.task_data.data_files import files_of, read_rows
from sabia.core.errors import BadData, UsageError

SEED = 42  # of lm-evaluation-harness
FOLDERS_ABOVE = 5  # where a joined file is looked for


def load_items(task: Task, limit: int = 0, seed: int = 0) -> list[Item]:
    """The items of a TOML task, at most `limit` or the task's own limit.

    Raises UsageError for a missing file, BadData for rows that do not give what the task names.
    """
    rows = _rows_of(task, task.data, task.where)
    pool = _Pool(task, rows) if task.shots else None
    if pool and task.shots_sampler == "first" and not task.shots_data:
        rows = rows[task.shots :]
    cut = min(filter(None, (limit, task.limit)), default=len(rows))
    numbered, generator = list(enumerate(rows)), random.Random(SEED + seed)
    if task.shots_sampler == "sequence":
        generator.shuffle(numbered)
        numbered = numbered[:cut]
    items = [item for number, row in numbered for item in items_of_row(task, row, number)]
    ids: set[str] = set()
    for item in items:
        if item.id in ids:
            reason = f"two items have the id {item.id!r}; models are compared by id"
            raise BadData(f"{task.name}: {reason}")
        ids.add(item.id)
    items = items[:cut] if limit or task.limit else items
    if doubtful := [item.id for item in items if len(set(item.choices)) < len(item.choices)]:
        what = f"{len(doubtful)} of {len(items)} items have equal options"
        notes.warn(f"{task.name}: {what}, of which only the first can be chosen ({doubtful[0]})")
    if not items:
        raise BadData(f"{task.name}: no item in {task.data} (after where and few-shot examples)")
    if pool:
        return [_with_shots(task, item, pool.drawn(item, seed, generator)) for item in items]
    return [i if i.messages else replace(i, text=_system(task, i) + i.text) for i in items]


class _Pool:
    """The rows of which examples are drawn."""

    def __init__(self, task: Task, rows: Sequence[Row]) -> None:
        self.task = task
        if task.shots_data:
            rows = _rows_of(task, task.shots_data, "" if task.shots_where else task.where)
        # an expression that names the item is looked at for each
        self.fits: Callable[[Row, Row | None], bool] | None = None
        if task.shots_where:
            keeps = _condition(task, "shots_where", task.shots_where)
            if re.search(r"\bitem\b", task.shots_where):
                self.fits = keeps
            else:
                rows = [row for row in rows if keeps(row, None)]
        self.rows = rows
        self.made = lru_cache(maxsize=None)(self._made)

    def _made(self, number: int) -> Item:
        return item_of(self.task, self.rows[number], number)

    def drawn(self, item: Item, seed: int, generator: random.Random) -> list[Item]:
        """The examples of an item. BadData if there are too few rows."""
        task, fitting = self.task, list(range(len(self.rows)))
        if self.fits:
            fitting = [n for n in fitting if self.fits(self.rows[n], item.fields)]
        if task.shots_sampler == "random":
            fitting = [n for n in fitting if self.made(n).id != item.id]
        if len(fitting) < task.shots:
            raise BadData(f"{task.name}: {len(fitting)} rows for {task.shots} few-shot examples")
        if task.shots_sampler == "first":
            chosen = fitting[: task.shots]
        elif task.shots_sampler == "random":
            chosen = random.Random(f"{seed} {task.name} {item.id}").sample(fitting, task.shots)
        else:
            chosen = generator.sample(fitting, task.shots)
        return [self.made(number) for number in chosen]


def _with_shots(task: Task, item: Item, shots: Sequence[Item]) -> Item:
    if not item.messages:
        texts = [s.text + task.delimiter + target_text(task, s) + task.separator for s in shots]
        every = enumerate([*texts, item.text], 1)
        texts = [render(task.heading, {"number": number}) + text for number, text in every]
        return replace(item, text=_system(task, item) + "".join(texts))
    system = tuple(m for m in item.messages[:1] if m["role"] == "system")
    turns: list[Message] = []
    for shot in shots:
        turns += [turn for turn in shot.messages if turn["role"] != "system"]
        turns.append({"role": "assistant", "content": target_text(task, shot)})
    return replace(item, messages=(*system, *turns, *item.messages[len(system) :]))


def _system(task: Task, item: Item) -> str:
    return render(task.system, item.fields) if task.system else ""


def _rows_of(task: Task, name: str, where: str) -> list[dict[str, Any]]:
    """The rows of the files of a name that satisfy an expression. UsageError, BadData."""
    path = task.resolve(name)
    files = files_of(path)
    if not files:
        source = f" (expected that of {task.source})" if task.source else ""
        raise UsageError(f"task {task.name}: no file {path}{source}")
    rows: list[dict[str, Any]] = []
    for file in files:
        read = read_rows(file, f"task {task.name}")
        if task.rows:
            read = [dict(row) for whole in read for row in _listed(task, whole, file)]
        rows += _with_joined(task, read, file) if task.joined else read
    keeps = _condition(task, "where", where) if where else None
    return [row for row in rows if keeps(row, None)] if keeps else rows


def _listed(task: Task, whole: Row, file: Path) -> Sequence[Any]:
    path = [task.rows] if "{" in task.rows or task.rows in whole else task.rows.split(".")
    try:
        rows: list[Any] = [whole]
        for name in path:
            outer = [{} if row is whole else row for row in rows]
            inner = [[] if row.get(name) == [] else listed(name, row) for row in rows]
            rows = [{**o, **one} if isinstance(one, dict) else one
                    for o, every in zip(outer, inner, strict=True) for one in every]  # fmt: skip
    except BadData as error:
        raise BadData(f"{task.name}: {file}: rows: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise BadData(f"{task.name}: {file}: rows gives {rows!r:.60} (expected objects)")
    return rows


def _condition(task: Task, key: str, text: str) -> Callable[[Row, Row | None], bool]:
    """(row, the row that is asked) → whether an expression holds. UsageError."""
    try:
        keep = compiled(text)
    except jinja2.TemplateError as error:
        raise UsageError(f"{task.name}: {key} {text!r}: {error}") from error

    def holds(row: Row, item: Row | None) -> bool:
        try:
            return bool(keep(**names_of(row), **({} if item is None else {"item": item})))
        except (jinja2.TemplateError, TypeError) as error:
            columns = f"; the columns are {', '.join(map(str, row)):.80}"
            raise UsageError(f"{task.name}: {key} {text!r}: {error}{columns}") from error

    return holds


def _with_joined(task: Task, rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows of a file with what is joined to each as a column. UsageError, BadData."""
    name = Path(task.joined).name
    near = [path.parent / task.joined, *(p / name for p in path.parents[:FOLDERS_ABOVE])]
    other = next((file for file in near if file.exists()), near[0])
    joined = read_rows(other, f"task {task.name}: joined")
    if not task.joined_on:
        whole = joined[0] if len(joined) == 1 else joined
        return [row | {"joined": whole} for row in rows]
    by_key = {str(value(task.joined_on, row)): row for row in joined}
    keys = [str(value(task.joined_on, row)) for row in rows]
    if missing := [key for key in keys if key not in by_key]:
        raise BadData(f"{task.name}: {other}: no row with {task.joined_on} {missing[0]!r}")
    return [row | {"joined": by_key[key]} for row, key in zip(rows, keys, strict=True)]
