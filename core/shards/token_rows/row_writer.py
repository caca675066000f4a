"""Writes Arrow files of token rows with an index, which is in the metadata of the last batch.

`RowWriter` writes row files, into which shards are unpacked: the columns are those of token records
and `digest`, a `row_digest`. `IndexedRows` writes the Arrow files and streams of stages, such as
`tokenize`. Other programs can read both.
"""

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128

from sabia.core.digests import ArrowRows
from sabia.core.errors import BadData
from sabia.core.shards import records, schemas
from sabia.core.shards.arrow_arrays import bools, int32s
from sabia.core.shards.token_rows.row_file import ADDRESSES, check_lengths, row_digest, row_hash
from sabia.core.shards.token_rows.row_index import INDEX, LISTS, IndexBuilder, encoded

BATCH_ROWS = 512  # so that little is read to resolve the batch of a row
SCHEMA = pa.schema(
    [*((name, pa.list_(kind)) for name, kind in LISTS.items()), ("source", pa.string()),
     ("digest", pa.uint64()), *((name, schemas.KINDS["tokens"].field(name).type)
                                for name in ADDRESSES)]
)  # fmt: skip


class RowWriter:
    """Writes a row file into an open file; `close` completes it."""

    def __init__(self, target: BinaryIO) -> None:
        self._file = pa.ipc.new_file(target, SCHEMA)
        self._index, self._batches = IndexBuilder(), 0
        self.rows, self._largest_id = 0, 0
        self._rejected: list[Any] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Append token records; raises BadData if lengths do not match."""
        for start in range(0, batch.num_rows, BATCH_ROWS):
            part = batch.slice(start, BATCH_ROWS)
            made = self._with_digests(part)
            add_to_index(self._index, self._batches, made)
            self._file.write_batch(made)
            self._batches += 1
            self.rows += part.num_rows

    def reject(self, row: Mapping[str, Any], reason: str, shard: str = "") -> None:
        """Record a row that cannot be used."""
        self._rejected.append([records.to_json(dict(row)), reason, shard])

    def close(self, **about: object) -> None:
        """Write the index and the footer; about: figures that `RowIndex.about` gives back."""
        index = self._index.index(largest_id=self._largest_id, rejected=self._rejected, about=about)
        empty = pa.RecordBatch.from_pylist([], SCHEMA)
        self._file.write_batch(empty, custom_metadata={INDEX: index.to_text().encode()})
        self._file.close()

    def _with_digests(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        tokens, documents = batch.column("input_ids"), batch.column("document_lengths")
        bounds, ends = (
            np.concatenate([[0], np.cumsum(np.diff(int32s(column.offsets)))])
            for column in (tokens, documents)
        )  # [n + 1]
        ids = np.ascontiguousarray(int32s(tokens.flatten()))
        lengths = int32s(documents.flatten())
        check_lengths(self.rows, np.diff(bounds), np.diff(ends), lengths)
        self._largest_id = max(self._largest_id, int(ids.max(initial=0)))
        mask = _mask(batch, bounds)
        sources = pa.repeat(pa.scalar(""), batch.num_rows)
        if "source" in batch.schema.names:
            sources = batch.column("source").cast(pa.string()).fill_null("")
        digests = [
            row_digest(
                ids[bounds[row] : bounds[row + 1]],
                lengths[ends[row] : ends[row + 1]],
                None if mask is None else mask[bounds[row] : bounds[row + 1]],
                source,
            )
            for row, source in enumerate(sources.to_pylist())
        ]
        starts = pa.array(bounds.astype(np.int32))
        masks: Any = pa.nulls(batch.num_rows, SCHEMA.field("loss_mask").type)
        if mask is not None:
            masks = pa.ListArray.from_arrays(starts, pa.array(mask))
        columns = [
            pa.ListArray.from_arrays(starts, pa.array(ids)),
            pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), pa.array(lengths)),
            masks, sources, pa.array(digests, pa.uint64()), *_addresses(batch),
        ]  # fmt: skip
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class IndexedRows(ArrowRows):
    """An Arrow file or stream (`new`) of token records with digests of its batches, and an index of
    the rows. A stream is flushed after each batch."""

    def __init__(
        self, target: BinaryIO, schema: pa.Schema,
        new: Callable[[Any, pa.Schema], Any] = pa.ipc.new_file,
    ) -> None:  # fmt: skip
        self._target, self._is_stream = _Counting(target), new is pa.ipc.new_stream
        super().__init__(self._target, schema, new)
        self._index, self._batches, self._content = IndexBuilder(), 0, xxh3_128()
        self._in_place = self._padding = self._hashes = True

    def write(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            super().write(batch.slice(start, BATCH_ROWS))
            if self._is_stream:
                self._target.flush()

    def _write(self, batch: pa.RecordBatch, about: dict[bytes, bytes]) -> bytes:
        # the schema is written with the first batch
        position = self._target.count or len(self._head)
        if batch.num_rows:
            self._in_place = self._in_place and _has_no_nulls(batch)
            if self._in_place:
                add_to_index(self._index, position if self._is_stream else self._batches, batch)
                self._padding = self._padding and _masks_padding(batch)
                self._hashes = self._hashes and _first_is_hash(batch)
        elif self._in_place:
            stream = {"position": position} if self._is_stream else {}
            index = self._index.index(
                content=self._content.hexdigest(), padding=self._padding, hashes=self._hashes,
                about=stream,
            )  # fmt: skip
            about = about | {INDEX: index.to_text().encode()}
        digest = super()._write(batch, about)
        self._content.update(digest)
        self._batches += 1
        return digest


class _Counting:
    """Passes on what is written, and counts its bytes: a pipe has no position."""

    closed = False

    def __init__(self, target: BinaryIO) -> None:
        self.count, self._target, self.flush = 0, target, target.flush

    def write(self, data: bytes) -> int:
        self._target.write(data)
        self.count += len(data)
        return len(data)


def _has_no_nulls(batch: pa.RecordBatch) -> bool:
    """Whether the lists can be read in place; see `row_index.check_lists`."""
    for name in LISTS:
        column = batch.column(name)
        if name == "loss_mask" and column.null_count == len(column):
            continue
        if column.null_count or column.flatten().null_count:
            return False
    return True


def _first_is_hash(batch: pa.RecordBatch) -> bool:
    """Whether the id of the first row is its hash; the rows of a batch have ids of one kind."""
    if "id" not in batch.schema.names:
        return False
    ids, lengths = (int32s(batch.column(name)[0].values) for name in tuple(LISTS)[:2])
    return bool(batch.column("id")[0].as_py() == row_hash(ids, lengths))


def _masks_padding(batch: pa.RecordBatch) -> bool:
    """Whether every mask leaves out what follows the documents of its row, and nothing else."""
    masks, documents = batch.column("loss_mask"), batch.column("document_lengths")
    if masks.null_count:
        return False
    sizes, counts = np.diff(int32s(masks.offsets)), np.diff(int32s(documents.offsets))
    if (sizes != np.diff(int32s(batch.column("input_ids").offsets))).any():
        return False
    total = np.concatenate([[0], np.cumsum(int32s(documents.flatten()), dtype=np.int64)])
    ends = np.cumsum(counts)
    used = total[ends] - total[ends - counts]  # [n] tokens of a row's documents
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    inside = np.arange(int(sizes.sum())) - first < np.repeat(used, sizes)
    return bool((inside == bools(masks.flatten())).all())


def _addresses(batch: pa.RecordBatch) -> list[pa.Array]:
    """The addresses of the documents, null where the rows have none."""
    return [
        batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows, kind)
        for name, kind in ((name, SCHEMA.field(name).type) for name in ADDRESSES)
    ]


def _mask(batch: pa.RecordBatch, bounds: np.ndarray) -> np.ndarray | None:
    """Which tokens of all rows count, bool[tokens]; None: all."""
    mask = batch.column("loss_mask") if "loss_mask" in batch.schema.names else None
    if mask is None or mask.null_count == len(mask):
        return None
    sizes, has_mask = np.diff(bounds), bools(mask.is_valid())
    if (np.diff(int32s(mask.offsets))[has_mask] != sizes[has_mask]).any():
        raise BadData("token rows: a loss_mask is not as long as its input_ids")
    counted = np.ones(int(bounds[-1]), bool)
    counted[np.repeat(has_mask, sizes)] = bools(mask.flatten())
    return counted


def add_to_index(index: IndexBuilder, at: int, batch: pa.RecordBatch) -> None:
    """Add a batch of token records; at: see `IndexBuilder`."""
    if not batch.num_rows:
        return
    sizes, counts = (np.diff(int32s(batch.column(name).offsets)) for name in tuple(LISTS)[:2])
    codes, names = encoded(batch.column("source"))
    rows = np.bincount(codes, minlength=len(names)).tolist()
    total = int(sizes.sum()), int(sizes.max())
    index.add(at, 0, total, int(counts.max()) <= 1, dict(zip(names, rows, strict=True)))
