"""Temporary files that are written once and then read or mapped: arrays, and an id column."""

import ctypes
import os
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa


def release_memory() -> None:
    """Give memory that is free in this process back to the system, so that the next phase does not
    add to what the one before needed; of malloc with glibc only."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Spool:
    """A temporary file that is written once and then read or mapped.

    Without a `path` it is unnamed, in `directory` (None: the directory for temporary files).
    """

    def __init__(self, path: str = "", mode: str = "w+b", directory: str | None = None) -> None:
        self.file: Any = (
            open(path, mode) if path else tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        )

    @property
    def path(self) -> str:
        """A path that other processes can open while this process runs."""
        return f"/proc/{os.getpid()}/fd/{self.file.fileno()}"

    def append(self, values: np.ndarray) -> None:
        """Append the bytes of an array."""
        self.file.write(np.ascontiguousarray(values).data)

    def array(self, dtype: np.dtype[Any] | type[Any] | str, shape: tuple[int, ...]) -> np.ndarray:
        """The written data as a read-only array."""
        self.file.flush()
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(self.file, dtype, mode="r", shape=shape)


class IdSpool:
    """The id column on disk, as an Arrow file, and how many rows each source has."""

    def __init__(self, spool: Spool | None = None, sources: int = 1) -> None:
        self.spool, self.rows = spool or Spool(), np.zeros(sources + 1, np.int64)
        schema = pa.schema([("id", pa.string())])
        self.writer = pa.ipc.new_stream(self.spool.file, schema)

    @property
    def starts(self) -> np.ndarray:
        """int64[sources + 1]: the first row of each source, and the end."""
        return np.cumsum(self.rows)

    def append(self, ids: pa.Array, source: int = 0) -> None:
        """Add the ids of one batch."""
        self.writer.write_batch(pa.RecordBatch.from_arrays([ids], names=["id"]))
        self.rows[source + 1] += len(ids)

    def close(self) -> None:
        """Finish writing."""
        self.writer.close()
        self.spool.file.flush()

    def take(self, rows: np.ndarray) -> pa.Array:
        """Ids of ascending row numbers; closes the spool to writing."""
        self.close()
        return self.read(self.spool, rows)

    @staticmethod
    def read(spool: Spool, rows: np.ndarray) -> pa.Array:
        """Ids of ascending row numbers from a spool that was written before."""
        parts, first = [pa.array([], pa.string())], 0
        with pa.OSFile(spool.path) as file:
            for batch in pa.ipc.open_stream(file):
                low, high = np.searchsorted(rows, (first, first + batch.num_rows))
                parts.append(batch.column(0).take(pa.array(rows[low:high] - first)))
                first += batch.num_rows
        return pa.concat_arrays(parts)
