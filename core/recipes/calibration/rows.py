"""Calibration rows: token ids of a uniform sample of chat, document or token records.

Some of the sampled records are held out: the quantized model is compared with the original on them.

Calibration has to represent real use, so the rows are the user's own records, each drawn with the
same probability (reservoir sampling; the same rows for the same seed), or chosen from such a sample
to be like a sample of the use (`usage`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sabia.core import notes
from sabia.core.errors import BadData, UsageError
from sabia.core.generate.chat import render
from sabia.core.shards.inputs import from_path, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text.tokenize.tokenizer import Tokenizer

if TYPE_CHECKING:  # tables of languages are loaded only for records of use
    from sabia.core.recipes.calibration.usage_match import Match, Traits

TEXT_TOKENS = 1024  # of a token record, to tell its language
KIND_COLUMNS = {"chat": "messages", "document": "text", "tokens": "input_ids"}


@dataclass(frozen=True)
class Row:
    """The token ids of a record, and its column `source` ('' if it has none)."""

    ids: list[int]
    source: str


@dataclass(frozen=True)
class CalibrationRows:
    """The kind of the records, those to calibrate on, those that are held out, and how far both are
    from a sample of use."""

    kind: str
    rows: list[Row]
    held_out: list[Row]
    match: Match | None = None


def read_rows(
    job: Job, tokenizer: Tokenizer | None, samples: int, held_out: int, length: int, usage: str = ""
) -> CalibrationRows:
    """At most `samples` records, and `held_out` others, each at most `length` tokens long.

    The sample is uniform over all rows (reservoir) and the same for the same seed; with records of
    `usage` (a path), it is chosen from a larger one to be like them (see `usage_match`). Of fewer
    records than both numbers, a fifth at most is held out. A record whose tokens are calibrated on
    too is not held out.
    """
    reservoir = wanted = samples + held_out
    if usage:
        from sabia.core.recipes.calibration import usage_match

        reservoir *= usage_match.CANDIDATES
    rng, match = random.Random(job.seed), None
    kind, rows, texts = _records(open_inputs(job, "document"), reservoir, rng, tokenizer, "")
    if usage:
        sources = from_path(usage, "document", "--usage")
        like = _traits(*_records(sources, usage_match.USAGE_RECORDS, rng, tokenizer, "--usage: "))
        candidates = _traits(kind, rows, texts)
        order = usage_match.chosen_numbers(like, candidates, wanted, job.seed)
        rows = [rows[number] for number in order]
        match = usage_match.compared(like, [candidates[number] for number in order])
    rows = [Row(row.ids[:length], row.source) for row in rows]
    apart = min(held_out, max(len(rows) - samples, len(rows) // 5, min(1, len(rows) - 1)))
    chosen = set(rng.sample(range(len(rows)), apart))
    used_rows = [row for number, row in enumerate(rows) if number not in chosen][:samples]
    known = {tuple(row.ids) for row in used_rows}
    others = (rows[number] for number in sorted(chosen))
    apart_rows = [row for row in others if tuple(row.ids) not in known]
    return CalibrationRows(kind, used_rows, apart_rows, match)


def _records(
    sources: Sequence[Source], most: int, rng: random.Random, tokenizer: Tokenizer | None, what: str
) -> tuple[str, list[Row], list[Mapping[str, Any]]]:
    """(kind, rows, the record of each) of a uniform sample of `most` records."""
    kind, kept, seen = _kind(sources), list[Any](), 0
    for source in sources:
        for batch in replace(source, kind=kind).batches():
            for row in batch.to_pylist():
                seen += 1
                if len(kept) < most:
                    kept.append(row)
                elif (slot := rng.randrange(seen)) < most:
                    kept[slot] = row
    rows, records, refused = list[Row](), list[Mapping[str, Any]](), list[str]()
    for record in kept:
        name = str(record.get("source") or "")
        try:
            encoded = [ids for ids in _ids(record, kind, tokenizer) if len(ids) > 1]
        except BadData as error:
            refused.append(str(error))
            continue
        rows += [Row(ids, name) for ids in encoded]
        records += [_without_ids(record, ids, kind, tokenizer) for ids in encoded]
    why = f"; {len(refused)} are left out, the first because {refused[0]}" if refused else ""
    if not rows:
        raise BadData(f"{what}calibration: no usable row among {seen} {kind} records{why}")
    if refused:
        notes.warn(f"{what}calibration: {len(rows)} of {len(kept)} {kind} records are used{why}")
    return kind, rows, records


def _without_ids(
    record: Mapping[str, Any], ids: list[int], kind: str, tokenizer: Tokenizer | None
) -> Mapping[str, Any]:
    """The record of a row: of token records, one with the text of these ids."""
    if kind != "tokens":
        return record
    text = tokenizer.decode(ids[:TEXT_TOKENS]) if tokenizer else ""
    return {"source": record.get("source"), "text": text}


def _traits(kind: str, rows: Sequence[Row], records: Sequence[Mapping[str, Any]]) -> list[Traits]:
    from sabia.core.recipes.calibration import usage_match

    kind = "chat" if kind == "chat" else "document"
    texts = [usage_match.text_in(record, kind) for record in records]
    return usage_match.traits(records, kind, [len(row.ids) for row in rows], texts)


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


def _ids(row: Mapping[str, Any], kind: str, tokenizer: Tokenizer | None) -> Iterator[list[int]]:
    if kind == "tokens":
        ids, start = list(row["input_ids"]), 0
        for size in row["document_lengths"] or [len(ids)]:
            yield ids[start : start + size]
            start += size
        return
    if tokenizer is None:
        raise UsageError(f"--model has no tokenizer.json for {kind} records (expected token rows)")
    if kind == "chat":
        yield tokenizer.encode(render(row["messages"], tokenizer, tools=row.get("tools")))
    else:
        yield tokenizer.encode_ordinary(row["text"])
