"""Columns brought to another type, with one form of error where that cannot be."""

import pyarrow as pa

from sabia.core.errors import BadData, SabiaError


def cast(
    column: pa.Array, kind: pa.DataType, what: str, expected: str, error: type[SabiaError] = BadData
) -> pa.Array:
    """The column as `kind`; raises `WHAT is TYPE (expected EXPECTED)`, BadData or another error."""
    try:
        return column if column.type == kind else column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as cause:
        raise error(f"{what} is {column.type} (expected {expected})") from cause
