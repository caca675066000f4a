"""Token rows with random access, and batches of them.

All rows are stored flat (ids, document lengths, mask), in memory if they are small, otherwise in
memory-mapped temporary files, so that reading in a permuted order decodes no Parquet. Batches are
built with array operations: segments number the documents of a row from 1 (0 is padding), positions
restart in each, and a token's target is the next token of the same document; a token's `loss_mask`
says whether that token is a target.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData

MEMORY_BYTES = 512 << 20  # of each column; larger ones are on disk
SOURCES = 32  # losses are reported for this many sources, the last of which holds all others
COLUMNS = ("input_ids", "document_lengths", "loss_mask", "source")
Batch = dict[str, np.ndarray]


class _Column:
    """Numbers of one type that are appended, then read as one array."""

    def __init__(self, dtype: type) -> None:
        self.dtype = np.dtype(dtype)
        self.spool = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - kept open

    def append(self, values: np.ndarray) -> None:
        self.spool.write(np.ascontiguousarray(values, self.dtype).data)

    def array(self) -> np.ndarray:
        size = self.spool.tell() // self.dtype.itemsize
        if not size:
            return np.zeros(0, self.dtype)
        if self.spool._rolled:  # type: ignore[attr-defined]  # on disk; there is no public test
            self.spool.flush()
            return np.memmap(self.spool._file, self.dtype, "r", shape=(size,))
        self.spool.seek(0)
        return np.frombuffer(self.spool.read(), self.dtype)


@dataclass(frozen=True)
class TokenRows:
    """n rows: row r is ids[row_start[r]:row_start[r + 1]], and its documents likewise.

    `mask` is empty if no row has one. Rows are numbered source by source; `source_sizes`: rows of
    each source.
    """

    ids: np.ndarray
    row_start: np.ndarray
    document_lengths: np.ndarray
    document_start: np.ndarray
    mask: np.ndarray
    by_source: np.ndarray  # row numbers as read, grouped by source
    source_names: tuple[str, ...]
    source_sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.row_start) - 1

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return len(self.ids)

    @cached_property
    def row_length(self) -> int:
        """Length of the longest row."""
        return int(np.diff(self.row_start).max(initial=0))

    @cached_property
    def unpacked(self) -> bool:
        """True if no row holds more than one document."""
        return bool((np.diff(self.document_start) <= 1).all())

    @cached_property
    def largest_id(self) -> int:
        """The largest token id."""
        return int(self.ids.max(initial=0))

    @property
    def reported_sources(self) -> tuple[str, ...]:
        """Names for the columns of a batch's `source`."""
        if len(self.source_names) <= SOURCES:
            return self.source_names
        return (*self.source_names[: SOURCES - 1], "(others)")

    def batch(self, rows: np.ndarray, length: int | None = None) -> Batch:
        """The rows (numbers in source order) as a batch of arrays [B, T], T the longest of them.

        input_ids, targets, segments, positions int32; loss_mask float32 (1 where the target
        counts); source float32 [B, S], one-hot.
        """
        number = self.by_source[rows]  # [B], in the order of reading
        start, size = self.row_start[number], np.diff(self.row_start)[number]
        width = length or int(size.max(initial=1))
        column = np.arange(width)  # [T]
        valid = column < size[:, None]  # [B, T]
        flat_index = np.minimum(start[:, None] + column, max(len(self.ids) - 1, 0))  # [B, T]
        ids = np.where(valid, self.ids[flat_index], 0).astype(np.int32)
        segments, positions = self._documents(number, width)
        targets, has_target = np.zeros_like(ids), np.zeros(ids.shape, bool)
        targets[:, :-1] = ids[:, 1:]
        # the next token is in the same document, which is not padding
        has_target[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        if len(self.mask):
            has_target[:, :-1] &= self.mask[flat_index[:, 1:]]
        batch = {"input_ids": ids, "targets": targets, "loss_mask": has_target.astype(np.float32)}
        return batch | {"segments": segments, "positions": positions, "source": self._one_hot(rows)}

    def _documents(self, number: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """(segments, positions) [B, width] of the rows; 0 after the last document."""
        first, last = self.document_start[number], self.document_start[number + 1]
        counts = last - first  # [B] documents of each row
        row = np.repeat(np.arange(len(number)), counts)  # [documents of the batch]
        # 0, 1, … in each row
        document_in_row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        # [documents of the batch]
        lengths = self.document_lengths[first[row] + document_in_row].astype(np.int64)
        total = np.cumsum(lengths)
        # [B] tokens of the rows before
        tokens_before = np.concatenate([[0], total])[np.cumsum(counts) - counts]
        begins = total - lengths - tokens_before[row]  # column at which each document starts
        ends = np.zeros(len(number), np.int64)  # [B] end of each row's last document
        np.maximum.at(ends, row, begins + lengths)
        starts_at = np.zeros((len(number), width + 1), np.int32)
        # [B, T + 1]: how many documents start at a column; empty ones do not count
        np.add.at(starts_at, (row, np.minimum(begins, width)), (lengths > 0).astype(np.int32))
        column = np.arange(width)
        in_document = column < ends[:, None]
        segments = np.where(in_document, np.cumsum(starts_at[:, :width], 1), 0).astype(np.int32)
        # [B, T]: start of the document that a column is in
        origin = np.maximum.accumulate(np.where(starts_at[:, :width] > 0, column, 0), 1)
        return segments, np.where(in_document, column - origin, 0).astype(np.int32)

    def source_of(self, rows: np.ndarray) -> np.ndarray:
        """Index of each row's source."""
        return np.searchsorted(np.cumsum(self.source_sizes), rows, side="right")

    def _one_hot(self, rows: np.ndarray) -> np.ndarray:
        code = np.minimum(self.source_of(rows), SOURCES - 1)
        return np.eye(len(self.reported_sources), dtype=np.float32)[code]


def read_token_rows(batches: Iterable[pa.RecordBatch]) -> TokenRows:
    """Read token records; raises BadData if lengths do not match."""
    ids, lengths, mask = _Column(np.int32), _Column(np.int32), _Column(np.bool_)
    row_sizes: list[np.ndarray] = []
    document_counts: list[np.ndarray] = []
    codes: list[np.ndarray] = []
    names: dict[str, int] = {}
    masked = False
    for batch in batches:
        columns = {name: batch.column(name) for name in COLUMNS if name in batch.schema.names}
        tokens = columns["input_ids"]
        _check_lengths(columns)
        row_sizes.append(np.diff(tokens.offsets.to_numpy()))
        ids.append(tokens.flatten().to_numpy())
        documents = columns["document_lengths"]
        document_counts.append(np.diff(documents.offsets.to_numpy()))
        lengths.append(documents.flatten().to_numpy())
        values, given = _mask(columns.get("loss_mask"), row_sizes[-1])
        mask.append(values)
        masked |= given
        codes.append(_source_codes(columns.get("source"), batch.num_rows, names))
    if not row_sizes or not sum(len(part) for part in row_sizes):
        raise BadData("no token rows (expected at least one row of tokens)")
    code = np.concatenate(codes)
    return TokenRows(
        ids=ids.array(),
        row_start=_starts(row_sizes),
        document_lengths=lengths.array(),
        document_start=_starts(document_counts),
        mask=mask.array() if masked else np.zeros(0, bool),
        by_source=np.argsort(code, kind="stable"),
        source_names=tuple(names),
        source_sizes=tuple(int(n) for n in np.bincount(code, minlength=len(names))),
    )


def _starts(sizes: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)])


def _check_lengths(columns: dict[str, pa.Array]) -> None:
    import pyarrow.compute as pc

    tokens, documents = columns["input_ids"], columns["document_lengths"]
    sizes = np.diff(tokens.offsets.to_numpy())
    parents = pc.list_parent_indices(documents).to_numpy()
    inside = np.bincount(parents, documents.flatten().to_numpy(), minlength=len(sizes))
    if len(sizes) and (inside > sizes).any():
        row = int(np.argmax(inside > sizes))
        raise BadData(
            f"token row {row}: documents of {inside[row]:.0f} tokens in a row of {sizes[row]} "
            "(expected document_lengths that sum to at most the row's length)"
        )


def _mask(column: pa.Array | None, sizes: np.ndarray) -> tuple[np.ndarray, bool]:
    """(the flat mask, whether any row has one); in rows without a mask all tokens count."""
    if column is None or column.null_count == len(column):
        return np.ones(int(sizes.sum()), bool), False
    given = np.diff(column.offsets.to_numpy())
    has = column.is_valid().to_numpy(zero_copy_only=False)
    if (given[has] != sizes[has]).any():
        raise BadData("token rows: a loss_mask is not as long as its input_ids")
    flat = np.ones(int(sizes.sum()), bool)
    flat[np.repeat(has, sizes)] = column.flatten().to_numpy(zero_copy_only=False)
    return flat, True


def _source_codes(column: pa.Array | None, rows: int, names: dict[str, int]) -> np.ndarray:
    """Index of each row's source; new sources are added to `names`."""
    if column is None:
        return np.full(rows, names.setdefault("", len(names)), np.int64)
    encoded = column.fill_null("").dictionary_encode()
    known = [names.setdefault(name, len(names)) for name in encoded.dictionary.to_pylist()]
    return np.array(known, np.int64)[encoded.indices.to_numpy()]
