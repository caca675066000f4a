"""String columns of Arrow as bytes and offsets in NumPy arrays, without a copy of the text."""

import numpy as np
import pyarrow as pa


def text_buffers(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(bytes uint8, offsets int64[n + 1]) of a string array without nulls; no copy of the text."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets or b"\0\0\0\0", np.int32)
    bounds = bounds[column.offset : column.offset + len(column) + 1].astype(np.int64)
    return np.frombuffer(data or b"", np.uint8), bounds
