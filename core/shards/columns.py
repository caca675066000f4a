"""The columns of several shards brought together, so that all shards of one output have the same.

Readers of a directory (pyarrow, datasets, DuckDB) take the columns of its first file for those of
all. A stage adds the same columns to every batch; what differs is what its input shards hold: the
columns that a kind does not know, and the names of the scores. They are looked up before the work
begins, in footers and heads, and the shards are then read with all of them, null where a shard has
none. Where names stand in the rows (maps of earlier versions, JSON lines) the rows are read.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core import stop
from sabia.core.errors import BadData
from sabia.core.shards import schemas
from sabia.core.shards.named_numbers import keys_of, names_of
from sabia.core.shards.sources import Source, check_end_of_stream, decompressed, json_score_names


def unified(sources: Sequence[Any], whole: bool = True) -> list[Any]:
    """The sources, set to give batches with the columns of all of them.

    whole: where names of scores stand in the rows, read all rows; else the first ones of each shard
    (a slice does not read the shards of the others) and a name that is missing there is BadData.
    Sources that are no documents, such as pages, are left as they are. Raises BadData where a
    column has types that do not go together.
    """
    if not all(isinstance(one, Source) and one.kind == "document" for one in sources):
        return list(sources)
    if all(source.schema is not None for source in sources):
        return list(sources)
    names: set[str] = set()
    extras: dict[str, tuple[pa.DataType, str]] = {}
    for source in sources:
        stop.check()
        header = _header(source)
        names |= score_names(source, whole, header)
        for field in _others(source, header):
            _join(extras, field, source.name)
    known = schemas.document(tuple(sorted(names)))
    schema = pa.schema([*known, *(pa.field(name, kind) for name, (kind, _) in extras.items())])
    return [replace(source, schema=schema) for source in sources]


def digest(schema: pa.Schema | None) -> str:
    """A hash of the columns, for fingerprints of documents."""
    fields = [schemas.VERSION, *((field.name, str(field.type)) for field in schema or ())]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=8).hexdigest()


def score_names(source: Source, whole: bool = True, header: pa.Schema | None = None) -> set[str]:
    """The names of the scores in a shard of documents; see `unified`."""
    header = _header(source) if header is None else header
    names = names_of(header.field("scores").type) if "scores" in header.names else []
    if names is not None and (source.form != "jsonl" or not whole):
        return set(names)
    with source.reading():
        if source.form == "jsonl":
            with source.open() as file:
                return json_score_names(decompressed(file))
        keys: set[str] = set()
        for batch in islice(source.raw(["scores"]), None if whole else 1):
            stop.check()
            keys |= keys_of(batch.column("scores"))
        return keys


def _header(source: Source) -> pa.Schema:
    """The columns that a shard says it has; of JSON lines those of the rows that decide."""
    with source.reading():
        if source.form == "jsonl":
            first = next(source.raw(), None)
            return schemas.document() if first is None else first.schema
        with source.open() as file:
            if source.form == "parquet":
                schema = pq.ParquetFile(file).schema_arrow
            else:
                check_end_of_stream(file, source.name)
                schema = pa.ipc.open_stream(file).schema
        source.must_have(schema.names)
        return schema


def _others(source: Source, header: pa.Schema) -> list[pa.Field]:
    """The columns that documents do not have by themselves."""
    known = schemas.document().names
    keys = [pa.field(n, pa.string()) for n, _ in source.keys if n not in header.names]
    return [field for field in [*header, *keys] if field.name not in known]


def _join(extras: dict[str, tuple[pa.DataType, str]], field: pa.Field, where: str) -> None:
    """Take in one more column, of the wider type where a column of that name is there."""
    kind = field.type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    before, first = extras.setdefault(field.name, (kind, where))
    if kind == before:
        return
    pair = [pa.schema([(field.name, one)]) for one in (before, kind)]
    try:
        both = pa.unify_schemas(pair, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise BadData(
            f"{where}: column {field.name!r} is {kind}, but {before} in {first}"
            " (expected one type in all shards of one output)"
        ) from error
    if (wider := both.field(0).type) != before:
        extras[field.name] = (wider, where)
