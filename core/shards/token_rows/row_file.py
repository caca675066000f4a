"""Token rows of one shard, read where they are in an uncompressed Arrow file.

Opening a shard reads its index (`row_index`). A chunk of a record batch is resolved when one of its
rows is read: where the ids of its rows are, their documents, masks and digests, which are checked
then. The ids of a row are read with `pread`; a row that has a digest is compared with it. Row files
that are made here (`row_writer`) have a column of digests. In shards of `tokenize` the id of a row
is its digest (`row_hash`); ids that are not hashes are recognized by the other rows of their chunk.
"""

import hashlib
import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.shards.token_rows.arrow_messages import (
    ArrowShard,
    BatchLayout,
    FileBytes,
    NotInPlace,
    ShardBytes,
)
from sabia.core.shards.token_rows.row_index import RowIndex, check_lists, sources_of, stored_index

COLUMNS = ("input_ids", "document_lengths", "loss_mask", "source")
ADDRESSES = ("document_ids", "document_offsets")  # of each document; training does not read them
DAMAGE = (NotInPlace, OSError, ValueError, KeyError, IndexError, struct.error, pa.ArrowException)
RESOLVED_BYTES = 12 << 20  # of resolved batches that are kept in memory
TRIED = 8  # rows of a batch that are hashed to see whether its ids are digests
Row = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # ids, lengths of documents, mask


def row_hash(ids: np.ndarray, lengths: np.ndarray) -> str:
    """128-bit BLAKE2b of the ids, int32[T], and the lengths of the documents: a row's id."""
    digest = hashlib.blake2b(ids.astype("<i4", copy=False).tobytes(), digest_size=16)
    digest.update(lengths.astype("<i8").tobytes())
    return digest.hexdigest()


def row_digest(ids: Any, lengths: Any, mask: np.ndarray | None, source: str) -> int:
    """64-bit XXH3 of a row of a row file: int32[T], int32[documents], bool[T]."""
    bits = b"" if mask is None else mask.tobytes()
    sizes = np.array([len(ids), len(lengths), len(bits)], "<i8").tobytes()
    return xxh3_64_intdigest(b"".join((ids, lengths, bits, source.encode(), sizes)))


def check_lengths(first: int, sizes: np.ndarray, counts: np.ndarray, lengths: np.ndarray) -> None:
    """Raise BadData unless the documents of each row fit in it; first: the number of row 0."""
    total = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = np.cumsum(counts)
    inside = total[ends] - total[ends - counts]  # [n] tokens of a row's documents
    wrong = inside > sizes
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadData(
            f"token row {first + row}: documents of {inside[row]} tokens in a row of "
            f"{sizes[row]} (expected document_lengths that sum to at most the row's length)"
        )
    if lengths.min(initial=0) < 0:
        row = first + int(np.searchsorted(ends, np.argmin(lengths), "right"))
        raise BadData(f"token row {row}: a document of {lengths.min()} tokens (expected 0 or more)")


@dataclass
class RowBatch:
    """A chunk of n rows of a record batch: where they are, and what they are compared with.

    at: position of the first id int64[n]; size int64[n] tokens; bounds int64[n + 1] of a row's
    documents in `lengths` int32; mask: position of the first bit int64[n], None where every token
    counts, or all but the padding does; order int64[n]: the rows by source; digests uint64[n] or
    ids, strings of 32 characters.
    """

    shard: ShardBytes
    first: int  # number of the first row in the shard
    at: np.ndarray
    size: np.ndarray
    bounds: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None
    order: np.ndarray
    sources: list[str]
    source: np.ndarray  # number of each row's source, uint16[n]
    digests: np.ndarray | None
    ids: bytes
    padding: bool = False
    has_hashes: bool | None = None  # whether its ids are hashes; None: not known yet

    @property
    def nbytes(self) -> int:
        """About how much memory this takes."""
        return 4_000 + len(self.ids) + 30 * len(self.at) + 4 * len(self.lengths)

    def will_need(self, row: int) -> None:
        """Let the system read a row in advance."""
        self.shard.will_need(int(self.at[row]), 4 * int(self.size[row]))

    def read(self, row: int) -> Row:
        """A row; BadData if it has a digest and is not as it was written."""
        made = ids, lengths, mask = self._unchecked(row)
        if self.digests is not None:
            source = self.sources[self.source[row]]
            same = row_digest(ids, lengths, mask, source) == int(self.digests[row])
        else:
            same = not self.ids or self.has_hashes is False or self._is_hash(row, made)
            if not same and self.has_hashes is None:
                others = [n for n in range(min(TRIED, len(self.at))) if n != row]
                self.has_hashes = any(self._is_hash(n, self._unchecked(n)) for n in others)
                same = not self.has_hashes
        if not same:
            raise BadData(
                f"{self.shard.name}: row {self.first + row} is not as it was written (damaged bits)"
            )
        return made

    def _is_hash(self, row: int, read: Row) -> bool:
        same = row_hash(*read[:2]).encode() == self.ids[32 * row : 32 * row + 32]
        self.has_hashes = self.has_hashes or same or None
        return same

    def _unchecked(self, row: int) -> Row:
        size = int(self.size[row])
        ids = np.frombuffer(self.shard.read(int(self.at[row]), 4 * size), "<i4")
        lengths = self.lengths[self.bounds[row] : self.bounds[row + 1]]
        if self.padding:
            return ids, lengths, np.arange(size) < lengths.sum()
        if self.mask is None:
            return ids, lengths, None
        byte, start = divmod(int(self.mask[row]), 8)
        data = self.shard.read(byte, (start + size + 7) // 8)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return ids, lengths, bits[start : start + size].view(np.bool_)


class _Recent:
    """The batches that were resolved last, of all row files."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, int], RowBatch] = OrderedDict()
        self._nbytes, self._lock, self.keys = 0, Lock(), count()

    def get(self, key: tuple[int, int], resolve: Callable[[], RowBatch]) -> RowBatch:
        with self._lock:
            if (batch := self._held.get(key)) is not None:
                self._held.move_to_end(key)
                return batch
        batch = resolve()
        with self._lock:
            if self._held.setdefault(key, batch) is batch:
                self._nbytes += batch.nbytes
            while self._nbytes > RESOLVED_BYTES and len(self._held) > 1:
                self._nbytes -= self._held.popitem(last=False)[1].nbytes
        return batch


_recent = _Recent()


class RowFile:
    """The rows of a shard; index: see `RowIndex`; sources: the names of those in it.

    source: that of rows without one. digests: rows have them in a column; remake: makes such a file
    again where it is damaged.
    """

    def __init__(
        self, shard: ShardBytes, index: RowIndex, source: str = "", digests: bool = False,
        remake: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.index, self._source = shard.name, index, source
        self._arrow, self._digests, self._remake = ArrowShard(shard), digests, remake
        self.sources = [source if name is None else name for name in index.sources]
        self._key = next(_recent.keys)
        if digests and "digest" not in self._arrow.columns:
            raise BadData(f"{shard.name}: no digests of rows (damaged bits)")

    @classmethod
    def open(cls, path: str | Path, remake: Callable[[], None] | None = None) -> "RowFile":
        """A row file that `RowWriter` wrote; BadData if it is not whole."""
        return cls.of_bytes(FileBytes(str(path)), remake)

    @classmethod
    def of_bytes(cls, shard: ShardBytes, remake: Callable[[], None] | None = None) -> "RowFile":
        """A row file that is open, or in memory; see `open`."""
        try:
            if (index := stored_index(shard)) is None:
                raise ValueError("no index of rows")
            return cls(shard, index, digests=True, remake=remake)
        except (*DAMAGE, BadData) as error:
            reason = str(error).partition("\n")[0]
            raise BadData(
                f"{shard.name}: damaged ({reason}); remove it, and it is made again"
            ) from error

    def __len__(self) -> int:
        return int(self.index.first_row[-1])

    def rejects(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        """(row, reason, shard) of each row that could not be used."""
        for row, reason, shard in self.index.rejected:
            yield json.loads(row), reason, shard

    def batch(self, number: int) -> RowBatch:
        """A chunk of the index, resolved. Raises BadData where it is damaged."""
        return self._repaired(lambda: self._batch(number))

    def read(self, number: int, rows: Sequence[int]) -> list[Row]:
        """Rows of a chunk. Raises BadData where they are damaged."""
        return self._repaired(lambda: [*map(self._batch(number).read, rows)])

    def _batch(self, number: int) -> RowBatch:
        return _recent.get((self._key, number), lambda: self._resolved(number))

    def _repaired(self, read: Callable[[], Any]) -> Any:
        """What `read` gives, after a damaged file has been made again."""
        try:
            return read()
        except BadData as error:
            if self._remake is None:
                raise
            notes.warn(f"{error}; it is made again from its inputs")
            shard = self._arrow.bytes
            if isinstance(shard, FileBytes) and shard.is_current():
                Path(self.name).unlink(missing_ok=True)  # else another process has made it again
            self._remake()
            made = RowFile.open(self.name)
            if not np.array_equal(made.index.entries[:, 1:], self.index.entries[:, 1:]):
                raise BadData(f"{self.name}: its inputs have changed since the start") from error
            self._arrow, self.index, self._key = made._arrow, made.index, made._key
        return read()

    def _resolved(self, number: int) -> RowBatch:
        index, name = self.index, self.name
        first, last = index.first_entry[number : number + 2].tolist()
        begin, end = index.first_row[number : number + 2].tolist()
        try:
            at, start = index.entries[first, :2].tolist()
            layout = self._arrow.batch(at)
            check_lists(self._arrow, layout)
            if layout.rows < start + end - begin:
                raise BadData(f"{layout.rows} rows in a batch (damaged bits)")
            batch = self._with_lists(layout, begin, start, end - begin)
            if last - first > 1:
                batch.source, names = sources_of(
                    self._arrow, layout, start, end - begin, self._source
                )
                batch.order = np.argsort(batch.source, kind="stable")
            else:
                names = [self.sources[index.entries[first, 2]]]
            batch.sources = [name or "" for name in names]
            counts = np.bincount(batch.source, minlength=len(names)).tolist()
            known = [(self.sources[code], rows) for *_, code, rows in index.entries[first:last]]
            if known != [*zip(batch.sources, counts, strict=True)]:
                raise BadData("sources that the index does not have (damaged bits)")
            return batch
        except (*DAMAGE, BadData) as error:
            reason = str(error).partition("\n")[0]
            text = reason if reason.startswith(name) else f"{name}: {reason or 'damaged bits'}"
            raise BadData(text) from error

    def _with_lists(self, layout: BatchLayout, begin: int, start: int, rows: int) -> RowBatch:
        """The lists, digests and ids of a chunk, as if its rows were of one source."""
        read, columns, chunk = self._arrow.bytes.read, self._arrow.columns, (layout, start, rows)
        bounds = self._bounds("input_ids", *chunk)
        documents = self._bounds("document_lengths", *chunk)
        at = layout.buffer(columns["document_lengths"].buffer + 3)[0]
        lengths = np.frombuffer(read(at + 4 * documents[0], 4 * int(np.ptp(documents))), "<i4")
        check_lengths(begin, np.diff(bounds), np.diff(documents), lengths)
        mask = None
        column = columns.get("loss_mask")
        if column is not None and not self.index.padding and not layout.nodes[2 * column.node + 1]:
            bits = self._bounds("loss_mask", *chunk)
            if (np.diff(bits) != np.diff(bounds)).any():
                raise BadData("token rows: a loss_mask is not as long as its input_ids")
            mask = 8 * layout.buffer(column.buffer + 3)[0] + bits[:-1]
        digests = None
        if self._digests:
            position, _ = layout.buffer(columns["digest"].buffer + 1)
            digests = np.frombuffer(read(position + 8 * start, 8 * rows), "<u8")
        first_id = layout.buffer(columns["input_ids"].buffer + 3)[0]
        return RowBatch(
            shard=self._arrow.bytes, first=begin, at=first_id + 4 * bounds[:-1],
            size=np.diff(bounds), bounds=documents - documents[0], lengths=lengths, mask=mask,
            order=np.arange(rows), sources=[], source=np.zeros(rows, np.int64), digests=digests,
            ids=b"" if self._digests else self._ids(*chunk), padding=self.index.padding,
            has_hashes=self.index.hashes or None,
        )  # fmt: skip

    def _bounds(self, name: str, layout: BatchLayout, start: int, rows: int) -> np.ndarray:
        """The offsets of a list, int64[n + 1]; BadData unless they are within its values."""
        column = self._arrow.columns[name]
        position, _ = layout.buffer(column.buffer + 1)
        data = self._arrow.bytes.read(position + 4 * start, 4 * (rows + 1))
        bounds = np.frombuffer(data, "<i4").astype(np.int64)
        bits = 1 if name == "loss_mask" else 32
        size = 8 * layout.buffer(column.buffer + 3)[1] // bits
        if bounds[0] < 0 or (np.diff(bounds) < 0).any() or bounds[-1] > size:
            raise BadData(f"offsets of {name} are damaged (damaged bits)")
        return bounds

    def _ids(self, layout: BatchLayout, start: int, rows: int) -> bytes:
        """The ids of rows, if they are strings of 32 characters, else nothing."""
        column = self._arrow.columns.get("id")
        if column is None or column.kind != pa.string() or layout.nodes[2 * column.node + 1]:
            return b""
        position, _ = layout.buffer(column.buffer + 1)
        bounds = np.frombuffer(self._arrow.bytes.read(position + 4 * start, 4 * (rows + 1)), "<i4")
        if (np.diff(bounds) != 32).any():
            return b""
        text, _ = layout.buffer(column.buffer + 2)
        return bytes(self._arrow.bytes.read(text + int(bounds[0]), 32 * rows))
