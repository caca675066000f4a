"""Held-out tasks: how often they were scored, and their gap to the development tasks.

A task with `split = "held-out"` tells something about new data only while no decision was made by
it. Each run that scores one adds a line to `held_out.jsonl` in the cache of calls; what counts as
the same set is a digest of its items. The gap is the mean of a model's development tasks of the
same capability minus its held-out value; a gap above 0 says that the development tasks flatter.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sabia.core import page
from sabia.core.bench.items import Item
from sabia.core.bench.result_summary import Summary, unit_key
from sabia.core.bench.statistics import Interval, interval_text, macro_mean
from sabia.core.bench.task import Task

HELD_OUT = "held-out"
NAME = "held_out.jsonl"
COLUMNS = ("held-out task", "model", "scored", "held-out [95 %]", "development [95 %]",
           "gap [95 %]")  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """A held-out task: how often its items were scored, this time included (0: not known), and
    where there are development tasks of its capability, their mean and the gap."""

    task: str
    model: str
    scored: int
    value: Interval
    development: Interval | None
    gap: Interval | None


def digest_of(items: Sequence[Item]) -> str:
    """A digest of a set of items, in any order."""
    texts = sorted(repr((item.id, item.question, item.choices, item.answer)) for item in items)
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()


def count(
    folder: Path, tasks: Sequence[Task], items: Mapping[str, Sequence[Item]],
    models: Sequence[str], scored: bool,
) -> dict[str, int]:  # fmt: skip
    """How often each held-out task was scored; scored: add this run, which has scored them."""
    held = {task.name: digest_of(items[task.name]) for task in tasks if task.split == HELD_OUT}
    if not held:
        return {}
    file = folder / NAME
    if scored:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"task": task, "items": digest, "models": list(models)}) + "\n"
            for task, digest in held.items()
        ]
        opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(opened, "".join(lines).encode())
        finally:
            os.close(opened)
    seen: dict[str, int] = {}
    if file.exists():
        for line in file.read_text("utf-8").splitlines():
            try:
                digest = json.loads(line)["items"]
            except (ValueError, KeyError, TypeError):
                continue  # a line that a kill has cut
            seen[digest] = seen.get(digest, 0) + 1
    return {task: seen.get(digest, 0) for task, digest in held.items()}


def gaps(summary: Summary, tasks: Sequence[Task], times: Mapping[str, int]) -> list[Gap]:
    """The held-out tasks of each model."""
    made = []
    for task in tasks:
        if task.split != HELD_OUT:
            continue
        unit = unit_key(summary.headlines.get(task.name, ""))
        others = [
            other.name
            for other in tasks
            if other.split != HELD_OUT
            and other.capability == task.capability
            and unit_key(summary.headlines.get(other.name, "")) == unit == "share"
        ]
        for model in summary.models:
            result = summary.result(model, task.name)
            if result is None or not result.items:
                continue
            known = [r.interval for name in others if (r := summary.result(model, name))]
            mean = macro_mean(known) if known and len(known) == len(others) else None
            gap = None
            if mean is not None:
                difference = mean.value - result.interval.value
                half = math.hypot(mean.half_width, result.interval.half_width)
                gap = Interval(difference, difference - half, difference + half, "of_two_intervals")
            made.append(Gap(task.name, model, times.get(task.name, 0), result.interval, mean, gap))
    return made


def lines(made: Sequence[Gap]) -> list[list[str]]:
    """A row of texts for each."""
    return [
        [one.task, one.model, f"{one.scored} times" if one.scored else "", interval_text(one.value),
         interval_text(one.development), interval_text(one.gap, "+.3g")]
        for one in made
    ]  # fmt: skip


def section(made: Sequence[Gap]) -> list[str]:
    """The section of the report, none without held-out tasks."""
    note = "the gap is the mean of the development tasks of the same capability minus the held-out"
    table = page.table(COLUMNS, lines(made), note)
    return [page.section("Held-out tasks", [table])] if made else []


def to_json(made: Sequence[Gap]) -> list[dict[str, Any]]:
    """Plain data."""
    records = []
    for one in made:
        record: dict[str, Any] = {"task": one.task, "model": one.model, "scored": one.scored}
        for name, interval in (("held_out", one.value), ("development", one.development),
                               ("gap", one.gap)):  # fmt: skip
            if interval is not None:
                record |= {f"{name}_{end}": value for end, value in interval.ends.items()}
        records.append(record)
    return records
