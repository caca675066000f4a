"""Rows of verdicts: what was decided on each rubric item of an answer, and what each judge entry.

They are score records of the metric `verdict` with more columns, so that the shards of a grpo run
and the score rows of evaluations are read in one way. `value` is 1 for met, 0 for unmet and null
for unknown; of points it is their share of the maximum, and `item` is `points`. `judge` is empty in
the row of what was decided; there are rows of single judges where there are several, an auditor was
asked, or a judge made lookups (in `detail`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sabia.core.judge.verdict import Grade

VERDICT = "verdict"  # the metric of these rows
POINTS = "points"  # the item of points
FIELDS = (
    ("step", pa.int64()), ("item", pa.string()), ("judge", pa.string()), ("audit", pa.bool_()),
    ("verdict", pa.string()), ("weight", pa.float64()),
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """What was decided (judge '') or what one judge says on an item; verdict '': points.

    weight: of the item, or the maximum points. lookups: those that the judge's model made.
    """

    item: str
    verdict: str
    value: float | None
    weight: float
    judge: str = ""
    audit: bool = False
    lookups: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class VerdictRow:
    """One row; step: the training step of the answer, None for an evaluation."""

    model: str
    task: str
    item_id: str
    sample: int
    entry: Entry
    step: int | None = None

    def row(self) -> dict[str, object]:
        """The row as a record."""
        record = {**vars(self), **vars(self.entry), "metric": VERDICT}
        del record["entry"]
        lookups = record.pop("lookups")
        detail = json.dumps({"lookups": lookups}, ensure_ascii=False) if lookups else None
        return record | {"detail": detail}

    @classmethod
    def of(cls, row: Mapping[str, Any], model: str) -> "VerdictRow":
        """The row of a record; `model`: of one without a name."""
        detail = json.loads(row["detail"]) if row.get("detail") else {}
        entry = Entry(
            row.get("item") or "", row.get("verdict") or "", row["value"], row.get("weight") or 0.0,
            row.get("judge") or "", bool(row.get("audit")), tuple(detail.get("lookups", ())),
        )  # fmt: skip
        name, sample = row.get("model") or model, row.get("sample") or 0
        return cls(name, row["task"], row["item_id"], sample, entry, row.get("step"))


def entries_of(grade: Grade) -> list[Entry]:
    """What is entry in a grade: decided, and by each judge."""
    weights = {item: weight for item, _, weight in grade.verdicts}
    decided = [
        Entry(item, str(verdict), verdict.number, weight)
        for item, verdict, weight in grade.verdicts
    ]
    single = [
        Entry(item, str(verdict), verdict.number, weights.get(item, 0.0), opinion.judge,
              opinion.audit, tuple(made for made in opinion.lookups if item in made["items"]))
        for opinion in grade.opinions
        for item, verdict in opinion.verdicts.items()
    ]  # fmt: skip
    return decided + single


def entries_of_points(
    decided: float | None, maximum: float, by_judge: Sequence[tuple[str, bool, float | None]]
) -> list[Entry]:
    """What is entry of points: decided, and by each of several judges (name, audit, points)."""
    single = by_judge if len(by_judge) > 1 else ()

    def share(points: float | None) -> float | None:
        return None if points is None else points / max(maximum, 1e-9)

    return [
        Entry(POINTS, "", share(decided), maximum),
        *(Entry(POINTS, "", share(points), maximum, name, audit) for name, audit, points in single),
    ]


def to_batch(rows: Iterable[VerdictRow], schema: pa.Schema) -> pa.RecordBatch:
    """The rows as a record batch of a score schema with FIELDS."""
    return pa.RecordBatch.from_pylist([row.row() for row in rows], schema)
