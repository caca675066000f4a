"""Score records: one metric of one sample of one item of one model.

Everything else (values, intervals, comparisons, the report) is computed from these rows only, so
the rows of an earlier run can be compared with those of a new one without running a model again.
Rows of the metric `verdict` are in `verdict_rows`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sabia.core.bench.verdict_rows import FIELDS, VERDICT, VerdictRow
from sabia.core.shards import schemas

BATCH_ROWS = 10_000


def schema() -> pa.Schema:
    """The score schema with the columns model, sample, cluster and shard, and those of verdicts."""
    own = (("model", pa.string()), ("sample", pa.int64()), ("cluster", pa.string()),
           ("shard", pa.string()))  # fmt: skip
    return pa.schema([*schemas.KINDS["score"], *own, *FIELDS])


@dataclass(frozen=True)
class Score:
    """One row. detail: the answer, on the first metric of each sample. cluster: that of the item,
    '' if it is one of its own. shard: of a divided run, such as `0/4 of 120` items."""

    model: str
    task: str
    item_id: str
    sample: int
    metric: str
    value: float
    detail: Mapping[str, Any] | None = None
    cluster: str = ""
    shard: str = ""

    def row(self) -> dict[str, object]:
        """The row as a record."""
        text = None if self.detail is None else json.dumps(self.detail, ensure_ascii=False)
        return vars(self) | {"detail": text}


def scores_of(
    model: str,
    task: str,
    item_id: str,
    sample: int,
    values: Mapping[str, float],
    detail: Mapping[str, Any] | None = None,
) -> list[Score]:
    """Rows of several metrics of one sample; the first one has the detail."""
    return [
        Score(model, task, item_id, sample, name, float(value), None if number else detail)
        for number, (name, value) in enumerate(values.items())
    ]


ScoreRow = Score | VerdictRow


def to_batches(scores: Iterable[ScoreRow]) -> list[pa.RecordBatch]:
    """The rows as record batches."""
    rows = [score.row() for score in scores]
    parts = (rows[i : i + BATCH_ROWS] for i in range(0, len(rows), BATCH_ROWS))
    return [pa.RecordBatch.from_pylist(part, schema()) for part in parts]


def from_batch(batch: pa.RecordBatch, name: str) -> list[ScoreRow]:
    """The rows of a batch of score records; `name` is the model of rows without one."""
    scores: list[ScoreRow] = []
    for row in batch.to_pylist():
        if row.get("metric") == VERDICT:
            scores.append(VerdictRow.of(row, name))
            continue
        model, sample = row.get("model") or name, row.get("sample") or 0
        metric = row.get("metric") or "share"
        detail = json.loads(row["detail"]) if row.get("detail") else None
        given = (model, row["task"], row["item_id"], sample, metric, row["value"], detail)
        scores.append(Score(*given, row.get("cluster") or "", row.get("shard") or ""))
    return scores


def missing_shards(scores: Iterable[Score]) -> list[str]:
    """What rows of divided runs lack of a whole one, in words, for each task and model."""
    cells: dict[tuple[str, str], dict[str, set[int]]] = {}
    for score in scores:
        if score.shard:
            part, _, items = score.shard.partition(" of ")
            index, _, count = part.partition("/")
            by_shards = cells.setdefault((score.task, score.model), {})
            by_shards.setdefault(f"{count} {items}", set()).add(int(index))
    missing = []
    for (task, model), divisions in cells.items():
        if len(divisions) > 1:
            numbers = " and ".join(key.replace(" ", " shards of ") for key in divisions)
            missing.append(f"{task}, {model}: rows of several divisions ({numbers} items)")
        for key, present in divisions.items():
            parts, total = map(int, key.split())
            # a task of fewer items than shards has none in the last ones
            if lacks := [f"{i}/{parts}" for i in range(min(parts, total)) if i not in present]:
                missing.append(f"{task}, {model}: no rows of shard {', '.join(lacks)}")
    return missing
