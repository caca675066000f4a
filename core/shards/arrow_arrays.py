"""Conversions of Arrow arrays: text as bytes and offsets in NumPy arrays, casts with one error.

Named numbers of rows, such as the column `scores`, are a struct of doubles, its names in order. A
row without a number has null there; to every reader this means that the name is absent. A column
without any name has the type null (a Parquet file cannot hold a struct without fields). Files of
earlier versions hold a map from names to numbers, which is read in the same way.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import BadData, SabiaError
from sabia.core.process_start import leave_out_pandas

leave_out_pandas()

_OF_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def text_buffers(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(bytes uint8, offsets int64[n + 1]) of a string array without nulls; no copy of the text."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets or b"\0\0\0\0", np.int32)
    bounds = bounds[column.offset : column.offset + len(column) + 1].astype(np.int64)
    return np.frombuffer(data or b"", np.uint8), bounds


def cast(
    column: pa.Array, kind: pa.DataType, what: str, expected: str, error: type[SabiaError] = BadData
) -> pa.Array:
    """The column as `kind`; raises `WHAT is TYPE (expected EXPECTED)`, BadData or another error."""
    try:
        return column if column.type == kind else column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as cause:
        raise error(f"{what} is {column.type} (expected {expected})") from cause


def plain_type(kind: pa.DataType) -> pa.DataType:
    """A type of the same values without views and runs, which polars writes to Arrow files, and for
    which pyarrow has few functions."""
    types = pa.types
    if types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, plain_type(kind.value_type), kind.ordered)
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pa.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    if types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    return _OF_VIEWS.get(kind, kind)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The columns with their `plain_type`, and the metadata."""
    fields = [field.with_type(plain_type(field.type)) for field in schema]
    return pa.schema(fields, schema.metadata)


def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with the columns of `plain_schema`."""
    schema = plain_schema(batch.schema)
    if schema.equals(batch.schema):
        return batch
    arrays = [_plain(batch.column(n), field.type) for n, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column as its `plain_type`; lists are rebuilt, since pyarrow 26 gives views of lists that
    it casts an end beyond their memory."""
    if column.type == kind:
        return column
    if pa.types.is_run_end_encoded(column.type):
        return _plain(pc.run_end_decode(column), kind)
    if pa.types.is_dictionary(kind):
        values = _plain(column.dictionary, kind.value_type)
        return pa.DictionaryArray.from_arrays(column.indices, values, ordered=kind.ordered)
    nulls = column.is_null() if column.null_count else None
    if pa.types.is_struct(kind):
        parts = [_plain(column.field(n), field.type) for n, field in enumerate(kind)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=nulls)
    large = pa.types.is_large_list(kind)
    if large or pa.types.is_list(kind):
        index = pa.int64() if large else pa.int32()
        ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(column).cast(index), 0))
        offsets = pa.concat_arrays([pa.array([0], index), ends])
        lists = pa.LargeListArray if large else pa.ListArray
        values = _plain(column.flatten(), kind.value_type)
        return lists.from_arrays(offsets, values, kind, mask=nulls)
    return column.cast(kind)


def int32s(column: pa.Array) -> np.ndarray:
    """The values of an int32 array without nulls, int32[n]; no copy, and unlike `to_numpy` this
    does not import pandas. Raises BadData if there are nulls."""
    if column.null_count:
        raise BadData("null among numbers (expected a number)")
    buffer = column.buffers()[1] if len(column) else None
    return np.frombuffer(buffer or b"", np.int32)[column.offset : column.offset + len(column)]


def bools(column: pa.Array) -> np.ndarray:
    """The values of a bool array without nulls, bool[n]; like `int32s`."""
    buffer = column.buffers()[1] if len(column) else None
    bits = np.unpackbits(np.frombuffer(buffer or b"", np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].view(np.bool_)


MAP = pa.map_(pa.string(), pa.float64())
MOST_NAMES = 1_000


def type_of(names: Iterable[str]) -> pa.DataType:
    """The type of a column with these names; raises BadData for more than MOST_NAMES."""
    ordered = sorted(set(names))
    if len(ordered) > MOST_NAMES:
        raise BadData(
            f"more than {MOST_NAMES:,} names of scores, such as {ordered[0]!r} (expected names that"
            " documents have in common)"
        )
    return pa.struct([(name, pa.float64()) for name in ordered]) if ordered else pa.null()


def names_of(kind: pa.DataType) -> list[str] | None:
    """The names of a type; None for a map, whose names are in the rows."""
    if pa.types.is_struct(kind):
        return [kind.field(i).name for i in range(kind.num_fields)]
    return None if pa.types.is_map(kind) else []


def keys_of(column: pa.Array) -> set[str]:
    """The names that occur in a column of maps."""
    return set(pc.unique(_entries(_as_map(column))[1]).to_pylist())


def fit(column: pa.Array, names: Sequence[str] | None = None) -> pa.Array:
    """A column of structs, maps or nulls as one of `type_of(names)`; None: of its own names.

    Raises BadData for any other type, or for numbers with another name.
    """
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), type_of(names or ()))
    if pa.types.is_map(column.type):
        return _from_map(_as_map(column), names)
    if not pa.types.is_struct(column.type):
        raise BadData(f"column 'scores' is {column.type} (expected a struct of numbers)")
    own = names_of(column.type) or []
    wanted = type_of(own if names is None else names)
    if column.type == wanted:
        return column
    _refuse_others(set(own), names)
    values = {
        name: cast(column_of(column, name), pa.float64(), f"score {name!r}", "a number")
        for name in own
    }
    return from_columns(values, len(column), wanted, np.asarray(column.is_null()))


def column_of(column: pa.StructArray, name: str) -> pa.Array:
    """The numbers of one name, null where a row is null."""
    return pc.struct_field(column, [column.type.get_field_index(name)])


def from_columns(
    values: dict[str, pa.Array], rows: int, wanted: pa.DataType, mask: np.ndarray | None = None
) -> pa.Array:
    """A column of type `wanted` (of `type_of`) from float64[rows] arrays by name.

    mask: bool[rows], true where a row is null as a whole.
    """
    if pa.types.is_null(wanted):
        return pa.nulls(rows)
    fields = [wanted.field(i) for i in range(wanted.num_fields)]
    nothing = pa.nulls(rows, pa.float64())
    return pa.StructArray.from_arrays(
        [values.get(field.name, nothing) for field in fields],
        fields=fields,
        mask=None if mask is None or not mask.any() else pa.array(mask),
    )


def as_dict(value: Any) -> dict[str, float]:
    """A row's names and numbers, from a Python dict or list of pairs; without nulls."""
    pairs = value.items() if isinstance(value, dict) else value or ()
    return {name: number for name, number in pairs if number is not None}


def _as_map(column: pa.Array) -> pa.MapArray:
    return cast(column, MAP, "column 'scores'", "a struct of numbers")


def _refuse_others(present: set[str], names: Sequence[str] | None) -> None:
    odd = sorted(present.difference(names)) if names is not None else []
    if odd:
        raise BadData(
            f"score {odd[0]!r} does not occur in the first rows of the shards, all that a slice"
            " reads of the others (expected Parquet files whose scores are a struct: write them by"
            " sabia classify, in one job)"
        )


def _entries(column: pa.MapArray) -> tuple[np.ndarray, pa.Array, pa.Array]:
    """(row of each entry int64[m], keys, values) of the rows that are not null."""
    offsets = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    counts = np.diff(offsets)
    low, high = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    keys, values = column.keys.slice(low, high - low), column.items.slice(low, high - low)
    live = np.asarray(column.is_valid())[rows] if len(rows) else np.zeros(0, bool)
    if live.all():
        return rows, keys, values
    return rows[live], keys.filter(pa.array(live)), values.filter(pa.array(live))


def _from_map(column: pa.MapArray, names: Sequence[str] | None) -> pa.Array:
    """If a row has several entries of one name, the last counts."""
    rows, keys, values = _entries(column)
    present = set(pc.unique(keys).to_pylist())
    _refuse_others(present, names)
    wanted = type_of(present if names is None else names)
    ordered = names_of(wanted) or []
    indices = np.asarray(pc.index_in(keys, pa.array(ordered, pa.string())).fill_null(0))
    table = np.zeros((len(ordered), len(column)))
    there = np.zeros(table.shape, bool)
    if len(rows):
        table[indices, rows] = values.fill_null(0).to_numpy(zero_copy_only=False)
        there[indices, rows] = np.asarray(values.is_valid())
    made = {n: pa.array(table[i], mask=~there[i]) for i, n in enumerate(ordered)}
    return from_columns(made, len(column), wanted, np.asarray(column.is_null()))
