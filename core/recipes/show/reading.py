"""The rows that are shown: in order, those for which an expression is true, or a sample.

Files are opened when their rows are needed, and of Parquet files only the row groups that have rows
to show are read. Rows keep all that they have: nothing is rejected, and a line that is no JSON
object is shown as a rejected row.
"""

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from sabia.core import stop
from sabia.core.digests import open_parquet, suppress_notes
from sabia.core.errors import BadData, UsageError
from sabia.core.shards import arrow_arrays, records, schemas
from sabia.core.shards.atomic import read_json
from sabia.core.shards.inputs import expand, from_path, from_stdin, keys_of, open_binary, sniff
from sabia.core.shards.job import is_stream
from sabia.core.shards.json_lines import UNFIT, decompressed, objects, renamed
from sabia.core.shards.layout import MANIFEST
from sabia.core.shards.sources import Source
from sabia.core.text.predicate import Predicate

AT_ONCE = 128  # rows that are read, sorted and looked up together
RUN_RECORD = "run.json"
OF_RUNS = {"grpo": "samples", "sft": "rows"}  # command → the folder of a run with its rows
METRICS = "metrics.jsonl"
Values = dict[str, Any]
Rows: TypeAlias = "pa.RecordBatch | list[Values]"


class Row(NamedTuple):
    """A row, its shard, and its number there, from 0."""

    values: Values
    source: Source
    number: int


def sources_of(
    inputs: Sequence[str], text_column: str = "", once: bool = False
) -> Iterator[Source]:
    """The shards of the inputs; raises UsageError for an input that is not there. Whether a file
    can be read is known when it is its turn. once: they are read once, see `inputs.from_stdin`."""
    suppress_notes()
    names = [
        [given] if given == "-" or is_stream(given) else expand(_of_run(given))
        for given in inputs or ("-",)
    ]
    return _opened([name for several in names for name in several], text_column, once)


def _opened(names: Sequence[str], text_column: str, once: bool) -> Iterator[Source]:
    for name in names:
        if name == "-" or is_stream(name):
            sources = from_stdin("any", once) if name == "-" else from_path(name, "any")
        else:
            opener = partial(open_binary, name)
            sources = [Source(name, "any", sniff(opener, name), opener, keys_of(name))]
        for source in sources:
            shown = replace(source, text_column=text_column)
            if text_column and source.form != "jsonl":
                with source.reading():
                    if text_column not in source.stored_schema().names:
                        raise BadData(f"no column {text_column!r} (--text-column)")
            yield shown


def _of_run(given: str) -> str:
    """The rows of a run directory; any other path as it is."""
    record = os.path.join(given, RUN_RECORD)
    if not os.path.isfile(record):
        return given
    try:
        command = str(dict(json.loads(open_binary(record).read()))["identity"]["command"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{record}: not the record of a run ({error})") from error
    rows = os.path.join(given, OF_RUNS.get(command, METRICS))
    path = rows if os.path.exists(rows) else os.path.join(given, METRICS)
    if not os.path.exists(path):
        raise UsageError(f"{given}: a run of {command} without samples, rows and metrics yet")
    return path


class Where:
    """The rows for which an expression is true; without one, all."""

    def __init__(self, text: str, strict: bool = True) -> None:
        """strict: the first rows must have all names."""
        self.predicate = Predicate(text) if text else None
        self._strict = strict
        self.unknown = self.predicate.names if self.predicate else set()  # in all rows until now
        self._types = dict[str, pa.DataType]()

    def columns(self, source: Source) -> list[str]:
        """The columns of a shard that are read to decide; [] for all."""
        if self.predicate is None or source.form == "jsonl":
            return []
        stored = [*source.named(source.stored_schema().names), *dict(source.keys)]
        return [name for name in stored if name in self.predicate.names or name == "scores"]

    def mask(self, rows: Rows, shard: str) -> np.ndarray:
        """bool[n]. Raises UsageError for a name that the first rows do not have, if strict."""
        if self.predicate is None or not len(rows):
            return np.ones(len(rows), bool)
        if isinstance(rows, pa.RecordBatch):
            return self._mask(rows, shard)
        fitted, kind = [], _kind_of(rows)
        extras = records.extra_fields(rows, kind)
        for values in rows:
            try:
                fitted.append(records.fit_row(values, kind, extras))
            except UNFIT:
                fitted.append({})
        return self._mask(records.to_batch(fitted, kind, extras), shard)

    def _mask(self, batch: pa.RecordBatch, shard: str) -> np.ndarray:
        assert self.predicate is not None
        index, known = batch.schema.get_field_index("scores"), set(batch.schema.names)
        if index >= 0:
            scores = arrow_arrays.fit(batch.column(index))
            known |= set(arrow_arrays.names_of(scores.type) or ())
            batch = batch.set_column(index, pa.field("scores", scores.type), scores)
        missing = self.predicate.names - known
        if missing and self._strict:
            self.predicate.check_names(batch, shard)
        self._strict = False
        self.unknown &= missing
        self._types |= {field.name: field.type for field in batch.schema}
        for name in sorted(missing):  # which other rows have
            kind = self._types.get(name, pa.null())
            batch = batch.append_column(name, pa.nulls(batch.num_rows, kind))
        return self.predicate.evaluate(batch)


def _kind_of(rows: Sequence[Values]) -> str:
    """The kind of record that JSON objects are; any if they are none."""
    names = {name for values in rows for name in values}
    return next((kind for kind, needed in schemas.REQUIRED.items() if names >= set(needed)), "any")


def rows_of(source: Source, where: Where) -> Iterator[list[Row]]:
    """The rows of a shard for which the expression is true, at most AT_ONCE at a time."""
    with source.reading():
        for part, first in _parts(source, where):
            at = first
            for rows in batches_of(part):
                stop.check()
                kept = np.flatnonzero(where.mask(rows, source.name)).tolist()
                if kept:
                    yield kept_rows(rows, source, at, kept)
                at += len(rows)


def _parts(source: Source, where: Where) -> Iterator[tuple[Source, int]]:
    """The shard, or its row groups that have rows for which the expression is true; each with the
    number of its first row."""
    columns = where.columns(source) if source.form == "parquet" else []
    if not columns:
        yield source, 0
        return
    first = 0
    for group, rows in enumerate(_group_rows(source)):
        part = replace(source, groups=(group,))
        masks = (where.mask(batch, source.name) for batch in part.batches(columns))
        if any(mask.any() for mask in masks):
            yield part, first
        first += rows


def batches_of(source: Source, columns: Sequence[str] | None = None) -> Iterator[Rows]:
    """At most AT_ONCE rows at a time; of JSON lines as objects, unless the shard has a kind."""
    if source.form != "jsonl" or source.kind != "any":
        yield from source.batches(columns, AT_ONCE)
        return
    pending = list[Values]()

    def rejected(row: Values, reason: str) -> None:
        pending.append({"reason": reason, "shard": source.name, "record": records.to_json(row)})

    with source.open() as file:
        rows = objects(decompressed(file), rejected)
        if source.text_column:
            rows = renamed(rows, source.text_column, rejected)
        for row, _ in rows:
            pending.append({**dict(source.keys), **row})
            if len(pending) >= AT_ONCE:
                yield pending[:]
                pending.clear()
    if pending:
        yield pending


def kept_rows(rows: Rows, source: Source, first: int, kept: Sequence[int]) -> list[Row]:
    """Some rows of a batch, whose first row has the number `first` in its shard."""
    values = _values(rows, kept)
    return [Row(one, source, first + n) for one, n in zip(values, kept, strict=True)]


def _values(rows: Rows, kept: Sequence[int]) -> list[Values]:
    """Rows as Python values; bytes that are not UTF-8 become U+FFFD."""
    if not isinstance(rows, pa.RecordBatch):
        return [rows[n] for n in kept]
    rows = rows.take(pa.array(kept, pa.int64()))
    try:
        return rows.to_pylist()
    except UnicodeDecodeError:
        columns = [
            [one and one.decode("utf-8", "replace") for one in column.cast(pa.binary()).to_pylist()]
            if pa.types.is_string(column.type)
            else column.to_pylist()
            for column in rows.columns
        ]
        names = rows.schema.names
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _group_rows(source: Source) -> list[int]:
    """The rows of each row group of a Parquet shard."""
    with source.reading(), source.open() as file:
        metadata = open_parquet(file, source.name, say=False).metadata
        return [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]


def sample(sources: Sequence[Source], where: Where, count: int, seed: int) -> Iterator[list[Row]]:
    """A random sample of the rows for which the expression is true, in order."""
    drawn = _drawn_by_number if where.predicate is None else _drawn_of_matches
    for source, numbers in drawn(sources, where, count, seed):
        wanted, left = np.sort(numbers), len(numbers)
        with source.reading():
            for part, first, rows in _parts_with(source, wanted):
                at = first
                for batch in batches_of(part):
                    stop.check()
                    low, high = np.searchsorted(wanted, [at, at + len(batch)])
                    if kept := (wanted[low:high] - at).tolist():
                        yield kept_rows(batch, source, at, kept)
                    at, left = at + len(batch), left - len(kept)
                    if not left or at >= first + rows:
                        break


def _parts_with(source: Source, wanted: np.ndarray) -> Iterator[tuple[Source, int, float]]:
    """(the part of a shard, its first row, its rows) of the row groups with some of the rows."""
    if source.form != "parquet":
        yield source, 0, np.inf
        return
    first = 0
    for group, rows in enumerate(_group_rows(source)):
        if np.searchsorted(wanted, first) < np.searchsorted(wanted, first + rows):
            yield replace(source, groups=(group,)), first, rows
        first += rows


def _drawn_by_number(
    sources: Sequence[Source], _where: Where, count: int, seed: int
) -> Iterator[tuple[Source, np.ndarray]]:
    """The shards with rows of the sample, and the numbers of these rows."""
    counts = np.array(rows_by_shard(sources), np.int64)
    total, ends = int(counts.sum()), np.cumsum(counts)
    numbers = np.array(random.Random(seed).sample(range(total), min(count, total)), np.int64)
    of_shard = np.searchsorted(ends, numbers, side="right")
    for shard in np.unique(of_shard).tolist():
        yield sources[shard], numbers[of_shard == shard] - (ends[shard] - counts[shard])


def _drawn_of_matches(
    sources: Sequence[Source], where: Where, count: int, seed: int
) -> Iterator[tuple[Source, np.ndarray]]:
    """As `_drawn_by_number`. Each row gets a random key; those with the lowest are the sample."""
    draw = np.random.default_rng(seed)
    best = np.zeros((0, 3))  # key, shard, row
    for shard, source in enumerate(sources):
        at = 0
        with source.reading():
            for rows in batches_of(source, where.columns(source) or None):
                stop.check()
                matching = at + np.flatnonzero(where.mask(rows, source.name))
                keys = draw.random(len(matching))
                new = np.stack([keys, np.full(len(matching), shard), matching], 1)
                best = np.concatenate([best, new])
                best = best[np.argsort(best[:, 0], kind="stable")[:count]]
                at += len(rows)
    for shard in np.unique(best[:, 1]).tolist():
        yield sources[int(shard)], best[best[:, 1] == shard, 2].astype(np.int64)


def rows_by_shard(sources: Sequence[Source]) -> list[int]:
    """The rows of each shard: of Parquet from the manifest beside it, if that has its size, else
    from its footer; of other formats by reading them."""
    manifests: dict[str, dict[str, Any]] = {}
    counts = []
    for source in sources:
        stop.check()
        folder, name = os.path.split(source.name)
        if folder not in manifests:
            manifests[folder] = {one["name"]: one for one in manifest_of(folder).get("shards", ())}
        listed = manifests[folder].get(name)
        if listed and "rows" in listed and listed.get("size_bytes") == os.path.getsize(source.name):
            counts.append(int(listed["rows"]))
        elif (rows := source.rows()) is not None:
            counts.append(rows)
        else:
            with source.reading():
                counts.append(sum(len(rows) for rows in batches_of(source)))
    return counts


def manifest_of(folder: str) -> dict[str, Any]:
    """The manifest of an output directory; {} if it has none that can be read."""
    try:
        return read_json(os.path.join(folder, MANIFEST))
    except (OSError, ValueError):
        return {}
