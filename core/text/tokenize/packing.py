"""Documents of any length into rows of one length T, no token lost, boundaries kept.

`sequential` lays documents end to end and cuts where a row is full: every row but the last is full.
`best-fit` cuts only documents longer than T and fits the pieces into rows, longest first, each
where it leaves the least room, in windows of WINDOW pieces (Ding et al. 2024, arXiv 2404.10830:
fewer truncations); rows may end in padding. Neither depends on how the input was batched.
A row holds `input_ids[T]`, `document_lengths` (what is left to T is padding), `loss_mask[T]` (0 on
padding), `source` (that of its documents, MIXED where they differ) and an id made of its content.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sabia.core.shards import schemas

MIXED = "mixed"
WINDOW = 4096


@dataclass(frozen=True)
class Rows:
    """n packed rows: ids[n, T], and the pieces of documents in them one after another, each with
    its row, its length and the code of its source."""

    ids: np.ndarray
    piece_rows: np.ndarray
    piece_lengths: np.ndarray
    piece_sources: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


class SequentialPacker:
    """End to end; holds less than one row between calls."""

    def __init__(self, length: int, pad_id: int) -> None:
        self.length, self.pad_id = length, pad_id
        self._tokens = np.empty(0, np.int32)
        self._lengths = np.empty(0, np.int64)
        self._sources = np.empty(0, np.int64)

    def add(self, tokens: np.ndarray, lengths: np.ndarray, sources: np.ndarray) -> Iterator[Rows]:
        """Documents one after another: tokens[Σ lengths], a length and a source code for each."""
        tokens = np.concatenate([self._tokens, tokens])
        lengths = np.concatenate([self._lengths, lengths])
        sources = np.concatenate([self._sources, sources])
        rows = len(tokens) // self.length
        whole = rows * self.length
        pieces = _cut(lengths, self.length)
        row, size, document = pieces
        inside = row < rows
        rest = ~inside
        self._tokens = tokens[whole:].astype(np.int32)
        self._lengths, self._sources = size[rest], sources[document[rest]]
        if rows:
            ids = tokens[:whole].reshape(rows, self.length).astype(np.int32)
            yield Rows(ids, row[inside], size[inside], sources[document[inside]])

    def flush(self) -> Iterator[Rows]:
        """The rest; the packer is empty afterwards."""
        if len(self._tokens):
            ids = np.full((1, self.length), self.pad_id, np.int32)
            ids[0, : len(self._tokens)] = self._tokens
            lengths, sources = self._lengths, self._sources
            SequentialPacker.__init__(self, self.length, self.pad_id)
            yield Rows(ids, np.zeros(len(lengths), np.int64), lengths, sources)


class BestFitPacker:
    """Longest first, each where it fits best; holds less than WINDOW pieces between calls."""

    def __init__(self, length: int, pad_id: int) -> None:
        self.length, self.pad_id = length, pad_id
        self._pieces: list[np.ndarray] = []
        self._sources: list[int] = []

    def add(self, tokens: np.ndarray, lengths: np.ndarray, sources: np.ndarray) -> Iterator[Rows]:
        start = 0
        for size, source in zip(lengths.tolist(), sources.tolist(), strict=True):
            for cut in range(start, start + size, self.length):
                self._pieces.append(tokens[cut : min(cut + self.length, start + size)].copy())
                self._sources.append(source)
                if len(self._pieces) == WINDOW:
                    yield from self.flush()
            start += size

    def flush(self) -> Iterator[Rows]:
        if not self._pieces:
            return
        pieces, sources = self._pieces, self._sources
        self._pieces, self._sources = [], []
        bins = best_fit([len(piece) for piece in pieces], self.length)
        ids = np.full((len(bins), self.length), self.pad_id, np.int32)
        for row, members in enumerate(bins):
            joined = np.concatenate([pieces[i] for i in members])
            ids[row, : len(joined)] = joined
        order = [i for members in bins for i in members]
        yield Rows(
            ids,
            np.repeat(np.arange(len(bins)), [len(members) for members in bins]),
            np.array([len(pieces[i]) for i in order], np.int64),
            np.array([sources[i] for i in order], np.int64),
        )


def make_packer(packing: str, length: int, pad_id: int) -> SequentialPacker | BestFitPacker:
    """`sequential` or `best-fit` into rows of `length` tokens: takes documents in order, gives rows
    when it has them."""
    kind = BestFitPacker if packing == "best-fit" else SequentialPacker
    return kind(length, pad_id)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`: best-fit decreasing, ties in order
    of the input; the bins come in the order of their first members."""
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room left → bins with it
    rooms: list[int] = []  # its keys, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(place)
        bins[chosen].append(index)
        left = room - size
        if left:
            if not by_room.get(left):
                bisect.insort(rooms, left)
            by_room.setdefault(left, []).append(chosen)
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def to_batch(rows: Rows, names: Sequence[str | None]) -> pa.RecordBatch:
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
    }
    schema = schemas.KINDS["tokens"]
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def row_ids(rows: Rows, ends: np.ndarray) -> list[str]:
    """128-bit hash of ids and document lengths of each row, 32 hex digits."""
    found = []
    for row in range(len(rows)):
        lengths = rows.piece_lengths[ends[row] : ends[row + 1]]
        digest = hashlib.blake2b(rows.ids[row].tobytes(), digest_size=16)
        digest.update(lengths.astype("<i8").tobytes())
        found.append(digest.hexdigest())
    return found


def _cut(lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of documents laid end to end and cut every `length` tokens: (row, size, document)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    edges = np.arange(length, total + 1, length)
    cuts = np.union1d(ends, edges)  # sorted, each once
    starts = np.concatenate([[0], cuts[:-1]]) if len(cuts) else cuts
    keep = cuts > starts
    cuts, starts = cuts[keep], starts[keep]
    return starts // length, cuts - starts, np.searchsorted(ends, starts, side="right")


def _row_sources(rows: Rows, ends: np.ndarray, names: Sequence[str | None]) -> list[str | None]:
    lowest = np.minimum.reduceat(rows.piece_sources, ends[:-1])
    highest = np.maximum.reduceat(rows.piece_sources, ends[:-1])
    pairs = zip(lowest.tolist(), highest.tolist(), strict=True)
    return [names[low] if low == high else MIXED for low, high in pairs]
