"""From repeats, found in any order, to cuts in document order.

A repeat is a window of units (bytes, tokens, lines, sentences) whose first equal window ends before
it starts; a run is a sequence of adjacent repeats whose first occurrences are adjacent as well.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from sabia.core.shards.executors.processes import map_threads
from sabia.core.shards.spools import IdSpool, Spool
from sabia.core.text.dedup.hash_partitions import HashPartitions, Partitions
from sabia.core.text.dedup.span_cuts import CUT, CutPolicy, Cuts
from sabia.kernels.substring.definitions import Repeats

RUN = np.dtype([("start", "i8"), ("count", "i8"), ("first", "i8")])
_BUCKETS = 64


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
