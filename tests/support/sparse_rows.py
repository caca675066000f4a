"""Token rows of any number in Arrow files that take little space, for tests of reading."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.shards import schemas
from sabia.core.shards.token_rows.row_writer import IndexedRows

WITHOUT = ("id", "document_ids", "document_offsets")
SCHEMA = pa.schema([field for field in schemas.KINDS["tokens"] if field.name not in WITHOUT])
HOLE = 1 << 16  # bytes


class SparseFile:
    """A sink of pyarrow that leaves holes where long runs of zeros are written."""

    closed = False

    def __init__(self, file) -> None:
        self.file = file

    def write(self, data) -> int:
        if len(data) >= HOLE and not np.frombuffer(data, np.uint8).any():
            self.file.seek(len(data), os.SEEK_CUR)
        else:
            self.file.write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held."""


def sparse_rows(
    path: Path, batches: int, rows: int = 500, length: int = 2048, index: Any = None
) -> None:
    """An Arrow stream of rows of zeros, of which the ids and masks take no space; index:
    pa.ipc.new_file or new_stream, for a file or stream with the index that stages write."""
    column = pa.ListArray.from_arrays
    offsets = pa.array(np.arange(0, rows * length + 1, length, dtype=np.int32))
    documents = column(np.arange(rows + 1, dtype=np.int32), pa.array([length] * rows, pa.int32()))
    ids, masks = (column(offsets, np.zeros(rows * length, kind)) for kind in (np.int32, bool))
    columns = [ids, documents, masks, pa.array(["web"] * rows)]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    with open(path, "wb") as file:
        target = SparseFile(file)
        stream = _Unhashed(target, SCHEMA, index) if index else pa.ipc.new_stream(target, SCHEMA)
        for _ in range(batches):
            stream.write(batch)
        stream.close()


class _Unhashed(IndexedRows):
    """Hashes nothing: zeros are as many bytes to hash as others."""

    def _digest(self, _batch, _about) -> bytes:
        return b"0" * 32
