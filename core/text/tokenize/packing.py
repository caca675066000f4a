"""Pack documents of any length into rows of length T, without losing tokens or boundaries.

`sequential` concatenates documents and cuts where a row is full: only the last row has padding.
`best-fit` cuts only documents longer than T and puts the pieces into rows, longest first, each
where it leaves the least free space, in windows of WINDOW pieces (Ding et al. 2024, arXiv
2404.10830: fewer truncations); rows may end in padding. Batches of the input do not matter.
A row holds `input_ids[T]`, `document_lengths` (the rest of T is padding), `loss_mask[T]` (0 on
padding), `source` (that of its documents, MIXED where they differ), for each piece of a document
its address (`document_ids` and `document_offsets`, the number of its first token in the document),
and an id, a hash of the tokens and lengths.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.shards import schemas

MIXED = "mixed"
WINDOW = 4096


@dataclass(frozen=True)
class PackedRows:
    """n packed rows: ids[n, T], and for each piece of a document, in order, its row, its length,
    the code of its source, the id of the document (strings), its first token's number in it."""

    ids: np.ndarray
    piece_rows: np.ndarray
    piece_lengths: np.ndarray
    piece_sources: np.ndarray
    piece_documents: pa.Array
    piece_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


class SequentialPacker:
    """Concatenates documents; holds less than one row between calls."""

    def __init__(self, length: int, pad_id: int) -> None:
        self.length, self.pad_id = length, pad_id
        self._tokens, none = np.empty(0, np.int32), np.empty(0, np.int64)
        # lengths, sources, documents and offsets of pieces, as in PackedRows
        self._pieces: tuple[Any, ...] = none, none, pa.array([], pa.string()), none

    def add(
        self, tokens: np.ndarray, lengths: np.ndarray, sources: np.ndarray, documents: pa.Array
    ) -> Iterator[PackedRows]:
        """Add documents: tokens[Σ lengths], and the length, source code and id of each."""
        held_lengths, held_sources, held_documents, held_offsets = self._pieces
        tokens = np.concatenate([self._tokens, tokens])
        offsets = np.concatenate([held_offsets, np.zeros(len(lengths), np.int64)])
        lengths = np.concatenate([held_lengths, lengths])
        sources = np.concatenate([held_sources, sources])
        documents = pa.concat_arrays([held_documents, documents])
        rows = len(tokens) // self.length
        row, size, document, offset = _cut(lengths, self.length)
        documents = documents.take(pa.array(document))
        pieces = size, sources[document], documents, offset + offsets[document]
        inside = int(np.searchsorted(row, rows))  # pieces in whole rows
        whole = rows * self.length
        self._tokens = tokens[whole:].astype(np.int32)
        self._pieces = tuple(part[inside:] for part in pieces)
        if rows:
            ids = tokens[:whole].reshape(rows, self.length).astype(np.int32, copy=False)
            yield PackedRows(ids, row[:inside], *(part[:inside] for part in pieces))

    def flush(self) -> Iterator[PackedRows]:
        """The remaining row; the packer is empty afterwards."""
        if len(self._tokens):
            ids = np.full((1, self.length), self.pad_id, np.int32)
            ids[0, : len(self._tokens)] = self._tokens
            rows = PackedRows(ids, np.zeros(len(self._pieces[0]), np.int64), *self._pieces)
            SequentialPacker.__init__(self, self.length, self.pad_id)
            yield rows


class BestFitPacker:
    """Best-fit decreasing; holds less than WINDOW pieces between calls."""

    def __init__(self, length: int, pad_id: int) -> None:
        self.length, self.pad_id = length, pad_id
        self._pieces: list[np.ndarray] = []
        self._about: list[tuple[int, str, int]] = []  # source, document, offset of each piece

    def add(
        self, tokens: np.ndarray, lengths: np.ndarray, sources: np.ndarray, documents: pa.Array
    ) -> Iterator[PackedRows]:
        """See SequentialPacker."""
        start, about = 0, zip(sources.tolist(), documents.to_pylist(), strict=True)
        for size, (source, document) in zip(lengths.tolist(), about, strict=True):
            for cut in range(start, start + size, self.length):
                self._pieces.append(tokens[cut : min(cut + self.length, start + size)].copy())
                self._about.append((source, document, cut - start))
                if len(self._pieces) == WINDOW:
                    yield from self.flush()
            start += size

    def flush(self) -> Iterator[PackedRows]:
        if not self._pieces:
            return
        pieces, about = self._pieces, self._about
        self._pieces, self._about = [], []
        bins = best_fit([len(piece) for piece in pieces], self.length)
        ids = np.full((len(bins), self.length), self.pad_id, np.int32)
        for row, members in enumerate(bins):
            joined = np.concatenate([pieces[i] for i in members])
            ids[row, : len(joined)] = joined
        order = [i for members in bins for i in members]
        sources, documents, offsets = zip(*(about[i] for i in order), strict=True)
        yield PackedRows(
            ids,
            np.repeat(np.arange(len(bins)), [len(members) for members in bins]),
            np.array([len(pieces[i]) for i in order], np.int64),
            np.array(sources, np.int64),
            pa.array(documents, pa.string()),
            np.array(offsets, np.int64),
        )


def make_packer(packing: str, length: int, pad_id: int) -> SequentialPacker | BestFitPacker:
    """The packer named `sequential` or `best-fit`, for rows of `length` tokens."""
    kind = BestFitPacker if packing == "best-fit" else SequentialPacker
    return kind(length, pad_id)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`, by best-fit decreasing.

    Ties are in the order of the input, bins in the order of their first members.
    """
    bins: list[list[int]] = []
    by_free: dict[int, list[int]] = {}  # free space → bins that have it
    free_sizes: list[int] = []  # its keys, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        position = bisect.bisect_left(free_sizes, size)
        if position == len(free_sizes):
            free, chosen = capacity, len(bins)
            bins.append([])
        else:
            free = free_sizes[position]
            chosen = by_free[free].pop()
            if not by_free[free]:
                free_sizes.pop(position)
        bins[chosen].append(index)
        if left := free - size:
            if not by_free.get(left):
                bisect.insort(free_sizes, left)
            by_free.setdefault(left, []).append(chosen)
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def to_batch(rows: PackedRows, names: Sequence[str | None]) -> pa.RecordBatch:
    """Rows as records of kind `tokens`; `names` are the sources by code."""
    n, length = rows.ids.shape
    counts = np.bincount(rows.piece_rows, minlength=n)
    used = np.bincount(rows.piece_rows, rows.piece_lengths, minlength=n).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    offsets = np.arange(0, (n + 1) * length, length, dtype=np.int32)
    mask = np.arange(length)[None, :] < used[:, None]
    columns = {
        "id": pa.array(row_ids(rows, ends)),
        "input_ids": pa.ListArray.from_arrays(offsets, pa.array(rows.ids.ravel(), pa.int32())),
        "document_lengths": pa.ListArray.from_arrays(
            ends, pa.array(rows.piece_lengths.astype(np.int32))
        ),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(mask.ravel())),
        "source": pa.array(_row_sources(rows, ends, names), pa.string()),
        "document_ids": pa.ListArray.from_arrays(ends, rows.piece_documents),
        "document_offsets": pa.ListArray.from_arrays(
            ends, pa.array(rows.piece_offsets.astype(np.int32))
        ),
    }
    schema = schemas.KINDS["tokens"]
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def row_ids(rows: PackedRows, ends: np.ndarray) -> list[str]:
    """128-bit hash of ids and document lengths of each row, 32 hex digits."""
    hashes = []
    for row in range(len(rows)):
        lengths = rows.piece_lengths[ends[row] : ends[row + 1]]
        digest = hashlib.blake2b(rows.ids[row].tobytes(), digest_size=16)
        digest.update(lengths.astype("<i8").tobytes())
        hashes.append(digest.hexdigest())
    return hashes


def _cut(lengths: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
    """(row, size, document, number of its first token in the document) of each piece of
    concatenated documents, cut every `length` tokens."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    edges = np.arange(length, total + 1, length)
    cuts = np.union1d(ends, edges)  # sorted, each once
    starts = np.concatenate([[0], cuts[:-1]]) if len(cuts) else cuts
    keep = cuts > starts
    cuts, starts = cuts[keep], starts[keep]
    document = np.searchsorted(ends, starts, side="right")
    return starts // length, cuts - starts, document, starts - (ends - lengths)[document]


def _row_sources(
    rows: PackedRows, ends: np.ndarray, names: Sequence[str | None]
) -> list[str | None]:
    lowest = np.minimum.reduceat(rows.piece_sources, ends[:-1])
    highest = np.maximum.reduceat(rows.piece_sources, ends[:-1])
    pairs = zip(lowest.tolist(), highest.tolist(), strict=True)
    return [names[low] if low == high else MIXED for low, high in pairs]
