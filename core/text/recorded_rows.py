"""Rows of shards that a stage reads twice, in a temporary file after they were decoded once.

Decompressing and checking Parquet or JSON again takes several times the CPU time of writing the
decoded rows and reading them. At most MOST_BYTES are kept, and a quarter of the free disk space;
further shards are read again, and so are shards with rejects, which the last pass writes. Arrow
shards are not decoded at all. Each batch has a digest, which is checked when it is read.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
from xxhash import xxh3_64_intdigest

from sabia.core.errors import BadData
from sabia.core.shards import schemas
from sabia.core.shards.schemas import Reject
from sabia.core.shards.sources import BATCH_ROWS, Source, ignore_reject
from sabia.core.shards.spools import Spool

MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class RecordedSource(Source):
    """A source whose conforming batches are read from a file; batches_at: offset, bytes, digest."""

    path: str = ""
    stored: bytes = b""  # the schema of the batches, as a message of Arrow
    batches_at: tuple[tuple[int, int, int], ...] = ()

    def batches(
        self, columns: Sequence[str] | None = None, rows: int = BATCH_ROWS,
        reject: Reject = ignore_reject,
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        """See Source. Raises BadData if the temporary file is damaged."""
        columns = columns or self.columns
        schema = pa.ipc.read_schema(pa.py_buffer(self.stored)) if self.stored else None
        with pa.OSFile(self.path) as file:
            for offset, size, digest in self.batches_at:
                file.seek(offset)
                message = file.read_buffer(size)
                if xxh3_64_intdigest(message) != digest:
                    raise BadData(
                        f"{self.name}: its rows in the temporary file are damaged; run again"
                    )
                batch = pa.ipc.read_record_batch(message, schema)
                if columns is not None:
                    batch = batch.select([n for n in columns if n in batch.schema.names])
                elif self.schema is not None:
                    batch = schemas.fit(batch, self.schema)
                for first in range(0, batch.num_rows, rows):
                    yield batch.slice(first, rows)


class RowRecorder:
    """Sources for the first pass, which keep their rows, and then those for the last pass."""

    def __init__(self, sources: Sequence[Source], columns: Sequence[str]) -> None:
        """columns: those that the first pass needs, all that is read of a shard not kept."""
        self._spool, self._bytes = Spool(), 0
        free = shutil.disk_usage(tempfile.gettempdir()).free
        self._limit = min(MOST_BYTES, free // 4)
        self._columns = columns
        self._again: list[Source] = list(sources)
        self.first_pass: list[Any] = [_Recording(self, i) for i in range(len(sources))]

    def again(self) -> list[Source]:
        """The sources for the last pass, after the first one is complete."""
        self._spool.file.flush()
        return self._again

    def batches(self, index: int) -> Iterator[pa.RecordBatch]:
        """The batches of a shard, which are kept if all fit."""
        source = self._again[index]
        if source.form == "arrow" or source.stream is not None or not self._fits(source):
            yield from source.batches(self._columns)
            return
        start, at, schema = self._bytes, list[tuple[int, int, int]](), None
        whole = True

        def reject(_row: dict[str, Any], _reason: str) -> None:
            nonlocal whole
            whole = False

        for batch in source.batches(reject=reject):
            schema = schema or batch.schema
            whole = whole and _is_plain(schema) and batch.schema.equals(schema)
            if whole and self._bytes + batch.nbytes <= self._limit:
                message = batch.serialize()
                at.append((self._bytes, message.size, xxh3_64_intdigest(message)))
                self._spool.file.write(message)
                self._bytes += message.size
            else:
                whole = False
            yield batch
        if whole:
            head = schema.serialize().to_pybytes() if schema else b""
            given = {f.name: getattr(source, f.name) for f in fields(source)}
            self._again[index] = RecordedSource(
                **given, path=self._spool.path, stored=head, batches_at=tuple(at)
            )
        else:
            self._spool.file.seek(start)
            self._spool.file.truncate()
            self._bytes = start

    def _fits(self, source: Source) -> bool:
        """Whether the rows of a shard may fit; only Parquet states their bytes."""
        return (source.decoded_bytes() or 0) <= self._limit - self._bytes


class _Recording:
    """A source of the first pass."""

    def __init__(self, recorder: RowRecorder, index: int) -> None:
        source = recorder._again[index]
        self._recorder, self._index = recorder, index
        self.name, self.rows = source.name, source.rows

    def batches(self, _columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All columns of a shard that is kept, else those that the first pass needs."""
        return self._recorder.batches(self._index)


def _is_plain(schema: pa.Schema) -> bool:
    """Whether batches are complete messages: no values in dictionaries of their own."""
    return "dictionary<" not in str(schema)
