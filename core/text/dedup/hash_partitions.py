"""Hash partitioning of records into temporary files that are read back one at a time.

Records with the same `value` are in the same file, so files can be processed one by one in bounded
memory. A file larger than the limit is partitioned again by further bits; records of one value are
never separated. Records keep the order in which they were added.
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
