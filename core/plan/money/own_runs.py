"""One's own runs for a scaling law: a table, or a directory of runs of `sabia pretrain`."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.money.fitted import FittedLaw, OwnRun, fit
from sabia.core.plan.runs import read_runs

MOST_ROWS = 1_000_000
RUN_RECORD = "run.json"  # of a run directory; core.train.run_directory


def fitted_law(settings: PlanOptions) -> FittedLaw | None:
    """The law of --fit; None without it. Raises UsageError, BadData."""
    if settings.fit is None:
        return None
    rows = _run_directories(settings.fit) if os.path.isdir(settings.fit) else _rows(settings.fit)
    return fit(own_runs(rows))


def _rows(path: str) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(read_runs(path)):
        if number == MOST_ROWS:
            raise UsageError(f"--fit: {path}: more than {MOST_ROWS:,} rows")
        yield row


def _run_directories(folder: str) -> Iterator[tuple[str, Any]]:
    """A row for each run of `sabia pretrain` in a folder: run.json, and the size of its model."""
    from sabia.core.plan.counting.known import architecture_of

    for name in sorted(os.listdir(folder)):
        record, model = (os.path.join(folder, name, each) for each in (RUN_RECORD, "final"))
        if not os.path.isfile(record) or not os.path.isdir(model):
            continue
        try:
            with open(record, encoding="utf-8") as file:
                row = json.loads(file.read(1 << 24))
        except (OSError, ValueError, RecursionError) as error:
            raise BadData(f"--fit: {record}: {str(error)[:100]}") from None
        if isinstance(row, dict):
            yield name, {**row, "run": name, "params": architecture_of(model).active_params}


COLUMNS = {"params": ("params", "active_params"), "tokens": ("tokens",),
           "loss": ("validation_loss", "loss", "value")}  # fmt: skip


def own_runs(rows: Iterable[tuple[str, Any]]) -> list[OwnRun]:
    """The last row of each run that has all three figures; `run` (or `run_id`) names the run.

    rows: pairs of a place and a row, or why it is none. Raises BadData without any run.
    """
    ends: dict[str, OwnRun] = {}
    for where, row in rows:
        if isinstance(row, Exception):
            raise row
        run = own_run(row)
        if run is not None:
            ends[str(row.get("run", row.get("run_id", where)))] = run
    if not ends:
        wanted = ", ".join(" or ".join(names) for names in COLUMNS.values())
        raise BadData(f"--fit: no row has the columns {wanted} with numbers above 0")
    return list(ends.values())


def own_run(row: Mapping[str, Any]) -> OwnRun | None:
    """The figures of a row; None where one is missing or no number above 0."""
    figures = []
    for names in COLUMNS.values():
        values = [row[name] for name in names if row.get(name) is not None]
        value = values[0] if values else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            return None
        figures.append(float(value))
    return OwnRun(*figures)
