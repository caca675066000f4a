"""Calibration rows: token ids of a uniform sample of chat, document or token records.

Calibration has to represent real use, so the rows are the user's own records, each drawn with the
same probability (reservoir sampling; the same rows for the same seed).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.generate.chat import render
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source

KIND_COLUMNS = {"chat": "messages", "document": "text", "tokens": "input_ids"}


def read_rows(job: Job, tokenizer: Any, samples: int, length: int) -> tuple[str, list[list[int]]]:
    """(kind of the records, token ids of at most `samples` of them, each at most `length` long).

    The sample is uniform over all rows (reservoir) and the same for the same seed.
    """
    sources = open_inputs(job, "document")
    kind = _kind(sources)
    rng, kept, seen = random.Random(job.seed), list[Any](), 0
    for source in sources:
        for batch in replace(source, kind=kind).batches():
            for row in batch.to_pylist():
                seen += 1
                if len(kept) < samples:
                    kept.append(row)
                elif (slot := rng.randrange(seen)) < samples:
                    kept[slot] = row
    rows, refused = list[list[int]](), list[str]()
    for row in kept:
        try:
            rows += [ids[:length] for ids in _ids(row, kind, tokenizer) if len(ids) > 1]
        except BadData as error:
            refused.append(str(error))
    why = f"; {len(refused)} are left out, the first because {refused[0]}" if refused else ""
    if not rows:
        raise BadData(f"calibration: no usable row among {seen} {kind} records{why}")
    if refused:
        notes.warn(f"calibration: {len(rows)} of {len(kept)} {kind} records are used{why}")
    rows = rows[:samples]
    return kind, rows


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
