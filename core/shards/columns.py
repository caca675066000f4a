"""The union of the columns of several shards, so that all shards of an output have the same.

Readers of a directory (pyarrow, datasets, DuckDB) assume that all files have the columns of the
first. A stage adds the same columns to every batch, but input shards can differ in extra columns
and in the names of the scores. These are collected before the stage runs, from footers and headers,
and every shard is then read with all of them, null where a shard has no such column. If the names
are only in the rows (maps of earlier versions, JSON lines), the rows are read.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa

from sabia.core import stop
from sabia.core.errors import BadData
from sabia.core.shards import schemas
from sabia.core.shards.arrow_arrays import fit as fit_numbers
from sabia.core.shards.arrow_arrays import keys_of, names_of
from sabia.core.shards.json_lines import decompressed, json_score_names
from sabia.core.shards.sources import Source


def unified(sources: Sequence[Any], whole: bool = True, kind: str = "document") -> list[Any]:
    """The sources of records of a kind, which then give batches with the columns of all of them.

    whole: if names of scores are only in the rows, read all rows; else read the first rows of each
    shard (a slice does not read the shards of others), and a name that is not in them is BadData.
    Sources of other records, such as pages, are unchanged. Raises BadData if the types of a column
    cannot be combined.
    """
    of_kind = all(isinstance(one, Source) and one.kind == kind for one in sources)
    if not of_kind or all(source.schema is not None for source in sources):
        return list(sources)
    names: set[str] = set()
    extras: dict[str, tuple[pa.DataType, str]] = {}
    for source in sources:
        stop.check()
        header = _header(source)
        if schemas.is_scores(kind, "scores"):
            names |= score_names(source, whole, header)
        keys = [pa.field(name, pa.string()) for name, _ in source.keys if name not in header.names]
        for field in [*header, *keys]:
            if field.name not in schemas.KINDS[kind].names:
                _join(extras, field, source.name)
    known = schemas.KINDS[kind]
    if schemas.is_scores(kind, "scores"):
        known = schemas.document(tuple(sorted(names)))
    schema = pa.schema([*known, *(pa.field(name, type_) for name, (type_, _) in extras.items())])
    return [replace(source, schema=schema) for source in sources]


def with_columns(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """The batch with the columns and scores that the other parts of an output have, null where it
    has none; BadData if it has others."""
    names, index = set(batch.schema.names), batch.schema.get_field_index("scores")
    if index >= 0 and "scores" in schema.names:
        kind = schema.field("scores").type
        own, there = names_of(batch.schema.field(index).type), names_of(kind)
        names |= {f"scores[{name!r}]" for name in set(own or ()).difference(there or ())}
        if own is not None and there is not None and set(own) <= set(there):
            scores = fit_numbers(batch.column(index), there)
            batch = batch.set_column(index, pa.field("scores", scores.type), scores)
    if odd := sorted(names.difference(schema.names)):
        raise BadData(
            f"--append: the parts in {where} have no {odd[0]}"
            " (expected the same columns in all parts; give another directory)"
        )
    return schemas.fit(batch, schema)


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
    """The columns of a shard; for JSON lines those of the first rows."""
    with source.reading():
        if source.form == "jsonl":
            first = next(source.raw(), None)
            return schemas.KINDS[source.kind] if first is None else first.schema
        schema = source.stored_schema()
        names = source.named(schema.names)
        return pa.schema([f.with_name(n) for f, n in zip(schema, names, strict=True)])


def _join(extras: dict[str, tuple[pa.DataType, str]], field: pa.Field, where: str) -> None:
    """Add a column; if there is one of this name, use the wider type."""
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
