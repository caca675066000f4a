"""From repeats, found in any order, to the cuts of documents in theirs.

A repeat is a window of units (bytes, tokens, lines, sentences) whose first equal window ends before
it begins; a run is repeats side by side whose first occurrences are side by side too.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa

from sabia.core.shards.executor import map_threads
from sabia.core.shards.spools import IdSpool, Spool
from sabia.core.text.dedup.hash_partitions import HashedFiles
from sabia.core.text.dedup.span_cuts import CUT, Cuts
from sabia.kernels.substring import Repeats

RUN = np.dtype([("start", "i8"), ("count", "i8"), ("first", "i8")])
_BUCKETS = 64


class Units(Protocol):
    """What spans of units are in bytes."""

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes [low, high) of spans of units [first, last), within their documents.

        starts: of the spans' documents; joined[i]: span i + 1 begins where span i ends, and so
        must their bytes.
        """


class Places:
    """The bytes of every unit of the corpus, on disk; see Units."""

    def __init__(self) -> None:
        self.places, self.count = Spool(), 0

    def add(self, places: np.ndarray) -> None:
        """Append uint32[m, 2]: the bytes of units in their texts."""
        self.places.append(places)
        self.count += len(places)

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See Units."""
        del starts
        places = self.places.array(np.uint32, (self.count, 2))
        low, high = places[first, 0].astype(np.int64), places[last - 1, 1].astype(np.int64)
        high[:-1][joined] = low[1:][joined]
        return low, np.maximum(high, low)


class Laid:
    """A corpus laid down as units: its ids, the first unit of each document, and records with a
    field `start` (a unit), filed by their `value`."""

    def __init__(self, units: Units, records: np.dtype, sources: int) -> None:
        self.units, self.files, self.ids = units, HashedFiles(records), IdSpool(sources=sources)
        self._starts, self._count = [np.zeros(1, np.int64)], 0

    @property
    def starts(self) -> np.ndarray:
        """int64[n + 1]: the first unit of each document, and the end."""
        self._starts = [np.concatenate(self._starts)]
        return self._starts[0]

    def add(self, source: int, ids: pa.Array, counts: np.ndarray, records: np.ndarray) -> None:
        """Append a batch: units of each document int64[rows], records that begin at its units."""
        self.ids.append(ids, source)
        records["start"] += self._count
        self.files.add(records)
        self._starts.append(self._count + np.cumsum(counts))
        self._count += int(counts.sum())

    def cuts(
        self, settle: Callable[[tuple[np.ndarray, int]], Repeats], limit: int, span: int, jobs: int
    ) -> Cuts:
        """Settle file after file, of `limit` bytes at most, then go through documents in order."""
        runs = ByDocument(self.starts)
        for repeats in map_threads(settle, self.files.files(limit), jobs):
            runs.add(repeats)
        return Cuts.write(*runs.cuts(self.units, span), self.ids)


class ByDocument:
    """Runs of repeats on disk, by ranges of documents of about equal size."""

    def __init__(self, starts: np.ndarray) -> None:
        """starts int64[n + 1]: the first unit of each document, and the end."""
        even = np.linspace(0, starts[-1], _BUCKETS + 1)[1:-1]
        self.starts = starts
        self.edges = np.unique(starts[np.searchsorted(starts, even)])
        self.spools = [Spool() for _ in range(len(self.edges) + 1)]
        self.counts = np.zeros(len(self.spools), np.int64)

    def add(self, repeats: Repeats) -> None:
        """Append runs to their ranges."""
        runs = np.empty(len(repeats.start), RUN)
        runs["start"], runs["count"], runs["first"] = repeats
        place = np.searchsorted(self.edges, runs["start"], side="right")
        order = np.argsort(place, kind="stable")
        counts = np.bincount(place, minlength=len(self.spools))
        ends = np.cumsum(counts)
        for number in np.flatnonzero(counts):
            mine = order[ends[number] - counts[number] : ends[number]]
            self.spools[number].append(runs[mine])
        self.counts += counts

    def cuts(self, units: Units, span: int) -> tuple[Spool, int]:
        """CUT of all runs of windows of `span` units, by document: a spool and their number."""
        spool, count = Spool(), 0
        for runs in self._in_order():
            cuts = as_cuts(runs, self.starts, units, span)
            spool.append(cuts)
            count += len(cuts)
        return spool, count

    def _in_order(self) -> Iterator[Repeats]:
        """Runs of one range of documents after the other, by rising start, as long as can be."""
        for spool, count in zip(self.spools, self.counts.tolist(), strict=True):
            if count:
                runs = np.sort(np.array(spool.array(RUN, (count,))), order="start")
                yield _joined(runs, self.starts)


def _joined(runs: np.ndarray, starts: np.ndarray) -> Repeats:
    """Runs that continue one another in one document as one."""
    start, count, first = (runs[name] for name in ("start", "count", "first"))
    document = np.searchsorted(starts, start, side="right")
    fresh = np.ones(len(runs), bool)
    fresh[1:] = (start[:-1] + count[:-1] != start[1:]) | (first[:-1] + count[:-1] != first[1:])
    fresh[1:] |= document[:-1] != document[1:]
    heads = np.flatnonzero(fresh)
    return Repeats(start[heads], np.add.reduceat(count, heads), first[heads])


def as_cuts(runs: Repeats, starts: np.ndarray, units: Units, span: int) -> np.ndarray:
    """CUT[c] of runs of repeats by rising start: disjoint, each with the copy that is kept.

    Where runs overlap, the earlier has the bytes they share. starts int64[n + 1]: of documents.
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
