"""Rows that a stage took out on purpose, with the reason, as one Parquet file.

They are not errors (those go to the rejects): they keep all their columns, so that a threshold can
be judged, and taken back, by looking at what went.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.shards import schemas
from sabia.core.shards.outputs import open_file


def check_path(path: str) -> None:
    """Raise UsageError unless `path` names a Parquet file (or nothing)."""
    if path and not path.endswith(".parquet"):
        raise UsageError(f"--removed: {path} (expected a file ending in .parquet)")


def put_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """Replace a column, or add it behind the others."""
    place = batch.schema.get_field_index(name)
    field = pa.field(name, column.type)
    return (
        batch.append_column(field, column) if place < 0 else batch.set_column(place, field, column)
    )


def with_reason(batch: pa.RecordBatch, reason: pa.Array | str) -> pa.RecordBatch:
    """Set the column `reason`."""
    column = pa.array([reason] * batch.num_rows) if isinstance(reason, str) else reason
    return put_column(batch, "reason", column)


def write_removed(
    path: str, parts: Sequence[Iterable[pa.RecordBatch]], metadata: dict[str, Any]
) -> None:
    """Write the rows of all parts; columns that only some parts have are null in the others.

    Each part is iterated twice (the first time for its first batch) and has one schema.
    """
    heads = [head.schema for part in parts if (head := next(iter(part), None)) is not None]
    empty = schemas.document().append(pa.field("reason", pa.string()))
    try:
        schema = pa.unify_schemas(heads, promote_options="permissive") if heads else empty
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise BadData(f"--removed: shards with columns that differ in type ({error})") from error
    schema = schema.remove_metadata()
    with open_file(path, schema, metadata) as writer:
        for part in parts:
            for batch in part:
                writer.write(_fit(batch, schema))


def _fit(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
