"""Conversions of Arrow arrays: text as bytes and offsets in NumPy arrays, casts with one error."""

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData, SabiaError
from sabia.core.optional_imports import leave_out_pandas

leave_out_pandas()


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
