"""Calibration rows: token ids of a uniform sample of chat, document or token records.

Some of the sampled records are held out: the quantized model is compared with the original on them.

Calibration has to represent real use, so the rows are the user's own records, each drawn with the
same probability (reservoir sampling; the same rows for the same seed).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.generate.chat import render
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source

KIND_COLUMNS = {"chat": "messages", "document": "text", "tokens": "input_ids"}


@dataclass(frozen=True)
class Row:
    """The token ids of a record, and its column `source` ('' if it has none)."""

    ids: list[int]
    source: str


@dataclass(frozen=True)
class CalibrationRows:
    """The kind of the records, those to calibrate on, and those that are held out."""

    kind: str
    rows: list[Row]
    held_out: list[Row]


def read_rows(
    job: Job, tokenizer: Any, samples: int, held_out: int, length: int
) -> CalibrationRows:
    """At most `samples` records, and `held_out` others, each at most `length` tokens long.

    The sample is uniform over all rows (reservoir) and the same for the same seed. Of fewer records
    than both numbers, a fifth at most is held out. A record whose tokens are also calibrated on is
    not held out.
    """
    sources = open_inputs(job, "document")
    kind = _kind(sources)
    rng, kept, seen = random.Random(job.seed), list[Any](), 0
    wanted = samples + held_out
    for source in sources:
        for batch in replace(source, kind=kind).batches():
            for row in batch.to_pylist():
                seen += 1
                if len(kept) < wanted:
                    kept.append(row)
                elif (slot := rng.randrange(seen)) < wanted:
                    kept[slot] = row
    rows, refused = list[Row](), list[str]()
    for row in kept:
        name = str(row.get("source") or "")
        try:
            encoded = [ids[:length] for ids in _ids(row, kind, tokenizer) if len(ids) > 1]
            rows += [Row(ids, name) for ids in encoded]
        except BadData as error:
            refused.append(str(error))
    why = f"; {len(refused)} are left out, the first because {refused[0]}" if refused else ""
    if not rows:
        raise BadData(f"calibration: no usable row among {seen} {kind} records{why}")
    if refused:
        notes.warn(f"calibration: {len(rows)} of {len(kept)} {kind} records are used{why}")
    apart = min(held_out, max(len(rows) - samples, len(rows) // 5, min(1, len(rows) - 1)))
    chosen = set(rng.sample(range(len(rows)), apart))
    used = [row for number, row in enumerate(rows) if number not in chosen][:samples]
    known = {tuple(row.ids) for row in used}
    others = (rows[number] for number in sorted(chosen))
    return CalibrationRows(kind, used, [row for row in others if tuple(row.ids) not in known])


def _kind(sources: Sequence[Source]) -> str:
    """The kind whose column the first source has."""
    for kind in KIND_COLUMNS:
        try:
            first = next(replace(sources[0], kind=kind).batches(rows=1), None)
        except BadData as error:
            if "no column" not in str(error):
                raise
            continue
        if first is not None and first.num_rows:
            return kind
    known = ", ".join(KIND_COLUMNS.values())
    raise BadData(f"{sources[0].name}: not calibration records (expected a column of {known})")


def _ids(row: Mapping[str, Any], kind: str, tokenizer: Any) -> Iterator[list[int]]:
    if kind == "chat":
        yield tokenizer.encode(render(row["messages"], tokenizer, tools=row.get("tools")))
    elif kind == "document":
        yield tokenizer.encode_ordinary(row["text"])
    else:
        ids, start = list(row["input_ids"]), 0
        for size in row["document_lengths"] or [len(ids)]:
            yield ids[start : start + size]
            start += size
