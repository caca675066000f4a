"""The outputs that a report looks into, recognised by their columns, and rows of them by value.

Only the columns that are compared are read of all rows; other columns are read of the row groups
that have a match.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sabia.core import stop
from sabia.core.digests import open_parquet
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import file_ending
from sabia.core.shards.json_lines import decompressed
from sabia.core.shards.layout import rejects_beside
from sabia.core.shards.lineage.outputs_found import outputs_below
from sabia.core.shards.outputs import read_metadata
from sabia.core.shards.sources import Source, may_lack_ids

REJECTS = {"reason", "shard", "record"}
RUN_RECORD = "run.json"


@dataclass(frozen=True)
class Output:
    """The shards of one output; kind: tokens, chat, document, removed or rejects."""

    path: str
    kind: str
    sources: tuple[Source, ...]

    @cached_property
    def command(self) -> str:
        """The command that made it; '' if it records none."""
        return str(self.made.get("command") or "")

    @cached_property
    def made(self) -> dict[str, Any]:
        """The provenance of its first shard."""
        return provenance_of(self.sources[0])


def provenance_of(source: Source) -> dict[str, Any]:
    """The provenance of a shard; {} if it has none."""
    return (None if source.name.startswith("<") else read_metadata(source.name)) or {}


def open_outputs(
    inputs: Sequence[str], text_column: str = ""
) -> tuple[list[Output], list[str]]:  # fmt: skip
    """The outputs in the order of the pipeline, as far as their provenance tells it, else as given;
    and the run directories."""
    outputs, runs = list[Output](), list[str]()
    for given in [path for one in inputs for path in _outputs_of(one)]:
        if os.path.isfile(os.path.join(given, RUN_RECORD)):
            runs.append(given)
            continue
        outputs.append(_output(given, text_column))
        if os.path.isdir(given) and os.path.isdir(beside := rejects_beside(given)):
            outputs.append(_output(beside, text_column))
    return _in_order(outputs), runs


def _outputs_of(given: str) -> list[str]:
    """The path itself or, for a directory that only contains outputs, their paths."""
    if not os.path.isdir(given):
        return [given]
    below = outputs_below([given])
    if not below or os.path.abspath(given) in below:
        return [given]
    return [
        os.path.join(given, os.path.relpath(path, given)).removeprefix("./")
        for path, output in below.items()
        if os.path.isfile(os.path.join(path, RUN_RECORD))
        or (os.path.exists(path) and (output.shards or _has_records(path)))
    ]


def _has_records(path: str) -> bool:
    """Whether a file has documents, conversations, tokens, or rows that a stage left out."""
    if not os.path.isfile(path) or not file_ending(path):
        return False
    names = set(column_names(from_path(path, "document", "INPUT")[0]))
    return names == REJECTS or bool(names & {"text", "messages", "input_ids"})


def _output(given: str, text_column: str) -> Output:
    sources = from_path(given, "document", "INPUT")
    with sources[0].reading():
        kind = _kind(column_names(sources[0]))
    if kind in ("document", "removed"):
        sources = [
            replace(source, text_column=text_column if text_column in column_names(source) else "")
            for source in sources
        ]
    known = {"tokens": "tokens", "chat": "chat"}.get(kind, "document")
    return Output(given, kind, tuple(replace(source, kind=known) for source in sources))


def column_names(source: Source) -> list[str]:
    """The names of a shard's columns."""
    if source.form != "jsonl":
        return list(source.stored_schema().names)
    with source.open() as file:
        try:
            first = json.loads(decompressed(file).readline() or b"{}")
        except ValueError:  # no JSON, or an object of several lines
            return []
    return list(first) if isinstance(first, dict) else []


def _kind(names: Sequence[str]) -> str:
    if set(names) == REJECTS:
        return "rejects"
    for name, kind in {"input_ids": "tokens", "messages": "chat", "reason": "removed"}.items():
        if name in names:
            return kind
    return "document"


def _in_order(outputs: Sequence[Output]) -> list[Output]:
    """An output after those that it was made of."""
    origins = [{source.origin for source in output.sources} - {""} for output in outputs]
    made_of = [
        [n for n, those in enumerate(origins) if those & set(output.made.get("origins", []))]
        for output in outputs
    ]
    depths: dict[int, int] = {}

    def depth(number: int, seen: tuple[int, ...] = ()) -> int:
        if number not in depths:
            before = [n for n in made_of[number] if n != number and n not in seen]
            depths[number] = 1 + max((depth(n, (*seen, number)) for n in before), default=0)
        return depths[number]

    return [outputs[n] for n in sorted(range(len(outputs)), key=lambda n: (depth(n), n))]


Found = tuple[np.ndarray, pa.Table]  # numbers of rows in the shard int64[n], the rows


def rows_with(
    source: Source, wanted: Mapping[str, pa.Array], columns: Sequence[str] | None = None
) -> Iterator[Found]:
    """The rows of a shard in which one of the columns has one of the values wanted of it, with
    `columns` (None: all). In a list, any element counts."""
    with source.reading():
        if source.form == "parquet":
            with source.open() as file:
                parquet = open_parquet(file, source.name, say=False)
                if source.kind != "document" or not may_lack_ids(parquet.metadata):
                    yield from _of_parquet(source, parquet, wanted, columns)
                    return
        first = 0
        for batch in source.batches():
            stop.check()
            rows = np.flatnonzero(_matches(batch, wanted))
            if len(rows):
                table = pa.Table.from_batches([batch.take(pa.array(rows))])
                if columns is not None:
                    table = table.select([n for n in columns if n in table.schema.names])
                yield first + rows, table
            first += batch.num_rows


def _of_parquet(
    source: Source,
    parquet: pq.ParquetFile,
    wanted: Mapping[str, pa.Array],
    columns: Sequence[str] | None,
) -> Iterator[Found]:
    stored = parquet.schema_arrow.names
    compared = [name for name in wanted if name in stored]
    read = None if columns is None else [name for name in columns if name in stored]
    first = 0
    for group in range(parquet.num_row_groups):
        stop.check()
        rows = np.flatnonzero(_matches(parquet.read_row_group(group, compared), wanted))
        if len(rows):
            table = parquet.read_row_group(group, read).take(pa.array(rows))
            yield first + rows, table.rename_columns(source.named(stored) if read is None else read)
        first += parquet.metadata.row_group(group).num_rows


def _matches(rows: pa.RecordBatch | pa.Table, wanted: Mapping[str, pa.Array]) -> np.ndarray:
    """Whether each row has one of the values, bool[n]."""
    matched = np.zeros(rows.num_rows, bool)
    for name, values in wanted.items():
        if name not in rows.schema.names:
            continue
        column = rows.column(name)
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        at = 0
        for chunk in chunks:
            if pa.types.is_list(chunk.type):
                hits = pc.is_in(chunk.flatten(), values)
                of_row = pc.list_parent_indices(chunk).to_numpy()
                matched[at + of_row[hits.to_numpy(zero_copy_only=False)]] = True
            elif not pa.types.is_null(chunk.type):
                hits = pc.is_in(chunk, values)
                matched[at : at + len(chunk)] |= hits.to_numpy(zero_copy_only=False)
            at += len(chunk)
    return matched


def rejected_with(source: Source, wanted: Mapping[str, pa.Array]) -> Iterator[dict[str, Any]]:
    """The rejects of a shard whose record has one of the values: the record, with `reason`."""
    sets = {name: set(values.to_pylist()) for name, values in wanted.items()}
    with source.reading():
        for row in _reject_rows(source):
            record = json.loads(row["record"])
            if any(record.get(name) in values for name, values in sets.items()):
                yield record | {"reason": row["reason"]}


def _reject_rows(source: Source) -> Iterator[dict[str, Any]]:
    if source.form == "parquet":
        with source.open() as file:
            parquet = open_parquet(file, source.name, say=False)
            for batch in parquet.iter_batches():
                yield from batch.to_pylist()
    elif source.form == "arrow":
        with source.open_arrow() as (_, batches):
            for batch in batches:
                yield from batch.to_pylist()
    else:
        with source.open() as raw:
            yield from map(json.loads, decompressed(raw))
