"""From repeats, found in any order, to the cuts of documents in theirs.

A repeat is a window of units (bytes, tokens, lines, sentences) whose first equal window ends before
it begins; a run is repeats side by side whose first occurrences are side by side too.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from sabia.core.text.cuts import CUT
from sabia.core.text.sketching import Spool
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
