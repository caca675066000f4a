"""From repeats, found in any order, to cuts in document order.

A repeat is a window of units (bytes, tokens, lines, sentences) whose first equal window ends before
it starts; a run is a sequence of adjacent repeats whose first occurrences are adjacent as well.

Records are partitioned by hash into temporary files that are read back one at a time. Records with
the same `value` are in the same file, so files can be processed one by one in bounded memory. A
file larger than the limit is partitioned again by further bits; records of one value are never
separated. Records keep the order in which they were added.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from sabia.core import stop
from sabia.core.shards.executors.processes import map_threads
from sabia.core.shards.spools import IdSpool, Spool
from sabia.core.text.dedup.span_cuts import CUT, CutPolicy, Cuts
from sabia.kernels.substring.definitions import Repeats

RUN = np.dtype([("start", "i8"), ("count", "i8"), ("first", "i8")])
_BUCKETS = 64
FAN_BITS = 6
MAX_BITS = 30
_SPREAD = np.uint64(0xD6E8FEB86659FD93)  # values need not be uniform; their products' top bits are
_PIECE = 1 << 20  # records moved at a time


def partition_bytes(mem_bytes: int, jobs: int) -> int:
    """Maximum bytes of one file if `jobs` threads work and as many further files wait."""
    return max(mem_bytes // (2 * (jobs + 1)), 1 << 16)


class Partitions:
    """Temporary files of records, and how many records each has."""

    def __init__(self, count: int) -> None:
        self.spools: list[Any] = [Spool() for _ in range(count)]
        self.counts = np.zeros(count, np.int64)

    def append(self, records: np.ndarray, partition: np.ndarray) -> None:
        """Append records to the files of these numbers, in their order."""
        order = np.argsort(partition, kind="stable")
        counts = np.bincount(partition, minlength=len(self.spools))
        ordered, ends = records[order], np.cumsum(counts)
        for file in np.flatnonzero(counts):
            self.spools[file].append(ordered[ends[file] - counts[file] : ends[file]])
        self.counts += counts


class HashPartitions(Partitions):
    """Files of records of a structured dtype with a field `value` (uint64)."""

    def __init__(self, dtype: np.dtype, used_bits: int = 0) -> None:
        super().__init__(1 << FAN_BITS)
        self.dtype, self.used_bits = dtype, used_bits

    def add(self, records: np.ndarray) -> None:
        """Append records to their files."""
        bits = _bits(records["value"], self.used_bits, FAN_BITS)
        self.append(records, bits.astype(np.uint8))

    def files(self, limit_bytes: int) -> Iterator[tuple[np.ndarray, int]]:
        """(all records of some values, number of hash bits that they share), file by file.

        At most `limit_bytes` of records at once, unless one value has more.
        """
        bits = self.used_bits + FAN_BITS
        for number, count in enumerate(self.counts.tolist()):
            stop.check()
            spool, self.spools[number] = self.spools[number], None
            if not count:
                continue
            records = spool.array(self.dtype, (count,))
            if count * self.dtype.itemsize <= limit_bytes or bits >= MAX_BITS:
                yield np.array(records), bits
                continue
            smaller = HashPartitions(self.dtype, bits)
            for low in range(0, count, _PIECE):
                smaller.add(np.array(records[low : low + _PIECE]))
            del records, spool
            yield from smaller.files(limit_bytes)


def _bits(values: np.ndarray, skipped: int, count: int) -> np.ndarray:
    return ((values * _SPREAD) << np.uint64(skipped)) >> np.uint64(64 - count)


def group_by_value(records: np.ndarray, shared_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(records with equal values adjacent and in their order, starts int64[g + 1] of the groups).

    Different values share a group if 32 bits of their hash agree.
    """
    key = _bits(records["value"], shared_bits, 32) << np.uint64(32)
    key = np.sort(key | np.arange(len(records), dtype=np.uint64))
    groups = key >> np.uint64(32)
    is_first = np.ones(len(key), bool)
    is_first[1:] = groups[1:] != groups[:-1]
    starts = np.append(np.flatnonzero(is_first), len(key))
    return records[(key & np.uint64(0xFFFFFFFF)).astype(np.int64)], starts


class Units(Protocol):
    """Converts spans of units to bytes."""

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes [low, high) of spans of units [first, last), within their documents.

        starts: of the spans' documents; joined[i]: span i + 1 starts where span i ends, and so must
        their bytes.
        """


class UnitBounds:
    """The bytes of every unit of the corpus, on disk; see Units."""

    def __init__(self) -> None:
        self.unit_bounds, self.count = Spool(), 0

    def add(self, unit_bounds: np.ndarray) -> None:
        """Append uint32[m, 2]: start and end byte of each unit in its text."""
        self.unit_bounds.append(unit_bounds)
        self.count += len(unit_bounds)

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See Units."""
        bounds = self.unit_bounds.array(np.uint32, (self.count, 2))
        low, high = bounds[first, 0].astype(np.int64), bounds[last - 1, 1].astype(np.int64)
        high[:-1][joined] = low[1:][joined]
        return low, np.maximum(high, low)


class UnitCorpus:
    """A corpus as units: its ids, the first unit of each document, and records with a field `start`
    (a unit), partitioned by their `value`."""

    def __init__(self, units: Units, records: np.dtype, sources: int) -> None:
        self.units, self.files, self.ids = units, HashPartitions(records), IdSpool(sources=sources)
        self._starts, self._count = [np.zeros(1, np.int64)], 0

    @property
    def starts(self) -> np.ndarray:
        """int64[n + 1]: the first unit of each document, and the end."""
        self._starts = [np.concatenate(self._starts)]
        return self._starts[0]

    def add(self, source: int, ids: pa.Array, counts: np.ndarray, records: np.ndarray) -> None:
        """Append a batch: number of units of each document int64[rows], and its records."""
        self.ids.append(ids, source)
        records["start"] += self._count
        self.files.add(records)
        self._starts.append(self._count + np.cumsum(counts))
        self._count += int(counts.sum())

    def cuts(
        self,
        find_repeats: Callable[[tuple[np.ndarray, int]], Repeats],
        limit: int,
        span: int,
        jobs: int,
        policy: CutPolicy,
        directory: Path | None,
    ) -> Cuts:
        """Find repeats partition by partition, at most `limit` bytes each, and order the cuts; see
        Cuts.write."""
        runs = ByDocument(self.starts)
        for repeats in map_threads(find_repeats, self.files.files(limit), jobs):
            runs.add(repeats)
        return Cuts.write(*runs.cuts(self.units, span), self.ids, policy, directory)


class ByDocument(Partitions):
    """Runs of repeats on disk, by ranges of documents of about equal size."""

    def __init__(self, starts: np.ndarray) -> None:
        """starts int64[n + 1]: the first unit of each document, and the end."""
        even = np.linspace(0, starts[-1], _BUCKETS + 1)[1:-1]
        self.starts = starts
        self.edges = np.unique(starts[np.searchsorted(starts, even)])
        super().__init__(len(self.edges) + 1)

    def add(self, repeats: Repeats) -> None:
        """Append runs to their ranges."""
        runs = np.empty(len(repeats.start), RUN)
        runs["start"], runs["count"], runs["first"] = repeats
        self.append(runs, np.searchsorted(self.edges, runs["start"], side="right"))

    def cuts(self, units: Units, span: int) -> tuple[Spool, int]:
        """CUT of all runs of windows of `span` units, by document: a spool and their number.

        Runs that continue one another, as do their first occurrences, within one document each are
        merged first.
        """
        cut_spool, cut_count = Spool(), 0
        for spool, number in zip(self.spools, self.counts.tolist(), strict=True):
            if not number:
                continue
            runs = np.sort(np.array(spool.array(RUN, (number,))), order="start")
            start, count, first = (runs[name] for name in ("start", "count", "first"))
            apart = np.zeros(len(runs) - 1, bool)
            for position in (start, first):
                document = np.searchsorted(self.starts, position, side="right")
                apart |= position[:-1] + count[:-1] != position[1:]
                apart |= document[:-1] != document[1:]
            heads = np.flatnonzero(np.append(True, apart))
            merged = Repeats(start[heads], np.add.reduceat(count, heads), first[heads])
            cuts = as_cuts(merged, self.starts, units, span)
            cut_spool.append(cuts)
            cut_count += len(cuts)
        return cut_spool, cut_count


def as_cuts(runs: Repeats, starts: np.ndarray, units: Units, span: int) -> np.ndarray:
    """CUT[c] of runs of repeats by ascending start: disjoint, each with the copy that is kept.

    Where runs overlap, the shared bytes belong to the earlier one. starts int64[n + 1]: of
    documents.
    """
    ends = runs.start + runs.count - 1 + span
    before = np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))
    low = np.maximum(runs.start, before)
    new = low < ends
    low, high, kept = low[new], ends[new], (runs.first + low - runs.start)[new]
    row, kept_row = (np.searchsorted(starts, at, side="right") - 1 for at in (low, kept))
    joined = high[:-1] == low[1:]
    joined &= row[:-1] == row[1:]
    cuts = np.empty(len(low), CUT)
    cuts["row"], cuts["kept"] = row, kept_row
    cuts["start"], cuts["stop"] = units.bytes_of(starts[row], low, high, joined)
    cuts["from"] = units.bytes_of(starts[kept_row], kept, kept + 1, np.zeros(len(joined), bool))[0]
    return cuts[cuts["start"] < cuts["stop"]]
