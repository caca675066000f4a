"""Conversions of Arrow arrays: text as bytes and offsets in NumPy arrays, casts with one error."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import BadData, SabiaError
from sabia.core.optional_imports import leave_out_pandas

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
