"""Records that have to meet: spread over temporary files by a hash, read back one file at a time.

What has the same `value` lands in the same file, so files can be settled one by one in bounded
memory. A file that is larger than the limit is spread again by further bits; one value's records
are never separated. Records keep the order in which they were added.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from sabia.core import stop
from sabia.core.shards.spools import Spool

FAN_BITS = 6
MAX_BITS = 30
_SPREAD = np.uint64(0xD6E8FEB86659FD93)  # values need not be uniform; their products' top bits are
_PIECE = 1 << 20  # records moved at a time


def part_of(mem_bytes: int, jobs: int) -> int:
    """The most bytes of one file where `jobs` threads work and as many files again wait."""
    return max(mem_bytes // (2 * (jobs + 1)), 1 << 16)


class HashedFiles:
    """Files of records of a structured dtype with a field `value` (uint64)."""

    def __init__(self, dtype: np.dtype, used_bits: int = 0) -> None:
        self.dtype, self.used_bits = dtype, used_bits
        self.spools: list[Any] = [Spool() for _ in range(1 << FAN_BITS)]
        self.counts = np.zeros(1 << FAN_BITS, np.int64)

    def add(self, records: np.ndarray) -> None:
        """Append records to their files."""
        place = _bits(records["value"], self.used_bits, FAN_BITS).astype(np.uint8)
        order = np.argsort(place, kind="stable")
        counts = np.bincount(place, minlength=len(self.spools))
        ordered, ends = records[order], np.cumsum(counts)
        for file in np.flatnonzero(counts):
            self.spools[file].append(ordered[ends[file] - counts[file] : ends[file]])
        self.counts += counts

    def files(self, limit_bytes: int) -> Iterator[tuple[np.ndarray, int]]:
        """(all records of some values, how many bits of the hash they share), file by file.

        No more than `limit_bytes` of records at once, unless one value has more.
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
            smaller = HashedFiles(self.dtype, bits)
            for low in range(0, count, _PIECE):
                smaller.add(np.array(records[low : low + _PIECE]))
            del records, spool
            yield from smaller.files(limit_bytes)


def _bits(values: np.ndarray, skipped: int, count: int) -> np.ndarray:
    return ((values * _SPREAD) << np.uint64(skipped)) >> np.uint64(64 - count)


def gathered(records: np.ndarray, shared_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(records with equal values side by side in their order, starts int64[g + 1] of the groups).

    Values that differ share a group where 32 bits of their hash agree.
    """
    key = _bits(records["value"], shared_bits, 32) << np.uint64(32)
    key = np.sort(key | np.arange(len(records), dtype=np.uint64))
    groups = key >> np.uint64(32)
    fresh = np.ones(len(key), bool)
    fresh[1:] = groups[1:] != groups[:-1]
    starts = np.append(np.flatnonzero(fresh), len(key))
    return records[(key & np.uint64(0xFFFFFFFF)).astype(np.int64)], starts
